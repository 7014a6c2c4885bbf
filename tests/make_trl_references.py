"""Writes tests/references/trl_preferences.json: what TRL 1.16.0 says of preference losses on random log-probabilities.

python -m venv trl && trl/bin/pip install trl==1.16.0 torch==2.13.0 transformers
trl/bin/python tests/make_trl_references.py

Values, gradients and metrics come from TRL's own trainers: `DPOTrainer._compute_loss` and `CPOTrainer.cpo_loss` (in
TRL 1.16.0 of trl.experimental), which get the log-probabilities from a model that only returns them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer

FILE = Path(__file__).parent / "references" / "trl_preferences.json"
PAIRS, LENGTH = 4, 6
ACCELERATOR = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
# TRL has conservative DPO as "aot" of one pair, where sorting changes nothing, and the coefficient of the chosen
# completion's loss as a weight of "sft".
DPO = [
    *(dict(beta=beta) for beta in (0.05, 0.1, 1.0)),
    dict(beta=0.3, label_smoothing=0.1),
    dict(beta=0.3, label_smoothing=0.5),
    dict(beta=0.1, nll_coef=1.0),
    dict(beta=0.2, nll_coef=0.25),
]
SIMPO = [
    *(dict(beta=beta, gamma=gamma) for beta, gamma in ((2.0, 1.0), (2.5, 1.4), (10.0, 3.0), (2.0, 0.0))),
    dict(beta=2.0, gamma=1.0, label_smoothing=0.2),
]


def random_pairs(pairs: int, seed: int) -> dict[str, torch.Tensor]:
    """Log-probabilities [2 pairs, LENGTH] of all chosen completions and then of all rejected ones, and their mask."""
    make = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (2 * pairs,), generator=make)
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    noise = lambda: -2 * torch.rand((2 * pairs, LENGTH), generator=make, dtype=torch.float64)  # noqa: E731
    return {"mask": mask, "logprobs": noise() * mask, "ref_logprobs": noise() * mask}


def dpo(pairs: dict[str, torch.Tensor], logprobs: torch.Tensor, by: dict[str, float]) -> tuple[torch.Tensor, dict]:
    """The loss and the metrics of TRL's DPOTrainer."""
    trainer = object.__new__(DPOTrainer)
    smooth, nll = by.get("label_smoothing", 0.0), by.get("nll_coef", 0.0)
    settings = dict(
        model=SimpleNamespace(training=True), accelerator=ACCELERATOR, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False, beta=by["beta"],
        label_smoothing=smooth, loss_types=["aot" if smooth else "sigmoid", *(["sft"] if nll else [])],
        loss_weights=[1.0, *([nll] if nll else [])], _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    for name, value in settings.items():
        object.__setattr__(trainer, name, value)
    # One token of a prompt, because TRL shifts by one.
    mask = torch.cat([torch.zeros(len(pairs["mask"]), 1), pairs["mask"]], dim=1).long()
    zeros = torch.zeros_like(logprobs)
    outputs = SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    chosen, rejected = pairs["ref_logprobs"].sum(dim=1).chunk(2)
    inputs = dict(
        input_ids=mask, attention_mask=mask, completion_mask=mask, ref_chosen_logps=chosen, ref_rejected_logps=rejected
    )
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def simpo(pairs: dict[str, torch.Tensor], logprobs: torch.Tensor, by: dict[str, float]) -> tuple[torch.Tensor, dict]:
    """The loss and the metrics of TRL's CPOTrainer with loss_type = "simpo"."""
    trainer = object.__new__(CPOTrainer)
    settings = dict(
        accelerator=ACCELERATOR, alpha=0.0, beta=by["beta"], loss_type="simpo", simpo_gamma=by["gamma"],
        label_smoothing=by.get("label_smoothing", 0.0),
    )  # fmt: skip
    for name, value in settings.items():
        object.__setattr__(trainer, name, value)
    means = logprobs.sum(dim=1) / pairs["mask"].sum(dim=1)
    losses, chosen, rejected = CPOTrainer.cpo_loss(trainer, *means.chunk(2))
    metrics = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    metrics |= {"rewards/accuracies": (chosen > rejected).double()}
    return losses.mean(), {name: x.mean().item() for name, x in metrics.items()}


def grouped(x: torch.Tensor) -> list:
    """Moves [2 pairs, LENGTH] to [pairs, 2, LENGTH]."""
    return torch.stack(x.chunk(2), dim=1).tolist()


def main() -> None:
    cases = []
    for name, loss, settings in (("dpo", dpo, DPO), ("simpo", simpo, SIMPO)):
        for seed, by in enumerate(settings):
            count = 1 if {"nll_coef", "label_smoothing"} & by.keys() and loss is dpo else PAIRS
            pairs = random_pairs(count, seed)
            logprobs = pairs["logprobs"].clone().requires_grad_()
            value, metrics = loss(pairs, logprobs, by)
            value.backward()
            measured = {key: metrics[key] for key in metrics if key.startswith("rewards/")}
            arrays = {key: grouped(x) for key, x in (pairs | {"gradient": logprobs.grad * pairs["mask"]}).items()}
            cases.append({"loss": name, "fields": by, "value": value.item(), "metrics": measured, **arrays})
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")
    print(f"{FILE}: {len(cases)} cases")


if __name__ == "__main__":
    main()
