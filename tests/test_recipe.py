"""A config is read once: the recipe has its functions, and the facts that follow from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.algorithms import kl
from jaxrl_llm.config import load
from jaxrl_llm.recipe import checks
from jaxrl_llm.recipe.recipe import Recipe, read

ROOT = Path(__file__).parent.parent


def recipe_of(name: str, **changes: object) -> Recipe:
    config = load.load(ROOT / "configs" / f"{name}.py")
    for field, setting in changes.items():
        load.override(config, field.replace("__", "."), str(setting))
    return read(config, checks.check_train(config))


@pytest.mark.parametrize(
    ("changes", "own_samples", "exact"),
    [({}, True, True), ({"model__dtype": "bfloat16"}, True, False), ({"rollout__max_lag": 1}, False, False)],
)
def test_whose_samples_they_are_follows_from_lag_and_dtype(changes, own_samples, exact):
    recipe = recipe_of("grpo", **changes)
    assert (recipe.own_samples, recipe.exact) == (own_samples, exact)


def test_the_samples_of_another_engine_are_never_exact():
    recipe = recipe_of("grpo_vllm", engine__managed=False, engine__servers="('http://127.0.0.1:8000',)")
    assert (recipe.engine.in_trainer, recipe.own_samples, recipe.exact) == (False, False, False)


def test_credit_has_the_functions_that_a_config_names():
    grpo, ppo, remax = (recipe_of(name).credit for name in ("grpo", "ppo", "remax"))
    assert (grpo.estimator.name, grpo.returns, grpo.model_weight) == ("grpo", None, None)
    assert grpo.weights == {"arithmetic.accuracy": 1.0, "arithmetic.thought": 0.0}
    assert [x.estimator.needs_greedy for x in (grpo, ppo, remax)] == [False, False, True]
    assert ppo.returns is not None and "values" in ppo.estimator.inputs
    advantages = grpo.estimator.compute(rewards=np.array([[1.0, 0.0]], np.float32))  # with the config's arguments
    np.testing.assert_allclose(advantages, [[0.5**0.5, -(0.5**0.5)]], rtol=1e-3)
    changes = {"kl__placement": "reward", "kl__estimator": "k1", "advantage__normalize": "none"}
    assert grpo.kl is None and recipe_of("grpo", **changes).credit.kl is kl.k1


def test_only_the_builder_the_checks_and_tools_know_a_recipe():
    package = ROOT / "jaxrl_llm"
    readers = [file for file in package.rglob("*.py") if "recipe.recipe" in file.read_text()]
    rooms = {file.relative_to(package).parts[0] for file in readers}
    assert rooms <= {"build.py", "recipe", "tools"}
