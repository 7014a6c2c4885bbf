"""The work of a config of benchmarks/real by TRL's GRPOTrainer, for `python -m benchmarks.real --trl`.

Prints a JSON object for each step: its seconds, the completions that it rewarded, their mean reward and length, and the
accuracy on held-out problems where it is measured. Needs TRL (benchmarks/speed/environments.txt).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.real import tasks

AT_ONCE = 64  # held-out problems
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear"}


class Case(NamedTuple):
    """What a config of this folder says with names."""

    rows: Callable[[], list[dict[str, Any]]]
    held_out: Callable[[], list[dict[str, Any]]]
    reward: Callable[..., list[float]]
    judged: Callable[..., list[float]]  # of held-out problems


CASES = {
    "plain_addition": Case(tasks.addition, tasks.addition_held_out, tasks.exact, tasks.exact),
    "tldr": Case(tasks.posts, tasks.posts_held_out, tasks.length, tasks.is_near),
}


class Progress(TrainerCallback):
    """Prints the steps, and measures greedy accuracy. The seconds of a step leave the evaluation out."""

    trainer: GRPOTrainer

    def __init__(self, case: Case, settings: dict[str, Any]):
        self.case, self.problems = case, case.held_out()[: settings["eval.problems"]]
        self.every, self.last = settings["eval.every"], settings["last"]
        self.tokens, self.rewarded = settings["rollout.max_completion_tokens"], 0

    def reward(self, completions: list[Any], **columns: Any) -> list[float]:
        """The reward of the case. Counts the completions."""
        self.rewarded += len(completions)
        return [float(x) for x in self.case.reward(completions=completions, **columns)]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        print(json.dumps({"step": 0, "eval/accuracy": self.measure()}), flush=True)
        self.began = perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" not in logs:
            return
        line = {"step": state.global_step, "time/step": perf_counter() - self.began, "reward/mean": logs["reward"]}
        line |= {"completion/length": logs["completions/mean_length"], "sequences": self.rewarded}
        self.rewarded = 0
        if state.global_step % self.every == 0 or state.global_step == self.last:
            line["eval/accuracy"] = self.measure()
        print(json.dumps(line), flush=True)
        control.should_training_stop |= state.global_step == self.last
        self.began = perf_counter()

    @torch.no_grad()
    def measure(self) -> float:
        """Returns the accuracy of greedy completions."""
        model, tokenizer, right = self.trainer.model, self.trainer.processing_class, 0.0
        side, tokenizer.padding_side = tokenizer.padding_side, "left"
        for start in range(0, len(self.problems), AT_ONCE):
            part = self.problems[start : start + AT_ONCE]
            prompts = [problem["prompt"] for problem in part]
            if not isinstance(prompts[0], str):
                prompts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
            inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
            out = model.generate(**inputs, max_new_tokens=self.tokens, do_sample=False)
            texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            columns = {name: [problem[name] for problem in part] for name in part[0]}
            right += sum(self.case.judged(completions=texts, **columns))
        tokenizer.padding_side = side
        return right / len(self.problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help="a JSON object with the fields of a config of this folder that TRL also has")
    settings = json.loads(parser.parse_args().settings)
    torch.set_num_threads(2)
    sequences = settings["prompts_per_step"] * settings["group_size"]
    rate = settings["optim.learning_rate"]
    case = CASES[settings["case"]]
    progress = Progress(case, settings)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, max_steps=settings["num_steps"], use_cpu=True, bf16=False, gradient_checkpointing=False,
            per_device_train_batch_size=settings["microbatch"], seed=settings["seed"],
            gradient_accumulation_steps=sequences // settings["microbatch"], num_iterations=1,
            num_generations=settings["group_size"], max_completion_length=settings["rollout.max_completion_tokens"],
            temperature=settings["rollout.temperature"], top_p=1.0, top_k=0, beta=0.0, loss_type="dapo",
            scale_rewards="group", learning_rate=rate, lr_scheduler_type=SCHEDULES[settings["optim.decay"]],
            warmup_steps=settings["optim.warmup_steps"],
            adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, save_strategy="no",
            report_to="none", disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False,
            model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        progress.trainer = GRPOTrainer(
            model=settings["model.path"], reward_funcs=progress.reward, args=config,
            train_dataset=Dataset.from_list(case.rows()), callbacks=[progress],
        )  # fmt: skip
        progress.trainer.remove_callback(PrinterCallback)
        progress.trainer.train()
        # A log for the doctor.
        progress.trainer.state.save_to_json(settings["state"])


if __name__ == "__main__":
    main()
