"""SimPO (arXiv 2405.14734) on the pairs of UltraFeedback: the second step, after gemma3_1b_sft.py, on v5e:2x4.

jaxrl sft --config configs/recipes/gemma3_1b_simpo.py --workdir runs/gemma3_1b_simpo

beta, gamma, learning rate, warm-up and batch are those that the paper's authors use for Gemma 2 9B (gamma / beta 0.5).
For DPO set --config.loss.name=dpo, --config.loss.beta=0.1 and a rate of 5e-7, and remove gamma in a file of your own.

Expected: the share of held-out pairs in which the chosen answer has the larger reward rises, and is in eval/accuracy.
Nothing here is measured. tests/programs/test_recipes.py runs this file with a small model of the same architecture.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs.recipes import gemma3_1b_sft


def get_config() -> ConfigDict:
    c = gemma3_1b_sft.get_config()
    c.model.path = "runs/gemma3_1b_sft/hf"
    # Rows in TRL's format have their prompt in both columns.
    c.data.convert, c.data.completion_column, c.data.rejected_column = "", "chosen", "rejected"
    c.loss = ConfigDict(dict(name="simpo", beta=10.0, gamma=5.0, label_smoothing=0.0, nll_coef=0.0))
    c.aggregate.mode = "sequence_mean"
    c.eval = ConfigDict(dict(every=100, convert="", problems=960, patience=0))
    c.eval.source, c.eval.function = "data/ultrafeedback/data/test-*.parquet", "preference"
    c.microbatch = 8
    c.optim.learning_rate = 8e-7
    return c
