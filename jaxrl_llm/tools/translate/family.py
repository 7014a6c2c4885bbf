"""Rules that veRL, EasyR1 and Search-R1 share: the last two began as copies of veRL, with other names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxrl_llm.tools.translate import images, ours
from jaxrl_llm.tools.translate.documents import VERL_FILES
from jaxrl_llm.tools.translate.outcome import Keys, Kind, OnlyIf, Outcome, Rule, not_here
from jaxrl_llm.tools.translate.table import Row

MESH = "placement of parameters on devices: here the mesh (config.mesh), and it changes no number"
MEMORY = "memory or speed alone: here microbatch, model.remat, model.row_parts and host_memory"
ENGINE = "of the rollout engine: here the sampler in JAX (configs/grpo_vllm.py has the settings of vLLM)"
LOGS = "names and places of logs and files: here --workdir and config.log"
LOADER = "how the data set is loaded: it changes no row"
PROFILE = "a profiler"
KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
LOGGERS = ("mlflow", "tensorboard", "trackio", "wandb")
AGGREGATION = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    # veRL divides the sums by one length for all, as Dr. GRPO.
    "seq-mean-token-sum-norm": "constant",
    "token": "token_mean",  # EasyR1
    "seq": "sequence_mean",
}
Argument: TypeAlias = Callable[[Keys, str], float]
Losses: TypeAlias = dict[str, tuple[str, dict[str, str]]]  # name -> ours, and its arguments with the keys that they are


@dataclass(frozen=True)
class Names:
    """What a trainer of the family calls the keys that other keys depend on."""

    prompts: str
    update: str
    epochs: str
    group: tuple[str, ...]  # their product
    nodes: str
    gpus: str
    estimator: str
    response: str
    kl_loss: str  # True: the KL penalty is in the loss
    sequences: bool = False  # whether `update` counts sequences, not prompts

    def group_size(self, keys: Keys) -> int:
        size = 1
        for name in self.group:
            size *= int(keys[name])
        return size

    def prompts_per_update(self, keys: Keys) -> int:
        """Prompts of an optimizer step: a divisor of a rollout's, the nearest one to what the keys say."""
        prompts, target = int(keys[self.prompts]), keys[self.update]
        if self.sequences:
            # veRL multiplies its mini-batch by n itself, and so counts prompts. Search-R1's older copy does not.
            target = target / self.group_size(keys)
        # Updates of a rollout are equal here.
        return min(divisors(prompts), key=lambda x: abs(x - target))

    def updates(self, keys: Keys) -> int:
        """Optimizer steps on a rollout."""
        return int(keys[self.prompts]) // self.prompts_per_update(keys) * int(keys[self.epochs])

    def critic(self, keys: Keys) -> bool:
        return keys[self.estimator] == "gae"


def divisors(number: int) -> list[int]:
    return [x for x in range(1, number + 1) if number % x == 0]


def shuffle(value: Any, keys: Keys) -> Outcome:
    """Whether the rows are shuffled."""
    return Outcome("mapped") if value else Outcome("unsupported", reason="rows are shuffled in every pass here")


def update(names: Names) -> Rule:
    """The mini-batch of an optimizer step: in prompts, or in sequences."""

    def rule(value: Any, keys: Keys) -> Outcome:
        per_update, group = names.prompts_per_update(keys), names.group_size(keys)
        fields = {"prompts_per_update": per_update}
        if names.sequences:
            reason = f"counts sequences of the rollout, {value} = {value / group:g} prompts with {group} each"
            if per_update != value / group:
                reason += f"; {per_update} is the nearest divisor of {keys[names.prompts]} prompts"
            return Outcome("changed" if group > 1 else "mapped", fields, reason)
        if per_update != value:
            reason = f"{value} prompts: {per_update} is the nearest divisor of a rollout's prompts"
            return Outcome("changed", fields, reason)
        return Outcome("mapped", fields, f"counts prompts, as here: each with {group} sequences")

    return rule


