"""Checks combinations of algorithm settings that do not work together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
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
from jaxrl_llm.learner.settings import COLUMNS, column_of
from jaxrl_llm.models.adapters import AdapterKind
from jaxrl_llm.recipe.missing import tried
from jaxrl_llm.recipe.no_effect import check_no_effect
from jaxrl_llm.recipe.recipe import Recipe, Settings, SftRecipe
from jaxrl_llm.rollout.named_environments import check_episodes


def check_algorithm(recipe: Recipe, fields: Mapping[str, Any]) -> None:
    """Checks the algorithm of a `train` recipe.

    fields: values of the config by their paths, with the defaults. Raises: UserError, naming the field.
    """
    check_rewards(recipe)
    check_advantage(recipe)
    check_columns(recipe)
    check_loss(recipe)
    check_sequence_ratio(recipe)
    check_kl(recipe)
    check_known("skip", recipe.health.skip, SKIPS)
    check_no_effect(recipe, fields)


def check_rewards(recipe: Recipe) -> None:
    """Checks that every reward function exists and has a weight, and that weights are not all 0 if rewards are used."""
    names, weights, model = recipe.reward.functions, recipe.reward.weights, recipe.reward_model
    # Each reward function needs one weight, and a run needs at least one function or a reward model.
    if not (names or model) or len(names) != len(weights):
        counts = f"{len(names)} function{'s' * (len(names) != 1)} and {len(weights)} weight{'s' * (len(weights) != 1)}"
        example = tuple(1.0 for _ in names) or (1.0,)
        raise UserError(
            f"config.reward has {counts}: every function needs one weight, for example reward.weights = {example}"
        )
    for name, weight in zip(names, weights, strict=True):
        if problem := Field(float).problem(weight):
            raise UserError(f"config.reward.weights: the weight of {name} {problem}")
        if problem := Field(str).problem(name):
            raise UserError(
                f"config.reward.functions has an entry that {problem}: name each function as text, such as "
                "'math.accuracy'"
            )
        with tried():
            check_call(name, tasks.REWARDS, "config.reward.functions")
    # The rewards of a function are logged under its name, without its arguments, so each name must be unique.
    functions = [split_call(name)[0] for name in names]
    for function in functions:
        if functions.count(function) > 1:
            times = "twice" if functions.count(function) == 2 else f"{functions.count(function)} times"
            raise UserError(f"config.reward.functions names {function!r} {times}: name each function once")
    if not any(weights) and not (model and model.weight) and recipe.estimator.needs_reward:
        raise UserError(
            "config.reward.weights are all 0, so every reward would be 0: at least one weight must differ from 0"
        )
    if model:
        check_reward_model(recipe)
    tokens, limit = recipe.reward.overlong_tokens, recipe.rollout.max_completion_tokens
    if tokens > limit:
        raise UserError(
            f"config.reward.overlong_tokens = {tokens} must be at most rollout.max_completion_tokens = {limit}"
        )


def check_reward_model(recipe: Recipe) -> None:
    """Checks that no setting needs the scores of a reward model during sampling, because they come after it."""
    if not recipe.estimator.needs_reward:
        raise UserError(
            f"config.reward_model has no effect: advantage {recipe.advantage.name!r} uses no reward; remove the section"
        )
    if recipe.rollout.resample_rounds:
        raise UserError(
            f"config.rollout.resample_rounds = {recipe.rollout.resample_rounds}: groups are replaced during sampling, "
            "but a reward model scores completions after it; with config.reward_model, resample_rounds must be 0"
        )
    if recipe.data.curriculum:
        raise UserError(
            "config.data.curriculum judges prompts during sampling, but config.reward_model scores completions after "
            "it: remove one of the two sections"
        )
    if recipe.estimator.needs_greedy:
        raise UserError(
            f"config.reward_model scores no greedy completion, but advantage {recipe.advantage.name!r} compares each "
            "completion with the greedy one: choose another advantage"
        )


def check_advantage(recipe: Recipe) -> None:
    """Checks that the estimator fits the size of a group, and that its arguments fit together."""
    advantage, estimator, group_size = recipe.advantage, recipe.estimator.name, recipe.group_size
    if group_size < 2 and Trait.COMPARES_GROUP in traits_of(advantage.function):
        raise UserError(
            f"config.group_size = 1: advantage {advantage.name!r} compares the completions of a group, so group_size "
            "must be 2 or more"
        )
    if recipe.estimator.needs_turns:
        check_turn_rewards(recipe)
    arguments = advantage.arguments
    if estimator == "pass_at_k" and arguments["k"] > group_size:
        raise UserError(f"config.advantage.k = {arguments['k']} must be between 1 and config.group_size = {group_size}")
    if estimator and arguments.get("epsilon") == 0 and arguments.get("normalize") != "none":
        raise UserError(
            "config.advantage.epsilon = 0: a group with equal rewards would be divided by 0; set epsilon above 0, "
            "for example 1e-4"
        )


def check_turn_rewards(recipe: Recipe) -> None:
    """Checks that the completions of the run have several turns, and that turns have rewards.

    Only an estimator that assigns credit by the turn needs both.
    """
    problem = f"config.advantage.name = {recipe.advantage.name!r} assigns credit by the turn, but"
    if not recipe.episodes.calls:
        raise UserError(
            f"{problem} without config.env a completion is one turn: add the section env, or choose another advantage"
        )
    most_turns = {section.turns.most for section in recipe.episodes.sections().values()}
    if (recipe.agents and recipe.agents.calls == 1) or most_turns == {1}:
        field = "env.calls" if recipe.agents else "turns.most"
        raise UserError(
            f"{problem} config.{field} = 1 allows a single turn: raise {field}, or choose another advantage"
        )
    if not recipe.turn_channel:
        name = "agents.reward" if recipe.agents else "environment.reward"
        raise UserError(
            f"{problem} no reward function of the run counts the rewards of turns: add {name!r} with a weight to "
            "config.reward.functions, or choose another advantage"
        )


def check_columns(recipe: Recipe) -> None:
    """Checks that estimator and loss get every input that they need, and that each model's scores are used.

    A column is an array of scores for each token, such as the log-probabilities of a teacher.
    """
    check_takes_batch(recipe.loss)
    for name in {"old", "ref"} & recipe.teachers.keys():
        raise UserError(
            f"config.teachers.{name}: the column {name}_logprobs belongs to another model; choose another name for "
            "this teacher"
        )
    # Each section of the config that adds a model, with the column that this model computes.
    model_columns = {"critic": "values"} if recipe.critic else {}
    model_columns |= {section: column_of(section) for section in recipe.frozen}
    columns, loss, advantage = (*COLUMNS, *model_columns.values()), recipe.loss, recipe.advantage
    turn_inputs = advantages.TURN_INPUTS if recipe.estimator.needs_turns else ()
    estimator_inputs = *advantages.REWARD_INPUTS, *turn_inputs, *columns
    check_inputs(f"config.loss.name = {loss.name!r}", recipe.loss_columns, columns)
    check_inputs(f"config.advantage.name = {advantage.name!r}", recipe.estimator.inputs, estimator_inputs)
    for section, column in model_columns.items():
        if column not in {*recipe.loss_columns, *recipe.estimator.inputs, "reward_model_scores"}:
            raise UserError(
                f"config.{section} has no effect, because neither loss {loss.name!r} nor advantage {advantage.name!r} "
                f"has the argument {column}: remove the section"
            )
    for section, settings in recipe.frozen.items():
        if not settings.path:
            raise UserError(f"config.{section}.path = '' must be the folder or the hub id of a model")


def check_inputs(function: str, inputs: Sequence[str], known_columns: Sequence[str]) -> None:
    """Checks that every argument of a loss or an estimator is a column that the run computes.

    function: field and value that name the function; inputs: names of its arguments; known_columns: columns of the run.
    Raises: UserError, with the columns and the section of the config that would add the missing one.
    """
    # Each hint names the section of the config that adds a column.
    hints = {"values": ", or add the section config.critic (see configs/ppo.py)"}
    hints |= {"reward_model_scores": ", or add the section config.reward_model"}
    for name in inputs:
        teacher = name.removesuffix("_logprobs")
        add_teacher = f", or add the section config.teachers.{teacher} (see configs/distillation.py)"
        if name not in known_columns:
            hint = hints.get(name, add_teacher if name.endswith("_logprobs") else "")
            raise UserError(
                f"{function} has the argument {name!r}, but this run computes no such column: "
                f"use one of {', '.join(known_columns)}{hint}"
            )


def check_loss(recipe: Recipe) -> None:
    """Checks that the loss fits the advantages, the updates per rollout and the age of the samples."""
    updates, loss, advantage = recipe.updates_per_rollout, recipe.loss.name, recipe.advantage
    traits = traits_of(recipe.loss.function)
    if Trait.PAIRS in traits:
        raise UserError(
            f"config.loss.name = {loss!r} learns from preference pairs in the rows: run this config with jaxrl sft"
        )
    if Trait.WITHOUT_RATIO in traits and updates > 1:
        raise UserError(
            f"config.loss.name = {loss!r} has no importance ratio, but this run makes {updates} optimizer steps per "
            "rollout: set epochs = 1 and prompts_per_update = prompts_per_step, or choose another loss"
        )
    if Trait.SEQUENCE_ADVANTAGE in traits and Trait.VARIES_BY_TOKEN in traits_of(advantage.function):
        raise UserError(
            f"config.loss.name = {loss!r} needs one advantage per completion, but advantage {advantage.name!r} "
            "returns one per token: choose another advantage or loss"
        )
    entropy, importance, rollout = recipe.entropy, recipe.importance, recipe.rollout
    if entropy and entropy.adaptive and entropy.adaptive.most < entropy.coef:
        raise UserError(
            f"config.entropy.adaptive.most = {entropy.adaptive.most} must be at least entropy.coef = {entropy.coef}, "
            "the first value of the coefficient"
        )
    if importance.action == "mask" and importance.low >= importance.high:
        raise UserError(
            f"config.importance.low = {importance.low} must be below importance.high = {importance.high}; otherwise "
            "action 'mask' would remove every token"
        )
    # A loss that the user has written may correct for older weights itself, so only losses of this package are refused.
    package_loss = own_name(recipe.loss.function, losses)
    if package_loss and (rollout.max_lag or rollout.partial) and importance.action == "none":
        field = "partial" if rollout.partial else "max_lag"
        raise UserError(
            f"config.importance.action = 'none' with rollout.{field} = {getattr(rollout, field)}: older weights sample "
            f"some tokens, and loss {loss!r} does not correct for them; set importance.action = 'auto', or "
            f"rollout.{field} = 0"
        )


def check_supervised_loss(recipe: SftRecipe) -> None:
    """Checks that the loss of `sft` gets its inputs, and that a loss of pairs has pairs and a trained model.

    Raises: UserError, naming the field.
    """
    loss, column = recipe.loss, recipe.data.rejected_column
    check_takes_batch(loss)
    check_inputs(f"config.loss.name = {loss.name!r}", recipe.loss_columns, ("ref_logprobs",))
    needs_pairs = Trait.PAIRS in traits_of(loss.function)
    if needs_pairs and not column:
        raise UserError(
            f"config.loss.name = {loss.name!r} compares preference pairs: set data.rejected_column to the column of "
            "the worse completion, for example 'rejected', and data.completion_column to that of the better one"
        )
    if column and not needs_pairs:
        raise UserError(
            f"config.data.rejected_column = {column!r}: loss {loss.name!r} would also learn the rejected completions; "
            "set rejected_column to '', or choose a loss of pairs (dpo, simpo)"
        )
    for section, problems in recipe.eval_sets.items():
        if problems.function == PREFERENCE and not needs_pairs:
            raise UserError(
                f"config.{section}.function = {PREFERENCE!r} judges preference pairs, but loss {loss.name!r} has none: "
                "name a reward function"
            )
    if needs_pairs and recipe.aggregate.mode != "sequence_mean":
        raise UserError(
            f"config.aggregate.mode = {recipe.aggregate.mode!r}: loss {loss.name!r} is equal at every token of a pair, "
            "so longer pairs would weigh more; set mode to 'sequence_mean'"
        )
    if (needs_pairs or recipe.loss_columns) and not recipe.model.path:
        raise UserError(
            f"config.loss.name = {loss.name!r} needs a trained model, but model.path = '' makes a new one: set "
            "model.path to the folder or the hub id of a model"
        )


def check_takes_batch(loss: Call) -> None:
    """Raises: UserError, if the function of `loss` cannot be called as a loss."""
    if len(required_inputs(loss.function)) < 2:
        raise UserError(
            f"config.loss.name = {loss.name!r} must be a function loss(logprobs, batch, *, fields) that returns the "
            "loss of each token and a dict of metrics"
        )


def check_sequence_ratio(recipe: Recipe) -> None:
    """Checks that a loss with one ratio per completion is averaged over completions, not over tokens."""
    loss = recipe.loss.name
    if Trait.SEQUENCE_RATIO not in traits_of(recipe.loss.function):
        return
    if recipe.aggregate.mode == "token_mean":
        raise UserError(
            f"config.aggregate.mode = 'token_mean': loss {loss!r} has one ratio per completion, so longer completions "
            "would weigh more; set mode to 'sequence_mean', or to 'sequence_sum' to weigh by length (LUSPO)"
        )
    has_ratio_per_token = recipe.loss.arguments.get("level") == "token"
    if recipe.mask.top_entropy < 1 and not has_ratio_per_token:
        raise UserError(
            f"config.mask.top_entropy = {recipe.mask.top_entropy}: the ratio of loss {loss!r} depends on every token, "
            "so masked tokens would learn too; set top_entropy to 1.0, or use loss gspo with level = 'token'"
        )


def check_kl(recipe: Recipe) -> None:
    """Checks that the KL penalty has an effect where it is placed, and that its adaptive coefficient is stable."""
    kl, advantage = recipe.kl, recipe.advantage
    if not kl:
        return
    if kl.placement == "loss" and kl.estimator == "k1":
        raise UserError(
            "config.kl.estimator = 'k1' has no effect with kl.placement = 'loss', because its on-policy gradient has "
            "mean zero: use 'k2' or 'k3', or placement = 'reward'"
        )
    if kl.refresh and kl.refresh.mix < 1 and recipe.adapters and not recipe.adapters().linear:
        raise UserError(
            f"config.kl.refresh.mix = {kl.refresh.mix} mixes policy and reference, but a mean of adapters of this kind "
            "is not the adapter of the mean policy: set kl.refresh.mix to 1.0"
        )
    if kl.placement == "reward" and kl.estimator == "k3_weighted":
        raise UserError(
            "config.kl.estimator = 'k3_weighted' needs kl.placement = 'loss': with placement = 'reward' use 'k1', "
            "'k2' or 'k3'"
        )
    if kl.placement == "reward" and not recipe.estimator.uses_penalties:
        raise UserError(
            f"config.kl.placement = 'reward' has no effect, because advantage {advantage.name!r} ignores penalties: "
            "set placement to 'loss', or kl = None"
        )
    normalize = advantage.arguments.get("normalize")
    divides_by_deviation = Trait.DIVIDES in traits_of(advantage.function) and normalize != "none"
    if kl.placement == "reward" and divides_by_deviation:
        remedy = ", or advantage.normalize to 'none'" * (normalize is not None)
        raise UserError(
            f"config.kl.placement = 'reward': advantage {advantage.name!r} divides the penalty by the deviation of "
            f"rewards, which would rescale it; set placement to 'loss'{remedy}"
        )
    if kl.adaptive and (kl.decay != "constant" or not kl.coef):
        raise UserError(
            f"config.kl.adaptive changes the coefficient itself: kl.decay = {kl.decay!r} must be 'constant', and "
            f"kl.coef = {kl.coef} must be above 0"
        )
    sequences = recipe.prompts_per_update * recipe.group_size
    if kl.adaptive and kl.adaptive.horizon < sequences:
        raise UserError(
            f"config.kl.adaptive.horizon = {kl.adaptive.horizon} must be at least the {sequences} sequences of an "
            "optimizer step; otherwise the coefficient would jump. A usual value is 10000"
        )


def check_rollout(recipe: Recipe) -> None:
    """Checks that the completions of a group can differ, and that the engine accepts its settings."""
    rollout = recipe.rollout
    if rollout.top_k == 1:
        raise UserError(
            "config.rollout.top_k = 1 makes all completions of a group equal, so nothing is learned: top_k must be 2 "
            "or more, or 0 for all tokens"
        )
    if rollout.max_lag and rollout.resample_rounds and not recipe.reward.timeout:
        raise UserError(
            f"config.reward.timeout = 0 with rollout.max_lag = {rollout.max_lag} and resample_rounds = "
            f"{rollout.resample_rounds}: the sampling thread needs rewards, which it can only get from processes; set "
            "timeout above 0, or max_lag or resample_rounds to 0"
        )
    low, high = recipe.chosen_engine.temperatures
    if not low <= rollout.temperature <= high:
        raise UserError(
            f"config.rollout.temperature = {rollout.temperature} must be between {low:g} and {high:g} with "
            f"engine.name = {recipe.engine.name!r}; engine 'jax' takes other temperatures"
        )
    if rollout.partial:
        check_partial(recipe)
    with tried():
        recipe.chosen_engine.check()


def check_partial(recipe: Recipe) -> None:
    """Checks that unfinished completions can continue in a later step."""
    count = recipe.rollout.partial
    if not recipe.chosen_engine.in_trainer:
        raise UserError(
            f"config.rollout.partial = {count}: engine.name = {recipe.engine.name!r} cannot stop while some groups are "
            "unfinished; set partial = 0, or engine.name = 'jax'"
        )
    if rounds := recipe.rollout.resample_rounds:
        raise UserError(
            f"config.rollout.partial = {count} with resample_rounds = {rounds}: partial rollouts cannot replace "
            "groups; set partial = 0, or resample_rounds = 0"
        )
    if drafts := recipe.chosen_engine.drafts:
        raise UserError(
            f"config.engine.drafts = {drafts} with rollout.partial = {count}: right drafts would decide which groups a "
            "step has, and a resumed run has other drafts; set engine.drafts = 0, or rollout.partial = 0"
        )
    # The bound lets all groups that have reached rollout.max_age fit into one batch.
    if count > recipe.prompts_per_step:
        raise UserError(
            f"config.rollout.partial = {count} must be at most prompts_per_step = {recipe.prompts_per_step}, because a "
            "step learns from only so many groups: lower partial"
        )


def check_turns(recipe: Recipe) -> None:
    """Checks that an environment has limits of its episodes, and that a turn and an observation fit into one."""
    check_episodes(recipe.episodes)
    limit = recipe.rollout.max_completion_tokens
    for (prefix, section), field in product(recipe.episodes.sections().items(), ("tokens", "observation_tokens")):
        if (tokens := section.turns[field]) > limit:
            raise UserError(
                f"config.{prefix}turns.{field} = {tokens} must be at most rollout.max_completion_tokens = "
                f"{limit}, the tokens of a whole episode"
            )


def check_adapters(recipe: Settings) -> None:
    """Checks that adapters have a base model."""
    if not recipe.adapters:
        return
    if not isinstance(recipe.adapters(), AdapterKind):
        raise UserError(
            f"config.adapters.name = {recipe.adapters.name!r} must be a function that returns an AdapterKind "
            "(docs/lora.md)"
        )
    if not recipe.model.path:
        raise UserError(
            "config.adapters needs a trained model, but model.path = '' makes a new one: set model.path to the folder "
            "or the hub id of a model"
        )


def check_health(recipe: Settings, fields: Mapping[str, Any]) -> None:
    """Checks the names of the health rules that act, and that no allowed wait counts as a hang.

    fields: values of the config by their paths, with the defaults. Raises: UserError, naming the field.
    """
    minutes = recipe.health.hang_minutes
    for field, seconds in fields.items():
        is_wait = field.endswith(".timeout") or field == "engine.patience"
        if is_wait and 0 < 60 * minutes < seconds:
            raise UserError(
                f"config.{field} = {seconds:g} seconds is longer than config.health.hang_minutes = {minutes:g}, so "
                "that such a wait would count as a hang: raise hang_minutes, or set it to 0 (never)"
            )
    health, rules = recipe.health, [rule.__name__ for rule in RULES]
    check_known("stop", health.stop, rules)
    if health.rollback:
        check_known("rollback.rules", health.rollback.rules, rules)
        if not health.rollback.rules:
            raise UserError(
                "config.health.rollback.rules = () must name at least one rule: add one, or remove the section rollback"
            )
        in_both = sorted(set(health.stop) & set(health.rollback.rules))
        if in_both:
            raise UserError(
                f"config.health.stop and config.health.rollback.rules both name {in_both[0]!r}: name each rule in one "
                "of the two fields"
            )


def check_known(field: str, names: Iterable[str], known_names: Collection[str]) -> None:
    """Raises: UserError, if a field of the section `health` has a name that is not in `known_names`."""
    for name in set(names) - set(known_names):
        similar_names = closest(name, known_names)
        hint = f"did you mean {similar_names[0]!r}?" if similar_names else f"known names: {', '.join(known_names)}"
        raise UserError(f"config.health.{field}: unknown name {name!r}; {hint}")
