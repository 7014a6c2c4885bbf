"""qwen2_5_0_5b_gsm8k.py with rollouts from vLLM on one GPU and the trainer on another. Nothing here is measured yet.

CUDA_VISIBLE_DEVICES=1 launch/vllm_gpu.sh --model Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16 --max-model-len 1024
CUDA_VISIBLE_DEVICES=0 EXTRA=cuda launch/local.sh --config configs/recipes/qwen2_5_0_5b_gsm8k_vllm.py
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo_vllm  # configs/grpo_vllm.py explains the fields of `engine`
from jaxrl_llm.configs.recipes import qwen2_5_0_5b_gsm8k  # the run without vLLM


def get_config() -> ConfigDict:
    c = qwen2_5_0_5b_gsm8k.get_config()
    c.engine = grpo_vllm.get_config().engine
    c.engine.managed, c.engine.servers = False, ("http://127.0.0.1:8000",)
    c.rollout.max_lag = 1  # sample the next batch while the run learns from this one
    return c