def micro(names: Names, *, per_gpu: bool) -> Rule:
    """The micro-batch of a GPU, or of all, in sequences. Here it is in prompts and over all devices."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if value is None:
            return Outcome("no effect", reason="not set")
        counts = [names.nodes, names.gpus] if per_gpu else []
        # A micro-batch decides about memory alone, so a placeholder for the machines is no reason to end.
        if blank := next((key for key in counts if not str(keys[key]).isdigit()), ""):
            return Outcome("no effect", reason=f"{blank} = {keys[blank]} is no number; microbatch changes no gradient")
        gpus = math.prod(int(keys[key]) for key in counts)
        # In prompts, rounded down to a divisor of an update: more prompts would need more memory than the file allows.
        limit = max(1, int(value) * gpus // names.group_size(keys))
        microbatch = max(x for x in divisors(names.prompts_per_update(keys)) if x <= limit)
        unit = f"sequences on each of {gpus} GPUs" if per_gpu else "sequences on all GPUs"
        reason = f"{value} {unit}; here prompts on all devices, and it never changes the gradient"
        return Outcome("changed", {"microbatch": microbatch}, reason)

    return rule


def epochs_rule(names: Names, total: str) -> Rule:
    """Epochs over the data. A set number of steps wins, which is the key `total`."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if keys[total]:
            return Outcome("no effect", reason=f"{total} is set")
        # The loader drops the last, smaller batch of each epoch.
        num_steps = int(value) * (keys.rows // int(keys[names.prompts]))
        if num_steps:
            reason = (
                f"{value} epochs of {keys.rows} rows in steps of {keys[names.prompts]} prompts, the last ones dropped"
            )
            return Outcome("changed", {"num_steps": num_steps}, reason)
        return unknown_steps(f"trainer.total_epochs = {value}: {value} x rows // prompts_per_step")

    return rule


def unknown_steps(product: str) -> Outcome:
    """Returns the steps of a file that counts passes over its data. product: what they are."""
    why = f"{product} (or give --rows); 100 is a placeholder"
    return Outcome("changed", {"num_steps": 100}, "counts passes over the data, here steps", unknown={"num_steps": why})


def warmup_steps(names: Names, row: Row) -> Rule:
    """A warm-up in rollouts; here in optimizer steps."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if value is None or int(value) <= 0:
            return Outcome("no effect", reason="not set")
        # The scheduler steps once after all updates on a rollout.
        updates = names.updates(keys)
        fields = {f"{row.our_section}.warmup_steps": int(value) * updates, f"{row.our_section}.warmup_ratio": 0.0}
        reason = f"counts rollouts: {value} x {updates} optimizer steps"
        return Outcome("mapped" if updates == 1 else "changed", fields, "" if updates == 1 else reason)

    return rule


def warmup_ratio(row: Row) -> Rule:
    """A warm-up as a share of the run, which a number of steps replaces."""
    steps = f"{row.section}lr_warmup_steps"

    def rule(value: Any, keys: Keys) -> Outcome:
        if int(keys[steps] or 0) > 0:
            return Outcome("no effect", reason=f"{steps} is set")
        fields = {f"{row.our_section}.warmup_ratio": float(value or 0), f"{row.our_section}.warmup_steps": 0}
        return Outcome("mapped", fields)

    return rule


def decay(row: Row) -> Rule:
    """The schedule after the warm-up."""
    section = row.our_section

    def rule(value: Any, keys: Keys) -> Outcome:
        if value in (None, "constant"):
            return Outcome("mapped", {f"{section}.decay": "constant", f"{section}.end": 0.0})
        if value not in ("cosine", "linear"):
            return not_here(f"{section}.decay", f"there is constant, linear and cosine, not {value}")
        # Only the cosine has a lowest rate there.
        share = float(keys[f"{row.section}min_lr_ratio"] or 0) if value == "cosine" else 0.0
        return Outcome("mapped", {f"{section}.decay": value, f"{section}.end": _lowest_rate(row, share, keys)})

    return rule


def _lowest_rate(row: Row, share: float, keys: Keys) -> float:
    return float(keys[f"{row.section}lr"]) * share if share else 0.0


def lowest(row: Row) -> Rule:
    """The share of the rate at the end of a cosine decay."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if keys[f"{row.section}lr_scheduler_type"] != "cosine":
            return Outcome("no effect", reason="only a cosine has a lowest rate")
        return Outcome("mapped", {row.field: _lowest_rate(row, float(value or 0), keys)})

    return rule


def saves(value: Any, keys: Keys) -> Outcome:
    """Steps between checkpoints."""
    if value and value > 0:
        return Outcome("mapped", {"checkpoint.every": int(value)})
    return Outcome("changed", {"checkpoint.every": 25}, f"{value} never saves; a run here always can resume")


def keeps(value: Any, keys: Keys) -> Outcome:
    """Number of checkpoints to keep."""
    if value and value > 0:
        return Outcome("mapped", {"checkpoint.keep": int(value)})
    return Outcome("changed", {}, f"{value} keeps all; here the last checkpoint.keep and the best ones are kept")


def evaluates(files: str) -> Rule:
    """Steps between evaluations, if there are problems to evaluate."""

    def rule(value: Any, keys: Keys) -> Outcome:
        # Without files of its own, the run would evaluate the problems of the config that it begins with. A name of
        # files that cannot be read is one, too.
        if not value or value < 0 or files not in keys.values:
            return Outcome("mapped", ours.NO_EVALUATION)
        return Outcome("mapped", {"eval.every": int(value)})

    return rule


def loggers(value: Any, keys: Keys) -> Outcome:
    """Where the numbers of a run go, with the project of those that have one."""
    logged = keys.explicit.get("trainer.logger") or []
    names = tuple(name for name in (logged if isinstance(logged, list) else [logged]) if name in LOGGERS)
    if not names:
        return Outcome("no effect", reason=LOGS)
    projects = set(names) != {"tensorboard"}
    project = str(keys.explicit.get("trainer.project_name") or "translated") if projects else ""
    return Outcome("mapped", {"log.to": names, "log.project": project})


def advantage(by_std: str) -> Rule:
    """The advantage estimator. by_std: the key that says whether GRPO divides by the deviation; "": it always does."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if value in ("grpo", "grpo_vectorized"):
            normal = "group" if not by_std or keys[by_std] else "none"
            # veRL's own constants: 1e-6 beside the deviation of a group, 1e-8 where tokens are whitened.
            fields = {"advantage.name": "grpo", "advantage.normalize": normal, "advantage.epsilon": 1e-6}
            return Outcome("mapped", fields, "a deviation has ddof = 1 there and here; epsilon is 1e-6 there")
        if value == "gae":
            gamma, lam = float(keys["algorithm.gamma"]), float(keys["algorithm.lam"])
            fields = {"advantage.name": "gae", "advantage.gamma": gamma, "advantage.lam": lam}
            fields |= {"advantage.normalize": True, "advantage.epsilon": 1e-8}
            # One gamma and one lambda for advantages and returns there.
            return Outcome("mapped", fields | {"critic.gamma": gamma, "critic.lam": lam, "critic.path": ""})
        if value in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
            name = "reinforce_pp" + value.removeprefix("reinforce_plus_plus")
            fields = {"advantage.name": name, "advantage.epsilon": 1e-8}
            reason = "after the answer of a tool, the running return goes on here; there it restarts"
            if name == "reinforce_pp":
                fields["advantage.gamma"] = float(keys["algorithm.gamma"])
            return Outcome("changed", fields, reason)
        if value == "remax":
            reason = "every token has the reward minus that of the greedy completion; veRL uses the reward to go"
            return Outcome("changed", {"advantage.name": "remax"}, reason)
        if value in ("rloo", "rloo_vectorized", "opo"):
            return Outcome("mapped", {"advantage.name": value.removesuffix("_vectorized")})
        if value == "gdpo":
            reason = "normalizes each function of reward.functions; there, the keys of the reward's result"
            return Outcome("changed", {"advantage.name": "gdpo", "advantage.epsilon": 1e-4}, reason)
        why = {"grpo_passk": " (advantage pass_at_k follows another paper, docs/algorithms.md)"}.get(value, "")
        return not_here("advantage.name", f"there is no advantage {value!r}{why}; this config keeps grpo")

    return rule


def kl_estimator(kind: str) -> tuple[str, str]:
    """Returns our name of a KL estimator, and what differs in the loss; ("", why) if there is none."""
    # veRL's straight-through estimators: the value of one, the gradient of k2.
    if kind.endswith("+"):
        return "k2", f"{kind} has the value of {kind[:-1]} and the gradient of k2; here it is k2"
    # In a loss, k1 has the gradient of log p, whose mean over samples is 0.
    if kind in KL and KL[kind] == "k1":
        return "k2", f"{kind} is k1, whose gradient in the loss has mean zero; k2 has that of the KL"
    return (KL[kind], "") if kind in KL else ("", f"there is no KL estimator {kind!r}: k1, k2 and k3")


@dataclass(frozen=True)
class KlKeys:
    """The keys of the KL penalty. Each place has its own coefficient and estimator, or both share them."""

    in_loss: Callable[[Keys], bool]
    in_reward: Callable[[Keys], bool]
    loss_coef: str
    loss_kind: str
    reward_coef: str
    reward_kind: str
    estimator: str  # of advantages

    def fields(self, keys: Keys) -> tuple[Kind, dict[str, Any], str]:
        """Returns kind, fields and reason of the outcome of the penalty."""
        none = {"kl": None}
        if self.in_loss(keys):
            coef, kind = keys[self.loss_coef], keys[self.loss_kind]
            # In EasyR1 one key is for both places.
            coef = float(keys[self.reward_coef] if coef is None else coef)
            kind = str(keys[self.reward_kind] if kind is None else kind)
            estimator, reason = kl_estimator(kind)
            if not estimator:
                return "unsupported", none, reason
            if not coef:
                return "mapped", none, "its coefficient is 0"
            fields = {"kl.placement": "loss", "kl.coef": coef, "kl.estimator": estimator}
            return "changed" if reason else "mapped", fields, reason
        if not self.in_reward(keys) or not float(keys[self.reward_coef]):
            return "mapped", none, ""
        # In a reward no gradient flows through the estimator, so a + means nothing.
        coef, kind = float(keys[self.reward_coef]), str(keys[self.reward_kind]).removesuffix("+")
        if kind not in KL:
            return "unsupported", none, f"there is no KL estimator {kind!r}: k1, k2 and k3"
        # They divide by a deviation of rewards, in which a penalty in the reward would count.
        if str(keys[self.estimator]).startswith(("grpo", "reinforce_plus_plus_baseline")):
            estimator, _ = kl_estimator(kind)
            reason = (
                "in the reward it would be a part of the deviation that advantages are divided by; here in the loss"
            )
            return "changed", {"kl.placement": "loss", "kl.coef": coef, "kl.estimator": estimator}, reason
        return "mapped", {"kl.placement": "reward", "kl.coef": coef, "kl.estimator": KL[kind]}, ""

    def switch(self, value: Any, keys: Keys) -> Outcome:
        """The rule of the key that switches the penalty on, in the loss if there is a choice."""
        kind, fields, reason = self.fields(keys)
        return Outcome(kind, fields, reason, unknown={"kl": reason} if kind == "unsupported" else {})

    def in_reward_too(self, value: Any, keys: Keys) -> Outcome:
        """The rule of a key that switches it on in the reward."""
        if not self.in_loss(keys):
            return self.switch(value, keys)
        if value:
            return Outcome("unsupported", reason="the penalty has one place here; the one in the loss is kept")
        return Outcome("no effect", reason="the penalty is in the loss")

    def value(self, row: Row, place: Callable[[Keys], bool], why_not: str) -> Rule:
        """Returns the rule of a coefficient or an estimator of the penalty in one place."""

        def rule(value: Any, keys: Keys) -> Outcome:
            kind, fields, reason = self.fields(keys)
            # What changes is said where it does: at the estimator.
            explains = row.field == "kl.estimator" or kind == "unsupported"
            shown = {row.field: fields[row.field]} if row.field in fields else fields
            return Outcome(kind if explains else "mapped", shown, reason if explains else "")

        return OnlyIf(place, rule, why_not)

    def adaptive(self, kind: str, target: str, horizon: str) -> Rule:
        """The rule of an adaptive coefficient; kind: the key that says whether it is."""

        def rule(value: Any, keys: Keys) -> Outcome:
            # veRL adapts the coefficient of the reward alone.
            if keys[kind] != "adaptive" or not self.in_reward(keys) or self.in_loss(keys):
                return Outcome("no effect", reason="the coefficient is fixed")
            fields = {"kl.adaptive.target": float(keys[target]), "kl.adaptive.horizon": int(keys[horizon])}
            return Outcome("changed", fields, "adapts to the mean k3 of the tokens of an update")

        return rule


def loss(losses: Losses, argument: Argument, value: Any, keys: Keys) -> Outcome:
    """Returns what the policy loss becomes, with all its arguments. argument: the value of one of its keys."""
    if value not in losses:
        return not_here("loss.name", f"there is no loss {value!r}: {', '.join(losses)}; this config keeps ppo_clip")
    name, arguments = losses[value]
    fields = {f"loss.{field}": argument(keys, key) for field, key in arguments.items()}
    return Outcome("mapped", {"loss.name": name} | fields)


def loss_argument(losses: Losses, mode: str, argument: Argument, row: Row) -> Rule:
    """An argument of the policy loss, which the key `mode` names."""

    def rule(value: Any, keys: Keys) -> Outcome:
        _, arguments = losses.get(keys[mode], ("", {}))
        # A key may be an argument of a loss that the file does not take.
        matching = [field for field, key in arguments.items() if key == row.name]
        if not matching:
            return Outcome("no effect", reason=f"the loss {keys[mode]} has no such argument here")
        reason = "the bound of the ratio of tokens with A < 0" if matching == ["delta"] else ""
        return Outcome("mapped", {f"loss.{matching[0]}": argument(keys, row.name)}, reason)

    return rule


def aggregation(names: Names, scale: str, loss: str) -> Rule:
    """The reduction of token losses. scale: the key with the length that the last mode divides by; "": none.

    loss: the key of the loss, some of which set it.
    """

    def rule(value: Any, keys: Keys) -> Outcome:
        fields = {"aggregate.mode": "sequence_mean", "aggregate.constant_length": 0}
        # In veRL, whose keys begin with actor, these losses have a mean of their own and do not read the key.
        if keys[loss] in ("geo_mean", "sapo") and names.kl_loss.startswith("actor"):
            return Outcome("changed", fields, f"the loss {keys[loss]} has its own mean")
        if keys[loss] == "gspo" and names.kl_loss.startswith("actor"):
            reason = "the loss gspo takes the mean of completions there too, whatever this key says"
            return Outcome("mapped", fields, reason * (AGGREGATION.get(value) != "sequence_mean"))
        if str(keys[loss]).startswith(("gspo", "geo_mean")) and AGGREGATION.get(value) == "token_mean":
            reason = f"{value} would weigh the one ratio of a completion by its length; here the mean of completions"
            return Outcome("changed", fields, reason)
        if value not in AGGREGATION:
            return not_here("aggregate.mode", f"there is no aggregation {value!r}; this config keeps token_mean")
        mode = AGGREGATION[value]
        # Without a length of its own veRL divides by the width of its arrays, which is the limit of a response.
        length = int((scale and keys[scale]) or keys[names.response]) if mode == "constant" else 0
        return Outcome("mapped", {"aggregate.mode": mode, "aggregate.constant_length": length})

    return rule


def model(value: Any, keys: Keys) -> Outcome:
    """The policy's model."""
    fields = {"model.path": str(value)}
    if images.unreadable(str(value)):
        reason = f"a model of pictures of another kind than {', '.join(images.readable())}: train refuses it"
        return Outcome("unsupported", fields, reason)
    return Outcome("mapped", fields)


OWN_CONFIG = "the defaults here are those of ppo_trainer.yaml"


def config_name(value: Any, keys: Keys) -> Outcome:
    """The file that a command begins with. If it is there, its keys stand in its place."""
    if VERL_FILES.fullmatch(str(value).removesuffix(".yaml")):
        return Outcome("no effect", reason=OWN_CONFIG)
    reason = "this file is not beside the script, in config/ there or above it: its keys have their defaults here"
    return Outcome("unsupported", reason=reason)


def defaults(value: Any, keys: Keys) -> Outcome:
    """The files that a file is made of."""
    if not value:
        return Outcome("no effect", reason=OWN_CONFIG)
    return Outcome("unsupported", reason=f"not there: {', '.join(value)}: their keys have their defaults here")


def shared_with_policy(shared: dict[str, tuple[str, str]], row: Row) -> Rule:
    """A setting that the critic has of its own, and here shares with the policy.

    shared: {last part of the key: (the policy's key, its noun)}.
    """
    policy, noun = shared[row.name]

    def rule(value: Any, keys: Keys) -> Outcome:
        if value is None or value == keys[policy]:
            return Outcome("no effect", reason=f"the critic has the policy's {noun}, as there")
        return Outcome("changed", {}, f"{value} for the critic there; here it has the policy's {noun}: {keys[policy]}")

    return rule


def weight_decay(row: Row) -> Rule:
    """Weight decay of AdamW."""
    reason = "here only for matrices, there for all parameters"
    return lambda value, keys: Outcome(
        "changed" if value else "mapped", {row.field: float(value)}, reason * bool(value)
    )


def betas(row: Row) -> Rule:
    """The decay rates of Adam."""

    def rule(value: Any, keys: Keys) -> Outcome:
        first, second = value
        return Outcome("mapped", {f"{row.our_section}.b1": float(first), f"{row.our_section}.b2": float(second)})

    return rule


def column(row: Row) -> Rule:
    """The name of a column."""
    usual = row.field.rpartition(".")[2].removesuffix("_column")
    return lambda value, keys: ours.column(row.field, value, usual)


def top_k(value: Any, keys: Keys) -> Outcome:
    """The most likely tokens to sample from; -1 and 0: all."""
    # vLLM's -1, and Hugging Face's 0, both mean all tokens.
    count = max(int(value or 0), 0)
    reason = "the trainer also scores this distribution; there, that of all tokens"
    return Outcome("changed", {"rollout.top_k": count}, reason) if count else Outcome("mapped", {"rollout.top_k": 0})


def top_p(value: Any, keys: Keys) -> Outcome:
    """The probability of the tokens to sample from."""
    fields = {"rollout.top_p": float(value)}
    reason = "the trainer also scores this distribution; there, that of all tokens"
    return Outcome("changed", fields, reason) if value < 1 else Outcome("mapped", fields)


def checkpointing(value: Any, keys: Keys) -> Outcome:
    """Whether the backward pass recomputes activations."""
    return Outcome("mapped", {"model.remat": "full" if value else "dots"})


def files(section: str, convert: str) -> Rule:
    """Data files: a path, or a list. Several files to train on are a mixture."""

    def rule(value: Any, keys: Keys) -> Outcome:
        listed = [str(file) for file in value] if isinstance(value, list) else [str(value)]
        # An evaluation has one source: its accuracy is one number.
        if len(listed) > 1 and section == "data":
            return mixture(listed, convert)
        fields = {f"{section}.source": listed[0], f"{section}.convert": convert}
        if len(listed) > 1:
            why = f"one file, or a pattern such as data/*.parquet: join {', '.join(listed)}"
            return Outcome("changed", fields, f"the first of {len(listed)} files", unknown={f"{section}.source": why})
        return Outcome("mapped", fields)

    return rule


def mixture(sources: list[str], convert: str) -> Outcome:
    """Returns what several files become: sources that are drawn from by weight."""
    parts: dict[str, dict[str, Any]] = {}
    for source in sources:
        # The name of a file, with as many of its folders as tell it from the others: math_train.
        words = [re.sub(r"\W+", "_", word).strip("_") for word in source.rpartition(".")[0].split("/")]
        names = ["_".join(filter(None, words[-size:])) for size in range(1, len(words) + 1)]
        free = [name for name in names if name.isidentifier() and name not in parts]
        name = free[0] if free else f"source_{len(parts)}"
        parts[name] = dict(source=source, convert=convert, weight=1.0)
    why = f"the weight of each of {', '.join(parts)}: the number of its rows, to draw them as often as there"
    reason = "joins the rows of the files there; here each source has a weight"
    fields = {"data.source": "", "data.convert": "", "data.mixture": parts}
    return Outcome("changed", fields, reason, unknown={"data.mixture": why})
