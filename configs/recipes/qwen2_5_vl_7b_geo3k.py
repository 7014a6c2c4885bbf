"""GRPO on geometry3k, problems with an image, with Qwen2.5-VL-7B and the settings of EasyR1's example for it.

pip install -e '.[parquet,vision]'
hf download hiyouga/geometry3k --repo-type dataset --local-dir data/geometry3k
jaxrl train --config configs/recipes/qwen2_5_vl_7b_geo3k.py --workdir runs/geo3k

The settings are those of qwen2_5_7b_math.py and, in EasyR1's words, min_pixels 262,144, max_pixels 4,194,304,
freeze_vision_tower false, reward_function math.py. Two things differ: the prompt asks for thought and box in other
words; the evaluation is greedy (EasyR1 samples at temperature 0.6).

Hardware: one host of eight H100s of 80 GB, or a TPU v5p:2x2x2. Memory: 97 % at most of what JAX takes of an H100 (75 %
of it; 92 % of 90 %, which XLA_CLIENT_MEM_FRACTION=0.9 gives it), while it computes prompts, and 66 % in the update; 87
and 33 % of a TPU chip. Time: 127 s a step on the GPUs and 278 s on the TPUs where all completions that are learned from
have 2,048 tokens. The times are estimates at published speeds. This command printed it, and the same with --topology
v5p:2x2x2:

jaxrl plan --config configs/recipes/qwen2_5_vl_7b_geo3k.py --topology h100:8 --prompt-tokens 1024 --pixels 512x512 \\
  --config.model.path=jaxrl_llm/assets/qwen2_5_vl_7b

Expected: 0.37 to 0.48 on the 601 problems of the test set is EasyR1's result with GRPO (assets/baselines.md, v0.3.2).
Not measured here. tests/selftest/test_self_test_configs.py makes an update with a small model.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.recipes import qwen2_5_7b_math  # configs/grpo.py explains every field


def get_config() -> ConfigDict:
    c = qwen2_5_7b_math.get_config()
    c.num_steps = 60  # 15 epochs of 2,101 problems
    c.model.path = "Qwen/Qwen2.5-VL-7B-Instruct"
    c.data.source, c.data.convert = "data/geometry3k/data/train-*.parquet", ""
    c.data.prompt_column, c.data.image_column = "problem", "images"
    c.data.format_prompt = f"{{{{ content }}}}\n\n{qwen2_5_7b_math.FORM}"
    c.data.min_pixels, c.data.max_pixels = 512 * 512, 2048 * 2048  # smaller images are enlarged
    c.eval.source, c.eval.convert, c.eval.problems = "data/geometry3k/data/test-*.parquet", "", 601
    c.reward.functions, c.reward.weights = ("easyr1.math",), (1.0,)
    return c
