from dataclasses import dataclass, field

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser


@dataclass
class Arguments(ScriptArguments):
    kind: str = field(default="loose")


def accuracy(completions, answer, **kwargs):
    return [2.0 * (a in c) - 1.0 for c, a in zip(completions, answer)]


if __name__ == "__main__":
    script, config, model = TrlParser((Arguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    rows = load_dataset(script.dataset_name, name=script.dataset_config, split=script.dataset_train_split)
    config.temperature = 0.6
    config.scale_rewards = "none" if script.kind == "loose" else "batch"
    if script.kind == "strict":
        config.learning_rate = 5e-7
    trainer = GRPOTrainer(model.model_name_or_path, [accuracy], config, rows)
    trainer.train()
