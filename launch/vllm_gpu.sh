#!/usr/bin/env bash
# Starts a vLLM server on GPUs of this machine, for a trainer on other GPUs of it or on another machine:
#
#   launch/vllm_gpu.sh --model DIR [other arguments of python -m jaxrl_llm.tools.serve_vllm; -- arguments of vLLM]
#
#   CUDA_VISIBLE_DEVICES=1  GPUs that the server may use [all]
#   PYTHON=python3          interpreter for the server's environment .vllm (3.11 or newer)
#
# The server is restarted if its engine dies. configs/recipes/qwen2_5_0_5b_gsm8k_vllm.py is a run that uses it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/library.sh"
help_of_head "$@"
cd "$root"

if ! [ -e .vllm/.installed ]; then
  "${PYTHON:-python3}" -m venv .vllm
  .vllm/bin/python -m pip install -q vllm==0.32.0
  touch .vllm/.installed
fi
exec .vllm/bin/python -m jaxrl_llm.tools.serve_vllm "$@"
