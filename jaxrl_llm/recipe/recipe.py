"""What a run is asked to do, read once from its config: functions are resolved and facts are derived."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jaxrl_llm.algorithms import advantages, kl
from jaxrl_llm.algorithms.advantages import Estimator
from jaxrl_llm.algorithms.credit import Credit, lambda_returns
from jaxrl_llm.config.names import arguments, channel_weights, own_name, required_inputs, resolve
from jaxrl_llm.recipe.checks import Totals
from jaxrl_llm.rollout import engines
from jaxrl_llm.rollout.protocol import EngineChoice
from jaxrl_llm.structs import Config


@dataclass(frozen=True)
class Recipe:
    """What a `train` config asks for, without devices, data and weights."""

    sizes: Totals
    engine: EngineChoice
    credit: Credit
    own_samples: bool  # the weights that sample are those at the start of the step
    exact: bool  # sampler and trainer also compute the same log-probabilities, to the rounding of float32


def read(config: Config, sizes: Totals) -> Recipe:
    """Returns the recipe of a `train` config that has passed its checks; sizes: what the checks derived."""
    own_samples = engines.own_samples(config)
    exact = own_samples and config.model.dtype == "float32"
    return Recipe(sizes, engines.choose(config), read_credit(config, sizes.updates_per_rollout), own_samples, exact)


def read_estimator(config: Config) -> Estimator:
    """Returns the advantage estimator that a config names, with its arguments."""
    function = resolve(config.advantage.name, advantages)
    compute = partial(function, **arguments(config.advantage))
    return Estimator(own_name(function, advantages), compute, required_inputs(function))


def read_credit(config: Config, updates: int) -> Credit:
    """Returns how the rewards of a run become advantages; updates: optimizer steps on a rollout."""
    returns = None
    if "critic" in config:
        returns = partial(lambda_returns, gamma=config.critic.gamma, lam=config.critic.lam)
    return Credit(
        estimator=read_estimator(config),
        weights=channel_weights(config),
        model_weight=config.reward_model.weight if "reward_model" in config else None,
        overlong_tokens=config.reward.overlong_tokens,
        kl=resolve(config.kl.estimator, kl) if config.kl.placement == "reward" else None,
        returns=returns,
        top_entropy=config.mask.top_entropy,
        updates=updates,
    )
