"""The terms beside the policy loss, and the coefficients that move by themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.algorithms import kl, losses
from jaxrl_llm.algorithms.importance import make_importance_weights
from jaxrl_llm.algorithms.sampling import Sampling, log_distribution, token_logprobs_and_residuals
from jaxrl_llm.learner import learning, optim, update
from jaxrl_llm.machine import transfers
from jaxrl_llm.session.record import update_metrics
from jaxrl_llm.structs import Batch


def with_columns(logprobs, batch, entropy, ref_logprobs):
    """A loss with inputs of its own."""
    return entropy * (logprobs - ref_logprobs) ** 2, {}


CORRECT = make_importance_weights(level="sequence", action="truncate", high=1.1)
CASES = {  # the policy loss, its other terms, and how it is aggregated
    "plain": (losses.ppo_clip, {}, "sequence_mean"),
    "off-policy mask": (losses.ppo_clip, dict(off_policy=0.05), "sequence_mean"),
    "columns": (with_columns, dict(kl=kl.k3), "constant"),
    "all": (losses.gspo, dict(kl=kl.k3, kl_weighted=True, correct=CORRECT, off_policy=0.05), "sequence_mean"),
}
COEFS = {"kl/coef": 0.1, "entropy/coef": 0.01}


@contextmanager
def model_of(score: Callable):
    """Replaces the model by score(params, batch) -> log-probabilities, entropies."""
    with pytest.MonkeyPatch.context() as patch:
        scored = lambda model, params, batch, sampling: (score(params, batch), None)  # noqa: E731
        patch.setattr(update, "completion_logprobs_and_load", scored)
        yield


TABLE = partial(model_of, lambda params, batch: (params["table"][batch.prompts[:, 0]],) * 2)


@cache
def gradients(case: str, shape=(1, 1, 1), microbatch: int = 0) -> list[tuple]:
    """Gradients of a table of log-probabilities, and metrics: with each of two fillers at tokens not trained."""
    loss, terms, mode = CASES[case]
    mesh, made = tiny.mesh_of(shape), []
    aggregate = partial(losses.aggregation_weights, mode=mode, constant_length=5 if mode == "constant" else 0)
    objective = update.policy_objective(None, loss, Sampling(), **terms)
    of = jax.jit(update.make_gradient(objective, mesh, microbatch, aggregate=aggregate, dtype="float32"))
    _, batch = random_batch(0, b=8)
    columns = {"entropy": np.exp(batch.sampler_logprobs), "ref_logprobs": batch.ref_logprobs}
    batch = replace(batch, columns=columns if loss is with_columns else {}, prompts=np.arange(8)[:, None])
    batch = replace(batch, policy_mask=np.random.default_rng(1).random((8, 4, 5)) < 0.8)
    named = ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs", "policy_mask", "columns")
    params = {"table": random_batch(5, b=8)[0].astype(np.float32)}
    for filler in (0.0, -7.0):
        fill = lambda x, y=filler: np.where(batch.loss_mask, x, y).astype(np.float32)  # noqa: E731
        filled = replace(batch, **{name: jax.tree.map(fill, getattr(batch, name)) for name in named})
        with TABLE():
            made.append(transfers.to_host(of(params, transfers.shard_batch(filled, mesh), COEFS)))
    return made


@pytest.mark.parametrize("case", ["columns", "all"])
def test_mesh_and_micro_batch_change_no_gradient(case):
    ours, theirs = gradients(case, (2, 2, 2), 4)[0], gradients(case)[0]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_numbers_at_the_tokens_of_an_environment_change_no_gradient(case):
    jax.tree.map(np.testing.assert_array_equal, *gradients(case))


def test_an_off_policy_mask_changes_the_gradient():
    plain, masked = (gradients(case)[0][0]["table"] for case in ("plain", "off-policy mask"))
    assert np.abs(plain - masked).max() > 1e-4 * np.abs(plain).max()


@pytest.mark.slow
def test_moments_or_sums_in_bfloat16_move_the_parameters_almost_alike():
    def moved(**changes) -> tuple[np.ndarray, set[str]]:
        _, batch = random_batch(0, b=8)
        batch = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, batch)
        batch, table = replace(batch, prompts=np.arange(8)[:, None]), random_batch(5, b=8)[0].astype(np.float32)
        objective = update.policy_objective(None, losses.ppo_clip, Sampling())
        optimizer, mesh = tiny.optimizer(**changes), tiny.mesh_of((1, 1, 1))
        state, step = tiny.updater(objective, optimizer, {"table": jnp.asarray(table)}, mesh, microbatch=1)
        with TABLE():
            for _ in range(3):
                state, _ = step(state, batch, jnp.arange(8))
        return np.asarray(state.params["table"]) - table, {x.dtype.name for x in jax.tree.leaves(state.opt_state)}

    exact, _ = moved()
    for field in ("momentum_dtype", "gradient_dtype"):
        rounded, dtypes = moved(**{field: "bfloat16"})
        assert 1e-5 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 0.01
        assert ("bfloat16" in dtypes) == (field == "momentum_dtype")


def random_batch(seed=0, b=3):
    rng = np.random.default_rng(seed)
    shape = (b, 4, 5)
    mask = rng.random(shape) < 0.7
    logprobs, old, ref, sampler = rng.normal(-2, 0.3, (4, *shape))
    advantages = np.where(mask, rng.normal(size=shape), 0)
    batch = Batch(
        None, None, None, mask, mask, advantages, old_logprobs=old, ref_logprobs=ref, sampler_logprobs=sampler
    )  # fmt: skip
    return logprobs, batch


def nothing(logprobs, batch):
    """A policy loss that is zero, so that the other terms stand alone."""
    return jnp.zeros_like(logprobs), {}


def objective(x, batch, coefs, loss=nothing, sampling=Sampling(), **terms):  # noqa: B008
    """Losses, and metrics with the gradient of the summed loss of trained tokens, where x is what the model says."""
    of = update.policy_objective(None, loss, sampling, **terms)

    def total(x, batch, coefs):
        per_token, metrics = of(x, batch, coefs)
        return jnp.sum(per_token * batch.loss_mask), (per_token, metrics)

    with model_of(lambda params, batch: (params, 0.5 * params**2)):
        gradient, (per_token, metrics) = jax.jit(jax.grad(total, has_aux=True))(x, batch, coefs)
    return np.asarray(per_token), metrics | {"gradient": gradient}


def test_the_first_on_policy_gradient_is_reinforces_and_ratios_are_one():
    x, batch = random_batch()
    _, metrics = objective(x, replace(batch, old_logprobs=None), {}, losses.ppo_clip)
    np.testing.assert_allclose(metrics["gradient"], -batch.advantages, rtol=1e-5)
    np.testing.assert_array_equal(metrics["ratio/mean"], 1.0)
    np.testing.assert_array_equal(metrics["clip/fraction"], 0.0)


RESTATED = {  # of one token: log-probability now, of the reference, of the policy that sampled
    "k1": (dict(kl=kl.k1), lambda x, ref, old: x - ref),
    "k2": (dict(kl=kl.k2), lambda x, ref, old: 0.5 * (ref - x) ** 2),
    "k3": (dict(kl=kl.k3), lambda x, ref, old: np.exp(ref) / np.exp(x) - np.log(np.exp(ref) / np.exp(x)) - 1),
    "k3 by the ratio": (
        dict(kl=kl.k3, kl_weighted=True),
        lambda x, ref, old: np.exp(x) / np.exp(old) * (np.exp(ref - x) - (ref - x) - 1),
    ),
}


@pytest.mark.parametrize("name", RESTATED)
def test_a_kl_term_equals_its_restatement_in_value_and_gradient(name):
    terms, restated = RESTATED[name]
    with jax.enable_x64(True):
        x, batch = random_batch()
        loss, metrics = objective(x, batch, {"kl/coef": 0.3}, **terms)
        expected = lambda x: 0.3 * restated(x, batch.ref_logprobs, batch.old_logprobs)  # noqa: E731
        np.testing.assert_allclose(loss, expected(x), atol=1e-9)
        gradient = (expected(x + 1e-6) - expected(x - 1e-6)) / 2e-6
        np.testing.assert_allclose(metrics["gradient"], gradient * batch.loss_mask, atol=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=10), Sampling(top_p=0.8)], ids=str)
def test_the_logged_kl_is_that_of_the_sampled_distributions(sampling):
    """Exact means over all tokens of a policy that is surer than its reference, and so samples fewer of them."""
    reference = 2 * np.random.default_rng(0).normal(size=(50, 1, 1, 30)).astype(np.float32)
    tokens = np.broadcast_to(np.arange(30), (50, 1, 30))

    def logprobs(logits):
        return token_logprobs_and_residuals(np.broadcast_to(logits, (50, 1, 30, 30)), tokens, sampling)[0][0]

    chances = np.exp(log_distribution(1.5 * reference, sampling))[:, :, 0]
    policy, ref = np.asarray(logprobs(1.5 * reference)), np.asarray(logprobs(reference))
    batch = Batch(None, None, None, None, chances > 0, old_logprobs=policy, ref_logprobs=ref)
    _, found = objective(policy, batch, {}, sampling=sampling)
    exact = np.where(chances > 0, chances * (policy - ref), 0.0).sum()
    assert np.where(chances > 0, chances * found["kl/ref"], 0.0).sum() == pytest.approx(exact, rel=1e-4)


def test_an_entropy_bonus_is_taken_off_and_without_a_coefficient_is_none():
    x, batch = random_batch()
    loss, metrics = objective(x, batch, {"entropy/coef": 0.1})
    np.testing.assert_allclose(loss, -0.1 * 0.5 * x**2, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss/entropy"], loss)
    assert not objective(x, batch, {})[0].any()


def test_tokens_that_are_not_chosen_keep_their_kl_and_lose_their_policy_loss():
    x, batch = random_batch()
    chosen, coefs = np.random.default_rng(1).random(x.shape) < 0.5, {"kl/coef": 0.3}
    whole, _ = objective(x, batch, coefs, losses.ppo_clip, kl=kl.k3)
    part, _ = objective(x, replace(batch, policy_mask=chosen), coefs, losses.ppo_clip, kl=kl.k3)
    alone, _ = objective(x, batch, coefs, kl=kl.k3)
    np.testing.assert_allclose(part, np.where(chosen, whole, alone), rtol=1e-5)


def test_importance_weights_multiply_the_policy_loss_and_not_the_kl():
    x, batch = random_batch()
    correct = lambda trainer, sampler, mask: (jnp.full(x.shape, 0.5), {})  # noqa: E731
    found, _ = objective(x, batch, {"kl/coef": 0.3}, losses.ppo_clip, kl=kl.k2, correct=correct)
    plain, _ = objective(x, batch, {}, losses.ppo_clip)
    np.testing.assert_allclose(found, 0.5 * plain + 0.15 * (x - batch.ref_logprobs) ** 2, rtol=1e-5)


def test_an_adaptive_kl_coefficient_moves_towards_its_target_by_hand():
    coefficient = optim.adaptive_kl(0.1, 10, target=0.05, horizon=100)
    moved = [float(coefficient.adapt(jnp.float32(0.1), {"kl/ref": jnp.float32(x)})) for x in (0.05, 0.055, 9, 0)]
    np.testing.assert_allclose(moved, [0.1, 0.101, 0.102, 0.098], rtol=1e-5)
    fixed = optim.scheduled(0.1, decay="linear", end=0.0, total_steps=10)
    assert float(fixed.value(jnp.float32(5))) == pytest.approx(0.05)  # after five updates of ten
    assert float(fixed.adapt(jnp.float32(5), {})) == 6


def test_an_adaptive_entropy_coefficient_grows_below_its_target_within_bounds():
    coefficient = optim.adaptive_entropy(0.005, target=0.3, step=0.01, most=0.02)
    state = jnp.asarray(coefficient.start)
    assert float(coefficient.value(state)) == pytest.approx(0.005)
    seen = []
    for entropy in (0.2, 0.2, 0.2, 0.4, 0.2, 0.4, 0.4):
        state = coefficient.adapt(state, {"entropy": jnp.float32(entropy)})
        seen.append((round(float(state[0]), 4), round(float(coefficient.value(state)), 4)))
    assert [c for c, _ in seen] == [0.015, 0.02, 0.02, 0.01, 0.02, 0.01, 0.0]
    assert [used for _, used in seen] == [0.015, 0.02, 0.02, 0.0, 0.02, 0.0, 0.0]


def test_a_mixed_reference_lies_so_far_between():
    policy = {"a": jnp.array([3.0, 6.0])}
    np.testing.assert_allclose(learning.move_reference(policy, {"a": jnp.array([1.0, 2.0])}, 0.25)["a"], [1.5, 3.0])
    np.testing.assert_array_equal(learning.move_reference(policy, {"a": jnp.array([1.0, 2.0])}, 1.0)["a"], policy["a"])


def test_good_completions_and_a_penalty_without_an_advantage_have_metrics():
    x, batch = random_batch()
    sign = np.random.default_rng(2).integers(-1, 2, x.shape).astype(np.float32)
    _, metrics = transfers.to_host(objective(x, replace(batch, advantages=sign), {"kl/coef": 0.3}, kl=kl.k3))
    np.testing.assert_array_equal(metrics["tokens/good"], sign > 0)
    assert not metrics["logprobs/good"][sign <= 0].any()
    np.testing.assert_array_equal(metrics["loss/kl_alone"], np.where(sign == 0, metrics["loss/kl"], 0.0))
    updates = [{"tokens/trained": x.size} | {name: float(np.mean(value)) for name, value in metrics.items()}]
    of_good = metrics["logprobs/good"][sign > 0].mean()
    assert update_metrics(updates)["logprobs/good"] == pytest.approx(of_good, rel=1e-5)
    assert "logprobs/good" not in update_metrics([{"tokens/trained": 1, "logprobs/good": 0.0, "tokens/good": 0.0}])
