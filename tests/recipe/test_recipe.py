"""A config is read once: the recipe has its functions, and the facts that follow from it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxrl_llm.algorithms import kl
from jaxrl_llm.algorithms.traits import Trait, declares
from jaxrl_llm.build import opened_run
from jaxrl_llm.config import load, records
from jaxrl_llm.learner.settings import RewardModelSettings, column_of
from jaxrl_llm.recipe import read, read_either
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.recipe.trees import check_trees
from jaxrl_llm.rollout.actor import WeightLease
from jaxrl_llm.session.workdir import check_workdir, write_config

ROOT = Path(__file__).parents[2]


def recipe_of(name: str, **changes: object) -> Recipe:
    config = load.load(name)
    for field, setting in changes.items():
        load.override(config, field.replace("__", "."), str(setting))
    return read(config)


def test_whose_samples_they_are_follows_from_lag_dtype_and_engine():
    facts = {}
    for name, changes in (
        ("grpo", {}), ("grpo", {"model__dtype": "bfloat16"}), ("grpo", {"rollout__max_lag": 1}),
        ("grpo_vllm", {"engine__managed": False, "engine__servers": "('http://127.0.0.1:8000',)"}),
    ):  # fmt: skip
        recipe = recipe_of(name, **changes)
        facts[name, *changes] = (recipe.chosen_engine.in_trainer, recipe.own_samples, recipe.exact)
    assert list(facts.values()) == [(True, True, True), (True, True, False), (True, False, False), (False,) * 3]


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


@pytest.mark.parametrize("name", ["grpo", "ppo", "lora", "search_grpo", "pictures", "pictures_sft", "dpo"])
def test_a_recipe_has_every_value_of_its_config(name):
    config = load.load(name)
    recipe = read_either(config)
    kind = SftRecipe if name == "dpo" or "sft" in name else Recipe
    assert type(recipe) is kind
    for path, expected in load.flatten(ConfigDict(records.present(kind, config.to_dict()))).items():
        value = recipe
        for part in path.split("."):
            if isinstance(value, records.Call) and part != "name":
                value = value.arguments
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        assert value == expected, path


def test_a_new_field_with_a_default_does_not_forbid_to_resume(tmp_path, refused):
    @dataclass(frozen=True, kw_only=True)
    class Older:
        width: int

    @dataclass(frozen=True, kw_only=True)
    class Newer(Older):
        depth: int = 2

    (tmp_path / "config.json").write_text('{"width": 1}')
    known = records.table(Newer, {"width": 1})
    assert records.read(Newer, {"width": 1}) == Newer(width=1)
    for resumed in ({"width": 1}, {"width": 1, "depth": 2}):
        records.check_fields(known, resumed, resumed)
        check_workdir(tmp_path, resumed, known)
    with refused("config.depth"):
        check_workdir(tmp_path, {"width": 1, "depth": 3}, known)
    with refused("config.width"):
        records.check_fields(known, {"depth": 2}, {"depth": 2})


def test_a_named_section_may_hold_a_section_and_fields_that_refer_to_others(tmp_path):
    config = load.load("grpo")
    config.num_steps, config.rollout.max_completion_tokens = 7, config.get_ref("num_steps")
    config.loss = ConfigDict(dict(name="test_recipe.limited", limits=dict(low=0.1)))
    for _ in range(2):  # also when it is resumed
        with opened_run(config, tmp_path / "run", read, lambda *of_run: of_run) as (place, recipe):
            assert recipe.rollout.max_completion_tokens == recipe.scheduled_steps == 7
            assert recipe.loss.arguments == {"limits": {"low": 0.1}}
            place.workdir.mkdir(exist_ok=True)
            write_config(place.workdir, place.config)


def limited(logprobs, batch, *, limits: dict):
    return logprobs * limits["low"], {}


def asks(logprobs, batch, entropy, ref_logprobs): ...


def asks_a_critic(logprobs, batch, values): ...


def asks_a_teacher(logprobs, batch, third_logprobs): ...


def asks_for_nothing_known(logprobs, batch, surprise): ...


def nearest(one_logprobs, other_logprobs, old_logprobs): ...


def test_agents_whose_calls_form_a_tree_refuse_what_needs_chains(refused):
    check_trees(recipe_of("grpo"))
    for name, changes, field in (
        ("ppo", {}, "config.advantage.name"),
        ("reinforce_pp", {}, "config.advantage.name"),
        ("grpo", {"rollout__partial": 1}, "config.rollout.partial"),
    ):
        with refused(field):
            check_trees(recipe_of(name, **changes))
    recipe = recipe_of("ppo")
    with refused("config.critic"):
        check_trees(replace(recipe, advantage=recipe_of("grpo").advantage))
    with refused("config.reward_model"):
        check_trees(replace(recipe_of("grpo"), reward_model=RewardModelSettings(path="judge", weight=1.0)))


def test_there_may_be_several_teachers_each_with_a_column_of_its_name(refused):
    c = load.load("distillation")
    c.advantage.name = "test_recipe.nearest"
    with refused("config.advantage.name", "one_logprobs", "config.teachers.one"):
        read(c)
    c.teachers = {name: dict(path=name) for name in ("one", "other")}
    recipe = read(c)
    assert recipe.other_paths == {"teachers.one": "one", "teachers.other": "other"}
    assert {column_of(section) for section in recipe.frozen} == {"one_logprobs", "other_logprobs"}
    c.loss.name = "test_recipe.asks_a_teacher"
    with refused("config.loss.name", "third_logprobs", "config.teachers.third"):
        read(c)


def makes_a_loss():
    return lambda logprobs, batch: (logprobs, {})


def with_loss(loss: str, config: str = "grpo", **changes: object) -> Recipe:
    c = load.load(config)
    c.loss = ConfigDict(dict(name=f"test_recipe.{loss}"))
    c.kl = None
    for field, setting in changes.items():
        load.override(c, field.replace("__", "."), str(setting))
    return read(c)


def test_what_a_loss_asks_for_is_computed_also_without_a_penalty_and_a_mask():
    columns = {"old_logprobs", "entropy", "ref_logprobs", "values"}
    assert recipe_of("reinforce").columns & columns == set()
    assert recipe_of("grpo", prompts_per_update=64).columns & columns == {"ref_logprobs"}  # of the penalty
    recipe = with_loss("asks")
    assert recipe.columns & columns == {"entropy", "ref_logprobs"}
    assert recipe.credit.loss_columns == ("entropy", "ref_logprobs")
    assert recipe_of("top_entropy").columns & columns >= {"entropy"}
    assert with_loss("asks", host_memory__reference=True).host_memory.reference  # there is a reference


def test_a_loss_without_its_inputs_is_refused(refused):
    for loss, word in (
        ("asks_a_critic", "config.critic"),
        ("asks_for_nothing_known", "surprise"),
        ("makes_a_loss", ""),
    ):
        with refused("config.loss.name", word):
            with_loss(loss)
    assert "values" in with_loss("asks_a_critic", "ppo").credit.loss_columns


@declares(Trait.WITHOUT_RATIO, Trait.SEQUENCE_ADVANTAGE)
def limits_itself(logprobs, batch): ...


@declares(Trait.COMPARES_GROUP)
def compares(rewards): ...


@declares(Trait.VARIES_BY_TOKEN)
def varies(token_rewards): ...


def test_a_function_of_ones_own_declares_what_it_does_not_go_with(refused):
    for changes, field in (
        ({"epochs": 2}, "config.loss.name"),
        ({"advantage.name": "test_recipe.varies"}, "config.loss.name"),
        ({"group_size": 1}, "config.group_size"),
    ):
        c = load.load("reinforce")
        c.loss, c.advantage = (ConfigDict(dict(name=f"test_recipe.{name}")) for name in ("limits_itself", "compares"))
        read(c)
        c.update_from_flattened_dict(changes)
        with refused(field):
            read(c)


def test_an_absent_mixture_is_none():
    config = load.load("grpo")
    del config.data.mixture
    assert read(config).data.mixture == {}


def test_what_the_engine_reads_is_taken_back_before_an_update_gets_it():
    """An update donates the parameters. Its states come from `reclaim`, which waits for the push."""
    pushed: Future = Future()
    lease = WeightLease({"policy": 1}, None, pushed, None)
    with ThreadPoolExecutor(max_workers=1) as thread:
        taken = thread.submit(lease.reclaim)
        with pytest.raises(TimeoutError):
            taken.result(0.05)
        pushed.set_result(None)
        assert taken.result(5) == ({"policy": 1}, {})
