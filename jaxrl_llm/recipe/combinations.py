"""Checks combinations of algorithm settings that do not work together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm import tasks
from jaxrl_llm.algorithms import advantages, losses
from jaxrl_llm.algorithms.traits import Trait, traits_of
from jaxrl_llm.config.names import closest, own_name, required_inputs, split_call
from jaxrl_llm.config.records import Call
from jaxrl_llm.config.schema import Field, check_call
from jaxrl_llm.data.settings import PREFERENCE
from jaxrl_llm.errors import UserError
from jaxrl_llm.health.rules import RULES
from jaxrl_llm.learner.optim import SKIPS
from jaxrl_llm.learner.scorers import COLUMNS, column_of
from jaxrl_llm.models.adapters import AdapterKind
from jaxrl_llm.recipe.missing import tried
from jaxrl_llm.recipe.no_effect import check_no_effect
from jaxrl_llm.recipe.recipe import Recipe, Settings, SftRecipe
from jaxrl_llm.rollout.environments import check_episodes


def check_algorithm(recipe: Recipe, fields: Mapping[str, Any]) -> None:
    """Checks the algorithm; fields: argument of `checks.check_train`. Raises: UserError, naming the field."""
    check_rewards(recipe)
    check_advantage(recipe)
    check_columns(recipe)
    check_loss(recipe)
    check_ratio_of_a_sequence(recipe)
    check_kl(recipe)
    check_known("skip", recipe.health.skip, SKIPS)
    check_no_effect(recipe, fields)


def check_rewards(recipe: Recipe) -> None:
    """Checks that every reward function exists and has a weight, and that weights are not all 0 if rewards are used."""
    names, weights, model = recipe.reward.functions, recipe.reward.weights, recipe.reward_model
    if not (names or model) or len(names) != len(weights):
        counts = f"{len(names)} function{'s' * (len(names) != 1)} and {len(weights)} weight{'s' * (len(weights) != 1)}"
        example = tuple(1.0 for _ in names) or (1.0,)
        raise UserError(f"config.reward has {counts}: give each function one, such as reward.weights = {example}")
    for name, weight in zip(names, weights, strict=True):
        if problem := Field(float).problem(weight):
            raise UserError(f"config.reward.weights: {name}'s {problem}")
        if problem := Field(str).problem(name):
            raise UserError(f"config.reward.functions: one {problem}")
        with tried():
            check_call(name, tasks.REWARDS, "config.reward.functions")
    channels = [split_call(name)[0] for name in names]
    for name in channels:
        if channels.count(name) > 1:
            times = "twice" if channels.count(name) == 2 else f"{channels.count(name)} times"
            raise UserError(f"config.reward.functions has {name!r} {times}: give it once")
    if not any(weights) and not (model and model.weight) and recipe.estimator.needs_reward:
        raise UserError("config.reward.weights are all 0: nothing would be rewarded; give one function a weight")
    if model:
        check_reward_model(recipe)
    tokens, limit = recipe.reward.overlong_tokens, recipe.rollout.max_completion_tokens
    if tokens > limit:
        raise UserError(f"config.reward.overlong_tokens = {tokens} is more than a completion's {limit}: lower it")


def check_reward_model(recipe: Recipe) -> None:
    """Checks that the scores of a reward model, which come after the sampling, are not needed before."""
    if not recipe.estimator.needs_reward:
        raise UserError(f"config.reward_model would be of no use: advantage {recipe.advantage.name!r} uses no reward")
    if recipe.rollout.resample_rounds:
        raise UserError(
            f"config.rollout.resample_rounds = {recipe.rollout.resample_rounds}: a reward model scores completions "
            "after the sampling, when no group can be replaced: set it to 0"
        )
    if recipe.data.curriculum:
        raise UserError(
            "config.data.curriculum: a reward model scores completions after the curriculum has judged their prompts: "
            "take the section out"
        )
    if recipe.estimator.needs_greedy:
        raise UserError(
            f"config.reward_model: advantage {recipe.advantage.name!r} compares with the greedy completion, which a "
            "reward model does not score: take another advantage"
        )


def check_advantage(recipe: Recipe) -> None:
    """Checks that the estimator fits the size of a group, and that its arguments fit together."""
    given, name = recipe.advantage.name, recipe.estimator.name
    if recipe.group_size < 2 and Trait.COMPARES_GROUP in traits_of(recipe.advantage.function):
        raise UserError(f"config.group_size = 1: advantage {given!r} compares the members of a group; give 2 or more")
    by, group = recipe.advantage.arguments, recipe.group_size
    if name == "pass_at_k" and by["k"] > group:
        raise UserError(f"config.advantage.k = {by['k']}: give 1 to group_size = {group}")
    if name and by.get("epsilon") == 0 and by.get("normalize") != "none":
        raise UserError("config.advantage.epsilon = 0: equal rewards would be divided by 0; give more, like 1e-4")


def check_columns(recipe: Recipe) -> None:
    """Checks that estimator and loss get every input that they ask for, and that no model scores without need."""
    check_takes_batch(recipe.loss)
    for name in {"old", "ref"} & recipe.teachers.keys():
        raise UserError(f"config.teachers.{name}: the column {name}_logprobs is another model's: choose another name")
    scores = {"critic": "values"} if recipe.critic else {}
    scores |= {section: column_of(section) for section in recipe.frozen}
    columns, loss, advantage = (*COLUMNS, *scores.values()), recipe.loss, recipe.advantage
    check_inputs(f"config.loss.name = {loss.name!r}", recipe.loss_columns, columns)
    check_inputs(
        f"config.advantage.name = {advantage.name!r}", recipe.estimator.inputs, advantages.REWARD_INPUTS + columns
    )
    for section, column in scores.items():
        if column not in {*recipe.loss_columns, *recipe.estimator.inputs, "reward_model_scores"}:
            raise UserError(
                f"config.{section} would be of no use: neither loss {loss.name!r} nor advantage {advantage.name!r} "
                f"asks for its {column}"
            )
    for section, settings in recipe.frozen.items():
        if not settings.path:
            raise UserError(f"config.{section}.path = '': give the model's folder or hub id")


def check_inputs(function: str, inputs: Sequence[str], known: Sequence[str]) -> None:
    """Checks that a function gets its inputs. Raises: UserError, with what is known and which section is missing."""
    missing = {"values": "; config.critic is missing, see configs/ppo.py"}
    missing |= {"reward_model_scores": "; config.reward_model is missing"}
    for name in inputs:
        teacher = f"; config.teachers.{name.removesuffix('_logprobs')} is missing, see configs/distillation.py"
        if name not in known:
            hint = missing.get(name, teacher if name.endswith("_logprobs") else "")
            raise UserError(f"{function} asks for {name!r}: there is {', '.join(known)}{hint}")


def check_loss(recipe: Recipe) -> None:
    """Checks that the loss fits the advantages, the updates per rollout and the age of the samples."""
    updates, loss, advantage = recipe.updates_per_rollout, recipe.loss.name, recipe.advantage
    traits = traits_of(recipe.loss.function)
    if Trait.PAIRS in traits:
        raise UserError(
            f"config.loss.name = {loss!r} compares pairs of completions that rows have: run it with jaxrl sft"
        )
    if Trait.WITHOUT_RATIO in traits and updates > 1:
        raise UserError(
            f"config.loss.name = {loss!r} has no ratio to the policy that sampled, but {updates} optimizer steps on a "
            "rollout: set epochs = 1 and prompts_per_update = prompts_per_step, or another loss"
        )
    if Trait.SEQUENCE_ADVANTAGE in traits and Trait.VARIES_BY_TOKEN in traits_of(advantage.function):
        raise UserError(
            f"config.loss.name = {loss!r} wants an advantage a completion, {advantage.name!r} gives one a token"
        )
    bonus, c = recipe.entropy, recipe.importance
    if bonus and bonus.adaptive and bonus.adaptive.most < bonus.coef:
        raise UserError(
            f"config.entropy.adaptive.most = {bonus.adaptive.most} is less than entropy.coef = {bonus.coef}, where the "
            "coefficient begins: raise it"
        )
    if c.action == "mask" and c.low >= c.high:
        raise UserError(f"config.importance.low = {c.low} is not below high = {c.high}: no weight would be kept")
    own = own_name(recipe.loss.function, losses)  # a user's loss may have a correction
    r = recipe.rollout
    if own and (r.max_lag or r.partial) and c.action == "none":
        field, off = ("partial", False) if r.partial else ("max_lag", 0)
        raise UserError(
            f"config.importance.action = 'none' with rollout.{field} = {getattr(r, field)}: loss {loss!r} knows the "
            f"policy at the start of the step, not the older one that sampled: set action = 'auto', or {field} = {off}"
        )


def check_supervised_loss(recipe: SftRecipe) -> None:
    """Checks that the loss of `sft` gets its inputs, and that a loss of pairs has some, of a model that says something.

    Raises: UserError, naming the field.
    """
    loss, column = recipe.loss, recipe.data.rejected_column
    check_takes_batch(loss)
    check_inputs(f"config.loss.name = {loss.name!r}", recipe.loss_columns, ("ref_logprobs",))
    compares = Trait.PAIRS in traits_of(loss.function)
    if compares and not column:
        raise UserError(
            f"config.loss.name = {loss.name!r} compares pairs: name the column of the worse completion in "
            "data.rejected_column, such as 'rejected', and that of the better one in data.completion_column"
        )
    if column and not compares:
        raise UserError(
            f"config.data.rejected_column = {column!r}: loss {loss.name!r} would learn the rejected completions too: "
            "set it to '', or take a loss of pairs (dpo, simpo)"
        )
    for section, problems in recipe.eval_sets.items():
        if problems.function == PREFERENCE and not compares:
            name = f"config.{section}.function = {PREFERENCE!r}"
            raise UserError(f"{name}: loss {loss.name!r} has no pairs: name a reward function")
    if compares and recipe.aggregate.mode != "sequence_mean":
        raise UserError(
            f"config.aggregate.mode = {recipe.aggregate.mode!r}: loss {loss.name!r} stands at each token of its pair, "
            "which would count by its length: set it to 'sequence_mean'"
        )
    if (compares or recipe.loss_columns) and not recipe.model.path:
        raise UserError(
            f"config.loss.name = {loss.name!r} with model.path = '': a new model prefers nothing, and is no reference: "
            "give a model's folder or hub id"
        )


def check_takes_batch(loss: Call) -> None:
    """Raises: UserError, if a function is no loss."""
    if len(required_inputs(loss.function)) < 2:
        raise UserError(
            f"config.loss.name = {loss.name!r} takes no batch: make it loss(logprobs, batch, *, fields), which "
            "returns the loss of each token and a dict of metrics"
        )


def check_ratio_of_a_sequence(recipe: Recipe) -> None:
    """Checks that a loss with one ratio per completion is averaged over completions, not over tokens."""
    loss = recipe.loss.name
    if Trait.SEQUENCE_RATIO not in traits_of(recipe.loss.function):
        return
    if recipe.aggregate.mode == "token_mean":
        raise UserError(
            f"config.aggregate.mode = 'token_mean': loss {loss!r} has one ratio for a completion, which would count by "
            "its length: set 'sequence_mean', or 'sequence_sum' for a completion that counts by its length (LUSPO)"
        )
    of_a_token = recipe.loss.arguments.get("level") == "token"
    if recipe.mask.top_entropy < 1 and not of_a_token:
        raise UserError(
            f"config.mask.top_entropy = {recipe.mask.top_entropy}: the gradient of loss {loss!r}'s ratio reaches every "
            "token of a completion, chosen or not: set it to 1.0, or take loss gspo with level = 'token'"
        )


def check_kl(recipe: Recipe) -> None:
    """Checks that the KL penalty has an effect where it is placed, and that its adaptive coefficient is stable."""
    k = recipe.kl
    if not k:
        return
    if k.placement == "loss" and k.estimator == "k1":
        raise UserError(
            "config.kl: k1 in the loss does nothing (its on-policy gradient has mean zero): "
            "use k2 or k3 there, or placement = 'reward'"
        )
    if k.refresh and k.refresh.mix < 1 and recipe.adapters and not recipe.adapters().linear:
        raise UserError(
            f"config.kl.refresh.mix = {k.refresh.mix}: the mean of two adapters is not the adapter of the mean: set "
            "it to 1.0"
        )
    if k.placement == "reward" and k.estimator == "k3_weighted":
        raise UserError("config.kl.estimator = 'k3_weighted' is for placement = 'loss': take k1, k2 or k3")
    if k.placement == "reward" and not recipe.estimator.uses_penalties:
        raise UserError(
            f"config.kl.placement = 'reward': advantage {recipe.advantage.name!r} does not look at it; "
            "set 'loss', or kl = None"
        )
    name, normalize = recipe.advantage.name, recipe.advantage.arguments.get("normalize")
    divides = Trait.DIVIDES in traits_of(recipe.advantage.function) and normalize != "none"
    if k.placement == "reward" and divides:
        remedy = ", or advantage.normalize to 'none'" * (normalize is not None)
        raise UserError(
            f"config.kl.placement = 'reward': advantage {name!r} divides by a deviation that the penalty is part of, "
            "which would change its size, and make it 0 where the task gives no signal; "
            f"set it to 'loss'{remedy}"
        )
    if k.adaptive and (k.decay != "constant" or not k.coef):
        raise UserError(
            "config.kl.adaptive moves the coefficient by itself: set kl.decay to 'constant' and kl.coef above 0"
        )
    sequences = recipe.prompts_per_update * recipe.group_size
    if k.adaptive and k.adaptive.horizon < sequences:
        raise UserError(
            f"config.kl.adaptive.horizon = {k.adaptive.horizon} is less than an optimizer step's {sequences} "
            "sequences: the coefficient would jump; give more, like 10000"
        )


def check_rollout(recipe: Recipe) -> None:
    """Checks that the completions of a group can differ, and that the engine accepts its settings."""
    r = recipe.rollout
    if r.top_k == 1:
        raise UserError(
            "config.rollout.top_k = 1: every completion would be the greedy one, with nothing to learn from; "
            "give 2 or more, or 0 for all tokens"
        )
    if r.max_lag and r.resample_rounds and not recipe.reward.timeout:
        raise UserError(
            f"config.reward.timeout = 0 with rollout.max_lag = {r.max_lag} and resample_rounds = {r.resample_rounds}: "
            "the thread that samples ahead cannot run reward functions, which find the groups without signal: give "
            "them a time limit, and so a process, or set one of the two to 0"
        )
    low, high = recipe.chosen_engine.temperatures
    if not low <= r.temperature <= high:
        raise UserError(
            f"config.rollout.temperature = {r.temperature}: engine.name = {recipe.engine.name!r} samples at {low:g} to "
            f"{high:g} alone; choose such a temperature, or engine.name = 'jax'"
        )
    if r.partial:
        check_partial(recipe)
    with tried():
        recipe.chosen_engine.check()


def check_partial(recipe: Recipe) -> None:
    """Checks that completions can go on in a later step."""
    r = recipe.rollout
    if not recipe.chosen_engine.in_trainer:
        raise UserError(
            f"config.rollout.partial = True: engine.name = {recipe.engine.name!r} cannot end a call when some groups "
            "are complete: set partial = False, or engine.name = 'jax'"
        )
    if r.resample_rounds:
        raise UserError(
            f"config.rollout.partial = True and resample_rounds = {r.resample_rounds}: groups without signal are not "
            "replaced where groups go on: set one of them to False or 0"
        )


def check_turns(recipe: Recipe) -> None:
    """Checks that an environment has limits of its episodes, and that a turn and an observation fit into one."""
    check_episodes(recipe.env, recipe.turns)
    limit = recipe.rollout.max_completion_tokens
    for field in ("tokens", "observation_tokens"):
        tokens = recipe.turns[field] if recipe.turns else 0
        if tokens > limit:
            raise UserError(
                f"config.turns.{field} = {tokens} is more than an episode has: rollout.max_completion_tokens is "
                f"{limit}; lower one or raise the other"
            )


def check_adapters(recipe: Settings) -> None:
    """Checks that adapters have a base."""
    if not recipe.adapters:
        return
    if not isinstance(recipe.adapters(), AdapterKind):
        raise UserError(f"config.adapters.name = {recipe.adapters.name!r} is no AdapterKind: see docs/lora.md")
    if not recipe.model.path:
        raise UserError("config.adapters: model.path is '': a new model has nothing to adapt: give a model's folder")


def check_health(recipe: Settings, fields: Mapping[str, Any]) -> None:
    """Checks the names of the rules that act, and that no wait is taken for a hang."""
    minutes = recipe.health.hang_minutes
    for field, seconds in fields.items():
        waits = field.endswith(".timeout") or field == "engine.patience"
        if waits and 0 < 60 * minutes < seconds:
            raise UserError(
                f"config.{field} = {seconds:g} seconds, but config.health.hang_minutes = {minutes:g}: such a wait "
                "would be taken for a hang: raise hang_minutes (0: never)"
            )
    health, rules = recipe.health, [rule.__name__ for rule in RULES]
    check_known("stop", health.stop, rules)
    if health.rollback:
        check_known("rollback.rules", health.rollback.rules, rules)
        if not health.rollback.rules:
            raise UserError("config.health.rollback.rules is empty: name the rules, or take the section out")
        both = sorted(set(health.stop) & set(health.rollback.rules))
        if both:
            raise UserError(f"config.health.stop and config.health.rollback.rules both have {both[0]!r}: choose one")


def check_known(field: str, given: Iterable[str], there: Collection[str]) -> None:
    """Raises: UserError, if a field of the section health has a name that is not there."""
    for name in set(given) - set(there):
        close = closest(name, there)
        hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(there)}"
        raise UserError(f"config.health.{field} has {name!r}, which is not there: {hint}")
