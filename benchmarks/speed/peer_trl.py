"""Times TRL's GRPOTrainer (float32, CPU, `generate` for its rollouts) on one workload; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import tempfile
from functools import partial
from importlib.metadata import version
from time import perf_counter

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LogitsProcessor, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.speed import workloads
from benchmarks.speed.workloads import PAD, STOP, Workload


class Lengths(LogitsProcessor):
    """Stops every row at its length: STOP is forced there (a row of C tokens just ends) and forbidden elsewhere."""

    def __init__(self, lengths: list[int], workload: Workload):
        self.start = workload.prompt_tokens
        self.stops: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            if length < workload.completion_tokens:
                self.stops.setdefault(length - 1, []).append(row)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, STOP] = -torch.inf
        if rows := self.stops.get(ids.shape[1] - self.start):
            scores[rows] = -torch.inf
            scores[rows, STOP] = 0.0
        return scores


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with a clock around its phases, told how long each completion is to be."""

    def __init__(self, workload: Workload, **kwargs):
        super().__init__(**kwargs)
        self.workload = workload
        self.seconds: list[dict[str, float]] = []  # of every finished step
        self.phases = dict(rollout=0.0, score=0.0, update=0.0)
        self.tokens: list[int] = []
        self.reference_passes = 0
        self.plain_generate = self.model.generate

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        step, w = self.state.global_step, self.workload
        assert list(prompt_ids) == [ids for ids in w.prompt_ids(step) for _ in range(w.group)], "other prompts"
        lengths = [length for row in w.lengths(step) for length in row]
        self.model.generate = partial(self.plain_generate, logits_processor=[Lengths(lengths, w)])
        start = perf_counter()
        completions, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.phases["rollout"] += perf_counter() - start
        assert [len(ids) for ids in completions] == lengths, "other completion lengths"
        self.tokens.append(sum(lengths))
        return completions, logprobs

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        start = perf_counter()
        output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if not torch.is_grad_enabled():  # with gradients it is part of the update
            self.phases["score"] += perf_counter() - start
            self.reference_passes += model is self.ref_model
        return output

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.scored = perf_counter()
        return output


class Clock(TrainerCallback):
    """Ends a step: the update is all that follows scoring, the total all that follows the last step's end."""

    trainer: TimedTrainer

    def on_train_begin(self, *_, **__):
        self.start = perf_counter()

    def on_step_end(self, *_, **__):
        now, trainer = perf_counter(), self.trainer
        trainer.phases["update"] = now - trainer.scored
        trainer.seconds.append(trainer.phases | {"total": now - self.start})
        trainer.phases = dict.fromkeys(trainer.phases, 0.0)
        self.start = now


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """The word "t<ID>" is token ID; a special token's name must not begin another word, which it would split."""
    vocabulary = {f"t{i}": i for i in range(vocab_size) if i not in (PAD, STOP)} | {"<pad>": PAD, "<stop>": STOP}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<stop>", padding_side="left")


def make_trainer(model_dir: str, steps: int, microbatch: int, output_dir: str) -> TimedTrainer:
    """The trainer of `steps` GRPO steps, each of one generation batch and one optimizer step."""
    w = workloads.read(model_dir)
    rows = w.prompts * w.group
    assert rows % microbatch == 0, f"--microbatch must divide {rows}"
    prompts = [" ".join(f"t{i}" for i in ids) for step in range(steps) for ids in w.prompt_ids(step)]

    def reward(completion_ids: list[list[int]], **_) -> list[float]:
        return [workloads.reward(ids) for ids in completion_ids]

    config = GRPOConfig(
        output_dir, max_steps=steps, use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=microbatch, gradient_accumulation_steps=rows // microbatch, num_iterations=1,
        num_generations=w.group, max_completion_length=w.completion_tokens, shuffle_dataset=False,
        temperature=workloads.TEMPERATURE, top_p=1.0, top_k=0, beta=workloads.KL_COEF,
        learning_rate=w.learning_rate, lr_scheduler_type="constant", max_grad_norm=workloads.CLIP_NORM,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1, logging_nan_inf_filter=False,
        dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    clock = Clock()
    clock.trainer = TimedTrainer(
        w, model=model_dir, reward_funcs=reward, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(w.vocab_size), callbacks=[clock],
    )  # fmt: skip
    clock.trainer.remove_callback(PrinterCallback)
    return clock.trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after one of warm-up")
    parser.add_argument("--microbatch", type=int, default=8, help="completions in one forward and backward pass")
    args = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args.model_dir, args.steps + 1, args.microbatch, folder)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
    moved = max((p - q).abs().max().item() for p, q in zip(trainer.model.parameters(), before, strict=True))
    logs = [entry for entry in trainer.state.log_history if "kl" in entry]
    finite = all(math.isfinite(entry[key]) for entry in logs for key in ("kl", "loss", "grad_norm"))
    assert len(logs) == len(trainer.tokens) == args.steps + 1, "not every step was taken"
    assert trainer.reference_passes == len(logs), "not every step had a reference pass"
    assert finite and moved > 0, (logs, moved)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({
        "name": "TRL",
        "version": {package: version(package) for package in ("trl", "torch", "transformers")},
        **{key: [s[key] for s in trainer.seconds[1:]] for key in ("rollout", "score", "update", "total")},
        "warmup": trainer.seconds[0]["total"],
        "peak_mb": peak / 1024,
        "tokens": trainer.tokens[1:],
        "checks": {
            "lengths": "as asked for", "prompts": "as asked for", "reference_passes": trainer.reference_passes,
            "kl": [entry["kl"] for entry in logs], "loss": [entry["loss"] for entry in logs],
            "grad_norm": [entry["grad_norm"] for entry in logs], "moved": moved, "microbatch": args.microbatch,
        },
    }))  # fmt: skip


if __name__ == "__main__":
    main()
