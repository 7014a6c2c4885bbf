#!/usr/bin/env bash
# A vLLM server on GPUs of this machine, for a trainer on its other GPUs or on another machine:
#
#   launch/vllm_gpu.sh --model DIR [other arguments of python -m jaxrl_llm.serve_vllm; -- vLLM's own]
#
#   CUDA_VISIBLE_DEVICES=1  the GPUs it may use [all]
#   PYTHON=python3          interpreter its environment (.vllm) is made with (3.11 or newer)
#
# It is started again when its engine dies. configs/recipes/qwen2_5_0_5b_gsm8k_vllm.py is a run that uses it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

if ! [ -e .vllm/.installed ]; then
  "${PYTHON:-python3}" -m venv .vllm
  .vllm/bin/python -m pip install -q vllm==0.32.0
  touch .vllm/.installed
fi
exec .vllm/bin/python -m jaxrl_llm.serve_vllm "$@"
