"""Rules that translate the keys which veRL, EasyR1 and Search-R1 share: the last two began as copies of veRL.

A rule gets the value of its key and all `Keys` of the user's file, and returns the `Outcome` in jaxrl_llm. Some rules
read a key under the name that the trainer gives it, so they are methods of `Family`. TRL's tables use others too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partialmethod
from typing import Any

from jaxrl_llm.tools.translate import conversions, images
from jaxrl_llm.tools.translate.documents import VERL_FILES
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, unsupported
from jaxrl_llm.tools.translate.table import SENTENCES, Row, read_names

# {name in another trainer: name in jaxrl_llm}
KL, AGGREGATION, LOSS_ARGUMENTS = map(read_names, ("kl", "aggregation", "loss_arguments"))
# {adv_estimator of veRL: (advantage of jaxrl_llm, its epsilon or None if it has none, difference)}
ADVANTAGES = read_names("advantages")
# The product of these keys is the number of GPUs of a run.
MACHINES = ("trainer.nnodes", "trainer.n_gpus_per_node")
# Arguments of a loss that bound the importance ratio from below and from above.
CLIP_SIDES = ("clip_low", "clip_high")


@dataclass(frozen=True, kw_only=True)
class Family:
    """veRL, EasyR1 or Search-R1: the rows of its table, and the rules of its keys on which other keys depend.

    rows: {key: row} of the table.
    losses: {loss of the trainer: loss of jaxrl_llm}.
    in_loss: whether the KL penalty is in the loss.
    in_reward: whether the KL penalty is in the reward.
    counts_sequences: whether the mini-batch counts sequences, and not prompts.
    """

    rows: Mapping[str, Row]
    losses: Mapping[str, str]
    in_loss: Callable[[Keys], bool]
    in_reward: Callable[[Keys], bool]
    counts_sequences: bool = False

    @cached_property
    def key_of_field(self) -> dict[str, str]:
        """{field of jaxrl_llm: first key of the trainer's table that sets it before all other fields}."""
        return {row.field: key for key, row in reversed([*self.rows.items()])}

    @property
    def policy(self) -> str:
        """The section of the trainer's keys that has the policy's loss, with its dot."""
        return self.rows[self.key_of_field["aggregate.mode"]].section

    def rules(self) -> dict[str, Any]:
        """Returns {name: method} of the methods below, so that the rows of a table can name them as rules."""
        return {name: getattr(self, name) for name in dir(type(self)) if not name.startswith("_")}

    # Values of the file that several rules need.

    def group_size(self, keys: Keys) -> int:
        """Returns the number of sequences that are sampled for each prompt."""
        return math.prod(int(keys[key]) for key, row in self.rows.items() if row.field == "group_size")

    def prompts(self, keys: Keys) -> int:
        """Returns the number of prompts of a rollout."""
        return int(keys[self.key_of_field["prompts_per_step"]])

    def prompts_per_update(self, keys: Keys) -> int:
        """Returns the prompts of an optimizer step: the divisor of a rollout's prompts nearest to what the keys say."""
        target = keys[self.key_of_field["prompts_per_update"]]
        if self.counts_sequences:
            # veRL multiplies its mini-batch by n, so the key counts prompts. The older copy in Search-R1 does not.
            target = target / self.group_size(keys)
        # jaxrl_llm splits a rollout into equal updates.
        return min(divisors(self.prompts(keys)), key=lambda prompts: abs(prompts - target))

    # Rules of keys of batches and steps.

    def mini_batch(self, value: Any, keys: Keys) -> Outcome:
        """Translates the mini-batch of an optimizer step, in prompts or sequences, to `prompts_per_update`."""
        per_update, group_size = self.prompts_per_update(keys), self.group_size(keys)
        target, reason = value, f"counts prompts, as in jaxrl_llm: each with {group_size} sequences"
        if self.counts_sequences:
            target = value / group_size
            reason = f"counts sequences of the rollout, {value} = {target:g} prompts with {group_size} each"
        if per_update != target:
            reason += f"; {per_update} is the nearest divisor of {self.prompts(keys)} prompts"
        kind = "mapped" if per_update == target == value else "changed"
        return Outcome(kind, {"prompts_per_update": per_update}, reason)

    def micro_batch(self, value: Any, keys: Keys, counts: tuple[str, ...] = MACHINES) -> Outcome:
        """Translates the micro-batch, in sequences of one GPU, to `microbatch`, in prompts on all devices."""
        # A micro-batch only decides about memory, so an unknown number of machines makes no field unknown.
        if blank := next((key for key in counts if not str(keys[key]).isdigit()), ""):
            return Outcome("no effect", reason=f"{blank} = {keys[blank]} is no number; microbatch changes no gradient")
        gpus = math.prod(int(keys[key]) for key in counts)
        # The limit is rounded down to a divisor of an update's prompts, because more prompts would need more memory
        # than the file allows.
        limit = max(1, int(value) * gpus // self.group_size(keys))
        microbatch = max(x for x in divisors(self.prompts_per_update(keys)) if x <= limit)
        unit = f"sequences on each of {gpus} GPUs" if counts else "sequences on all GPUs"
        reason = f"{value} {unit}; jaxrl_llm counts prompts on all devices, and it never changes the gradient"
        return Outcome("changed", {"microbatch": microbatch}, reason)

    # The rule of veRL's older `ppo_micro_batch_size`, in sequences of all GPUs.
    micro_batch_of_all = partialmethod(micro_batch, counts=())

    def epochs(self, value: Any, keys: Keys) -> Outcome:
        """Translates `total_epochs` to `num_steps`, which the number of steps of the run overrides if it is set."""
        # veRL's loader drops the last, smaller batch of each epoch.
        num_steps = int(value) * (keys.rows // self.prompts(keys)) - int(keys["(uncounted)"])
        if num_steps <= 0:
            return unknown_steps(f"trainer.total_epochs = {value}: {value} x rows // prompts_per_step")
        reason = f"{value} epochs of {keys.rows} rows in steps of {self.prompts(keys)} prompts, the last ones dropped"
        return Outcome("changed", {"num_steps": num_steps}, reason)

    def steps(self, value: Any, keys: Keys) -> Outcome:
        """Translates the number of steps of the run to `num_steps`."""
        uncounted = int(keys["(uncounted)"])
        reason = f"veRL until 0.2 and Search-R1 end after {int(value) - uncounted} rollouts" * uncounted
        return Outcome("changed" if reason else "mapped", {"num_steps": int(value) - uncounted}, reason)

    def critic_warmup(self, row: Row, value: Any, keys: Keys) -> Outcome:
        """Translates `critic_warmup`, the rollout from which the policy learns, to `critic.warmup_steps`."""
        frozen, reason = max(int(value or 0) - 1, 0), f"the policy learns from rollout {value} on"
        if keys["algorithm.adv_estimator"] == "gae":
            return Outcome("changed" if value else "mapped", {row.field: frozen}, reason)
        if not frozen:
            return Outcome("no effect", reason="the policy learns from the first rollout on")
        return unsupported(row.key, f"{reason}, also without a critic")

    def schedule(self, row: Row, value: Any, keys: Keys) -> Outcome:
        """Translates `lr_scheduler_type` or `warmup_style` to the decay of the learning rate."""
        name = str(value or "constant")
        if name not in ("constant", "cosine", "linear"):
            return unsupported(row.field, f"it is one of constant, cosine and linear, not {name}")
        if keys["(schedules)"] == "all" or name == "constant":
            return Outcome("mapped", {row.field: name})
        reason = f"the file's release builds a constant schedule, whatever the key says: {name}"
        return Outcome("changed", {row.field: "constant"}, reason)

    def warmup_steps(self, row: Row, value: Any, keys: Keys) -> Outcome:
        """Translates `lr_warmup_steps`, in rollouts in veRL, to `optim.warmup_steps`, in optimizer steps."""
        # veRL's scheduler steps once after all updates on a rollout.
        updates = self.prompts(keys) // self.prompts_per_update(keys) * int(keys[self.key_of_field["epochs"]])
        fields = {f"{row.field_section}.warmup_steps": int(value) * updates, f"{row.field_section}.warmup_ratio": 0.0}
        reason = f"counts rollouts: {value} x {updates} optimizer steps"
        return Outcome("mapped" if updates == 1 else "changed", fields, "" if updates == 1 else reason)

    # Rules of keys of the models.

    def critic_path(self, value: Any, keys: Keys) -> Outcome:
        """Translates the model that the critic starts from to `critic.path`, which is empty for the policy's model."""
        policy_path = keys[self.key_of_field["model.path"]]
        return Outcome("mapped", {"critic.path": "" if value in (None, policy_path) else str(value)})

    def lora(self, value: Any, keys: Keys) -> Outcome:
        """Translates LoRA's keys to `adapters`."""
        rank, alpha, targets = (self.key_of_field[f"adapters.{name}"] for name in ("rank", "alpha", "targets"))
        excluded = keys.get(f"{self.rows[targets].section}exclude_modules")
        outcome = conversions.lora(keys[rank], keys[alpha], keys[targets])
        return images.adapters_beside_tower(outcome, keys[targets], excluded, keys)

    def tower(self, row: Row, value: Any, keys: Keys) -> Outcome:
        """Translates `freeze_vision_tower` to `model.vision`. The row says why the trainer ignores the key."""
        return images.tower(value, bool(keys[self.key_of_field["adapters.rank"]]), row.why)

    # Rules of keys of the objective.

    def advantage(self, value: Any, keys: Keys) -> Outcome:
        """Translates `adv_estimator` to `advantage`, for an estimator that jaxrl_llm has: see ADVANTAGES."""
        if value not in ADVANTAGES:
            hint = " (advantage pass_at_k follows another paper, docs/algorithms.md)" * (value == "grpo_passk")
            return unsupported("advantage.name", f"jaxrl_llm has no advantage {value!r}{hint}; this config keeps grpo")
        name, epsilon, reason = ADVANTAGES[value]
        fields: dict[str, Any] = {"advantage.name": name}
        if name == "grpo":
            by_deviation = self.key_of_field.get("advantage.normalize")
            fields["advantage.normalize"] = "group" if not by_deviation or keys[by_deviation] else "none"
            note = "a deviation has ddof = 1 in both trainers; epsilon is 1e-6 in veRL"
            return Outcome("mapped", fields | {"advantage.epsilon": epsilon}, note)
        if name == "gae":
            # veRL has one gamma and one lambda for advantages and returns.
            fields |= {"advantage.normalize": True, "critic.gamma": float(keys["algorithm.gamma"]), "critic.path": ""}
        if epsilon is not None:
            fields["advantage.epsilon"] = epsilon
        return Outcome("changed" if reason else "mapped", fields, reason)

    def kl_switch(self, value: Any, keys: Keys) -> Outcome:
        """Translates the key that switches the KL penalty on, such as `use_kl_loss`, to the section `kl`."""
        in_loss = self.in_loss(keys)
        if not in_loss and not self.in_reward(keys):
            return Outcome("mapped", {"kl": None})
        coef, kind = (keys[self.key_of_field[field]] for field in ("kl.coef", "kl.estimator"))
        if in_loss:
            # EasyR1 has one pair of keys for the penalty in the loss and in the reward, and an older pair for the loss.
            loss_coef, loss_kind = (keys[f"{self.policy}kl_loss_{name}"] for name in ("coef", "type"))
            coef = coef if loss_coef is None else loss_coef
            kind = kind if loss_kind is None else loss_kind
        coef, kind = float(coef), str(kind)
        # A + has no effect in a reward, because no gradient flows through a reward.
        estimator, reason = kl_estimator(kind if in_loss else kind.removesuffix("+"))
        if not estimator:
            return Outcome("unsupported", {"kl": None}, reason, unknown={"kl": reason})
        if not coef:
            return Outcome("mapped", {"kl": None}, "its coefficient is 0" * in_loss)
        fields = {"kl.placement": "loss", "kl.coef": coef, "kl.estimator": estimator}
        # These estimators divide by the deviation of rewards, which a penalty in the reward would change.
        estimator_name = str(keys["algorithm.adv_estimator"])
        divides_by_deviation = estimator_name.startswith(("grpo", "reinforce_plus_plus_baseline"))
        if not in_loss and not divides_by_deviation:
            return Outcome("mapped", fields | {"kl.placement": "reward", "kl.estimator": KL[kind.removesuffix("+")]})
        reason = reason if in_loss else SENTENCES["IN_REWARD"]
        return Outcome("changed" if reason else "mapped", fields, reason)

    def kl_in_reward_too(self, value: Any, keys: Keys) -> Outcome:
        """Translates veRL's `use_kl_in_reward`, which jaxrl_llm ignores if the penalty is also in the loss."""
        if not self.in_loss(keys):
            return self.kl_switch(value, keys)
        if value:
            return Outcome("unsupported", reason="jaxrl_llm has one KL penalty: the one in the loss is kept")
        return Outcome("no effect", reason="the penalty is in the loss")

    def kl_part(self, row: Row, value: Any, keys: Keys) -> Outcome:
        """Translates the coefficient or the estimator of the KL penalty to `kl.coef` or `kl.estimator`."""
        # In the loss, EasyR1's older pair of keys wins over the pair for both.
        older_name = {"kl_coef": "kl_loss_coef", "kl_penalty": "kl_loss_type"}.get(row.name)
        if older_name and self.in_loss(keys) and keys[f"{self.policy}{older_name}"] is not None:
            return Outcome("no effect", reason=f"{self.policy}{older_name} is read")
        outcome = self.kl_switch(value, keys)
        if row.field in outcome.fields:
            outcome = replace(outcome, fields={row.field: outcome.fields[row.field]})
        # Only the key of the estimator says what changes, so that no sentence is repeated.
        explains = row.field == "kl.estimator" or outcome.kind == "unsupported"
        return outcome if explains else replace(outcome, kind="mapped", reason="")

    def kl_adaptive(self, value: Any, keys: Keys) -> Outcome:
        """Translates the keys of an adaptive KL coefficient, such as its target and horizon, to `kl.adaptive`."""
        kind, target, horizon = (keys[key] for key, row in self.rows.items() if row.rule == "kl_adaptive")
        # veRL adapts only the coefficient of a penalty in the reward.
        if kind != "adaptive" or not self.in_reward(keys) or self.in_loss(keys):
            return Outcome("no effect", reason="the coefficient is fixed")
        fields = {"kl.adaptive.target": float(target), "kl.adaptive.horizon": int(horizon)}
        return Outcome("changed", fields, "adapts to the mean k3 of the tokens of an update")

    def loss(self, value: Any, keys: Keys) -> Outcome:
        """Translates the mode of the policy loss to `loss.name`. The arguments of the loss have keys of their own."""
        if value not in self.losses:
            return unsupported("loss.name", f"jaxrl_llm has no loss {value!r}: {', '.join(self.losses)}")
        return Outcome("mapped", {"loss.name": self.losses[value]})

    def loss_argument(self, row: Row, value: Any, keys: Keys) -> Outcome:
        """Translates an argument of the policy loss. A side of the clip is `clip_ratio` if the file does not set it."""
        loss = keys[self.key_of_field["loss.name"]]
        if row.field.removeprefix("loss.") not in LOSS_ARGUMENTS.get(self.losses.get(loss, ""), ()):
            return Outcome("no effect", reason=f"the loss {loss} has no such argument in jaxrl_llm")
        number = keys[f"{self.policy}clip_ratio"] if value is None else value
        return Outcome("mapped", {row.field: float(number)}, row.why)

    def old_clip(self, value: Any, keys: Keys) -> Outcome:
        """Translates the older key `clip_ratio`, which `clip_ratio_low` and `clip_ratio_high` have replaced."""
        sides = {f"loss.{side}": f"{self.policy}{side.replace('clip', 'clip_ratio')}" for side in CLIP_SIDES}
        if fields := {field: float(value) for field, key in sides.items() if keys[key] is None}:
            return Outcome("mapped", fields)
        # The default changes nothing, and veRL does not read the key if both sides are set.
        if value == 0.2 or all(key in keys for key in sides.values()):
            return Outcome("no effect", reason="clip_ratio_low and clip_ratio_high are read")
        reason = "veRL reads clip_ratio_low and clip_ratio_high, 0.2 by default; before 0.4 it read this key"
        return Outcome("changed", {}, reason)

    def aggregation(self, value: Any, keys: Keys) -> Outcome:
        """Translates `loss_agg_mode`, how the losses of tokens become one number, to `aggregate`."""
        loss, has_own_means = str(keys[self.key_of_field["loss.name"]]), "geo_mean" in self.losses
        fields = {"aggregate.mode": "sequence_mean", "aggregate.constant_length": 0}
        if has_own_means and loss in ("geo_mean", "sapo"):
            return Outcome("changed", fields, f"the loss {loss} has its own mean")
        if has_own_means and loss == "gspo":
            reason = "the loss gspo takes the mean of completions in veRL too, whatever this key says"
            return Outcome("mapped", fields, reason * (AGGREGATION.get(value) != "sequence_mean"))
        if loss.startswith(("gspo", "geo_mean")) and AGGREGATION.get(value) == "token_mean":
            reason = f"{value} would weigh the one ratio of a completion by its length; jaxrl_llm takes their mean"
            return Outcome("changed", fields, reason)
        if value not in AGGREGATION:
            return unsupported("aggregate.mode", f"jaxrl_llm has no aggregation {value!r}")
        mode = AGGREGATION[value]
        # If no length is set, veRL divides by the width of its arrays, which is the limit of a response.
        scale = self.key_of_field.get("aggregate.constant_length")
        length = int((scale and keys[scale]) or keys["data.max_response_length"])
        fields = {"aggregate.mode": mode, "aggregate.constant_length": length if mode == "constant" else 0}
        if mode == "constant":
            return Outcome("changed", fields, SENTENCES["SUM_OF_MICRO_BATCH"])
        if mode == "token_mean" and keys.defaults.get("(token_mean)") == "micro-batch":
            return Outcome("changed", fields, SENTENCES["MICRO_BATCH_TOKENS"])
        if mode == "sequence_mean" and "(sequence_mean)" in keys.defaults:
            return Outcome("changed", fields, SENTENCES["SEQUENCES_BY_TOKENS"])
        return Outcome("mapped", fields)

    def shared_with_policy(self, row: Row, value: Any, keys: Keys) -> Outcome:
        """Translates a key of the critic's updates: in jaxrl_llm the critic has the batches of the policy."""
        policy_key = f"{self.policy}{row.name}"
        if value is None or value == keys[policy_key]:
            return Outcome("no effect", reason=f"the critic has the value of {policy_key} in both trainers")
        return unsupported(row.key, f"in jaxrl_llm the critic has the value of {policy_key}: {keys[policy_key]}")


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, in rising order."""
    return [x for x in range(1, number + 1) if number % x == 0]


def kl_estimator(kind: str) -> tuple[str, str]:
    """Returns (jaxrl_llm's estimator for a KL in the loss, difference); ("", reason) if jaxrl_llm has none."""
    # veRL's straight-through estimators, such as k3+, have the value of k3 and the gradient of k2.
    if kind.endswith("+"):
        return "k2", f"{kind} has the value of {kind[:-1]} and the gradient of k2; in jaxrl_llm it is k2"
    # The gradient of k1 in a loss is that of log p, whose mean over samples is 0.
    if kind in KL and KL[kind] == "k1":
        return "k2", f"{kind} is k1, whose gradient in the loss has mean zero; k2 has that of the KL"
    return (KL[kind], "") if kind in KL else ("", f"jaxrl_llm has no KL estimator {kind!r}: k1, k2 and k3")


def unknown_steps(product: str) -> Outcome:
    """Returns the outcome of epochs over an unknown number of rows. product: formula for the number of steps."""
    reason = f"{product} (or give --rows); 100 is a placeholder"
    fields = {"num_steps": 100}
    return Outcome("changed", fields, "counts epochs; jaxrl_llm counts steps", unknown={"num_steps": reason})


def lowest(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates `min_lr_ratio`, the share of the learning rate at the end of a cosine, to `optim.end`."""
    # veRL has a lowest rate for the cosine alone.
    share = float(value or 0) if keys[f"{row.section}lr_scheduler_type"] == "cosine" else 0.0
    return Outcome("mapped", {row.field: float(keys[f"{row.section}lr"]) * share if share else 0.0})


def betas(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates `betas`, the decay rates of Adam's moments, to `optim.b1` and `optim.b2`."""
    first, second = value
    return Outcome("mapped", {f"{row.field_section}.b1": float(first), f"{row.field_section}.b2": float(second)})


def column(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates the name of a column of the data, such as `prompt_key`, to `data.prompt_column`."""
    if row.field == f"data.{value}_column":
        return Outcome("no effect", reason="the column has this name in jaxrl_llm too")
    # A convert function would make the column itself, so that the field would have no effect.
    return Outcome("mapped", {row.field: value, "data.convert": ""})


def evaluates(value: Any, keys: Keys) -> Outcome:
    """Translates `test_freq` or `val_freq`, the steps between evaluations, to `eval.every`."""
    if not value or value < 0:
        return Outcome("mapped", conversions.NO_EVALUATION)
    # Files whose name cannot be read count as named.
    if "data.val_files" not in keys.values:
        return Outcome("changed", conversions.NO_EVALUATION, "the file names no problems: data.val_files")
    # A limit that cannot be read leaves eval.every known, so `keys` need not record the request.
    limits = [keys.values.get(f"data.{name}") for name in ("val_max_samples", "val_data_num")]
    reason = SENTENCES["EVERY_ROW"] * all(limit in (None, -1) for limit in limits)
    return Outcome("changed" if reason else "mapped", {"eval.every": int(value)}, reason)


def loggers(value: Any, keys: Keys) -> Outcome:
    """Translates `trainer.logger` and `trainer.project_name` to `log.to` and `log.project`."""
    logged = keys.get("trainer.logger") or []
    project = str(keys.get("trainer.project_name") or "translated")
    return conversions.loggers(logged if isinstance(logged, list) else [logged], project)


def model(value: Any, keys: Keys) -> Outcome:
    """Translates the path of the policy's model to `model.path`."""
    if not value:
        return Outcome("changed", {"model.path": "my_model"}, unknown={"model.path": "a folder or a hub id"})
    fields = {"model.path": str(value)}
    if images.family_of(str(value)) == "other":
        reason = f"a model of images of another kind than {images.READABLE}: train refuses it"
        return Outcome("unsupported", fields, reason)
    return Outcome("mapped", fields)


# Reason for a file that includes only veRL's own files.
OWN_CONFIG = "its keys are the defaults of the table"


def config_file(row: Row, value: Any, keys: Keys) -> Outcome:
    """Reports config files that a file includes and that are not found; the keys of found files replaced this key."""
    listed = value if isinstance(value, list) else [value]
    absent = [str(name) for name in listed if name and not VERL_FILES.fullmatch(str(name).removesuffix(".yaml"))]
    if not absent:
        return Outcome("no effect", reason=OWN_CONFIG)
    where = "not found beside the script, in its config/ or above it"
    return unsupported(row.key, f"{', '.join(absent)}: {where}: the keys of the file have their defaults")


def rows_of(convert: str, row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates one data file or several to `data.source` or `eval.source`; several to train on become a mixture.

    convert: function that converts a row.
    """
    section = row.field_section
    files = [str(file) for file in value] if isinstance(value, list) else [str(value)]
    # One evaluation set decides which checkpoint is best, and only the user knows which set.
    if len(files) > 1 and section == "data":
        return mixture(files, convert)
    fields = {f"{section}.source": files[0], f"{section}.convert": convert}
    if len(files) > 1:
        task = f"the one that decides, or a pattern; others are eval.extra_sets: {', '.join(files)}"
        return Outcome("changed", fields, f"the first of {len(files)} files", unknown={f"{section}.source": task})
    return Outcome("mapped", fields)


def mixture(sources: list[str], convert: str) -> Outcome:
    """Returns a mixture of several files to train on, from which rows are drawn by weight."""
    parts: dict[str, dict[str, Any]] = {}
    for source in sources:
        # A source is named by its file, with as many of its folders as make the name unique, such as math_train.
        words = [re.sub(r"\W+", "_", word).strip("_") for word in source.rpartition(".")[0].split("/")]
        names = ["_".join(filter(None, words[-size:])) for size in range(1, len(words) + 1)]
        unused_names = [name for name in names if name.isidentifier() and name not in parts]
        name = unused_names[0] if unused_names else f"source_{len(parts)}"
        parts[name] = dict(source=source, convert=convert, weight=1.0)
    task = f"the weight of each of {', '.join(parts)}: the number of its rows, to draw them as often as veRL does"
    reason = "veRL joins the rows of the files; in jaxrl_llm each source has a weight"
    fields = {"data.source": "", "data.convert": "", "data.mixture": parts}
    return Outcome("changed", fields, reason, unknown={"data.mixture": task})
