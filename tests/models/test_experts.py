"""Models with experts: their products, routing and load, in all paths, on meshes and in micro-batches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_collectives
import tiny
from flax import nnx

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.balance import ExpertLoad, balance_loss, load_metrics
from jaxrl_llm.algorithms.kl import k3
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config import load as configs
from jaxrl_llm.learner import forward, update
from jaxrl_llm.learner.packing import pack
from jaxrl_llm.machine import meshes, sharding, transfers
from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN
from jaxrl_llm.models import experts, grouped
from jaxrl_llm.models.config import Mixture
from jaxrl_llm.models.decoder import Decoder, PackedRows
from jaxrl_llm.recipe import fit
from jaxrl_llm.rollout import routing
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.structs import Batch, Prompts
from jaxrl_llm.tools.plan.flops import flops

ROOT = Path(__file__).parents[2]
REFERENCES = ROOT / "tests" / "references"
EXPERTS, CHOSEN, WIDTH = 8, 2, 16
CONFIG = replace(tiny.CONFIG, mixture=Mixture(EXPERTS, CHOSEN, True), mlp_width=WIDTH)


# ---- grouped products


def test_a_grouped_product_and_its_gradients_are_those_of_each_row_alone():
    rng = np.random.default_rng(0)
    rows, kernels, weights = (rng.normal(size=s).astype(np.float32) for s in ((40, 6), (4, 6, 9), (40, 9)))

    def value(rows, kernels, sizes):
        out = grouped.grouped_matmul(rows, kernels, sizes)
        return jnp.sum(out * weights), out

    run = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))
    for sizes in ([10, 0, 25, 5], [0, 3, 0, 20], [0, 0, 0, 0], [40, 0, 0, 0]):
        (_, out), (of_rows, of_kernels) = run(rows, kernels, np.array(sizes, np.int32))
        expected = np.zeros_like(weights), np.zeros_like(rows), np.zeros_like(kernels)  # 0 after the last group
        for m, g in enumerate(np.repeat(np.arange(4), sizes)):
            expected[0][m], expected[1][m] = rows[m] @ kernels[g], kernels[g] @ weights[m]
            expected[2][g] += np.outer(rows[m], weights[m])
        for ours, theirs in zip((out, of_rows, of_kernels), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_blocks_compute_what_the_instruction_of_a_tpu_computes():
    rng = np.random.default_rng(0)
    rows, more, kernels = (rng.normal(size=s).astype(np.float32) for s in ((70, 6), (70, 9), (3, 6, 9)))

    @jax.jit
    def both(rows, more, kernels, sizes):
        by_blocks = grouped._by_blocks(rows, kernels, sizes, precision=None)
        of_kernels = grouped._kernel_gradients_by_blocks(rows, more, sizes, precision=None)
        of_kernels_on_tpu = jax.lax.ragged_dot_general(rows, more, sizes, grouped._KERNEL_GRADIENT)
        return (by_blocks, of_kernels), (jax.lax.ragged_dot(rows, kernels, sizes), of_kernels_on_tpu)

    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), *both(rows, more, kernels, np.int32([33, 0, 37])))


# ---- a layer


@cache
def layer(normalized=True):
    """A layer of experts, and its parameters as NumPy arrays."""
    cfg = replace(CONFIG, mixture=Mixture(EXPERTS, CHOSEN, normalized))
    made = experts.Experts(cfg, cfg.mixture, jax.nn.silu, None, rngs=nnx.Rngs(0))
    for part in (made.router, made.gate, made.up, made.down):
        part.kernel[...] = part.kernel[...] * 20
    return made, {name: np.asarray(getattr(made, name).kernel[...]) for name in ("router", "gate", "up", "down")}


@pytest.mark.parametrize("normalized", [True, False])
def test_a_token_gets_the_weighted_sum_of_the_experts_that_it_chooses(normalized):
    """Also where most tokens choose the same ones."""
    made, params = layer(normalized)
    x = np.random.default_rng(1).normal(size=(1, 2, 50, CONFIG.width)).astype(np.float32)
    x[:, :, 20:] = x[0, 0, 20]
    out, routed = jax.jit(made.__call__)(x)
    out, routed = np.asarray(out), jax.tree.map(np.asarray, routed)
    for at in np.ndindex(x.shape[:-1]):
        logits = x[at] @ params["router"]
        p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        best = np.argsort(-p)[:CHOSEN]
        share = p[best] / p[best].sum() if normalized else p[best]
        expected = 0
        for e, weight in zip(best, share, strict=True):
            gate = x[at] @ params["gate"][e]
            expected += weight * ((gate / (1 + np.exp(-gate)) * (x[at] @ params["up"][e])) @ params["down"][e])
        assert set(best) == set(routed.chosen[at].tolist())
        np.testing.assert_allclose(routed.probabilities[at], p, atol=1e-5)
        np.testing.assert_allclose(out[at], expected, rtol=1e-4, atol=1e-4)


# ---- load


def restated(chosen, probabilities):
    """E sum_e f_e P_e, averaged over layers; chosen [L, M, k], probabilities [L, M, E]."""
    shares = [np.bincount(choices.reshape(-1), minlength=EXPERTS) / len(choices) for choices in chosen]
    return EXPERTS * np.mean([(f * p.mean(axis=0)).sum() for f, p in zip(shares, probabilities, strict=True)])


@pytest.mark.slow
def test_a_router_in_float32_chooses_almost_as_an_engine_that_rounds():
    """vLLM and transformers round the router and its logits to the model's dtype; no two engines round inputs alike.

    Of Qwen3-30B-A3B's sizes, with random weights: the share of choices that differ from such an engine's in a layer.
    """
    width, count, chosen, tokens = 2048, 128, 8, 8192
    cfg = replace(CONFIG, width=width, mlp_width=1, dtype="bfloat16", mixture=Mixture(count, chosen, True))
    made = experts.Experts(cfg, cfg.mixture, jax.nn.silu, None, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    rounded = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)  # noqa: E731
    x, router = rounded(rng.normal(size=(tokens, width))), 0.02 * rng.normal(size=(width, count)).astype(np.float32)
    others = rounded(x * (1 + 2**-8 * rng.uniform(-1, 1, x.shape)))  # each input is up to a unit in the last place away

    def chosen_by_rounding(x: np.ndarray) -> np.ndarray:
        return np.argsort(-rounded(x @ rounded(router)), axis=1, kind="stable")[:, :chosen]

    theirs = chosen_by_rounding(others)
    differs = lambda ours: np.mean([len(set(a) - set(b)) / chosen for a, b in zip(ours, theirs, strict=True)])  # noqa: E731
    assert differs(np.asarray(made._route(x, router)[0].chosen)) == pytest.approx(0.0053, abs=0.0006)
    assert differs(chosen_by_rounding(x)) == pytest.approx(0.0035, abs=0.0006)


def test_gradients_of_experts_in_bfloat16_are_summed_over_devices_in_float32():
    cfg = replace(CONFIG, width=64, mlp_width=32, dtype="bfloat16")
    rng = np.random.default_rng(0)
    x, weights = (rng.normal(size=(8, 1, 64, 64)).astype(np.float32) for _ in range(2))

    def program(mesh: jax.sharding.Mesh | None) -> Any:
        """x, weights -> gradients of a layer whose arrays are whole on each device; the rows are split."""
        graph, state = nnx.split(experts.Experts(cfg, cfg.mixture, jax.nn.silu, mesh, rngs=nnx.Rngs(0)))

        def loss(state: nnx.State, x: jax.Array, weights: jax.Array) -> jax.Array:
            return jnp.sum(nnx.merge(graph, state)(x.astype(jnp.bfloat16))[0].astype(jnp.float32) * weights)

        return partial(jax.jit(jax.grad(loss), compiler_options=ROUND_AS_WRITTEN), state)

    mesh, alone = tiny.mesh_of((2, 4, 1)), program(None)
    each = [alone(x[i : i + 1], weights[i : i + 1]) for i in range(8)]
    summed = program(mesh)(*transfers.shard_batch((x, weights), mesh))
    for name in ("gate", "up", "down"):
        exact = sum(np.asarray(of_device[name]["kernel"][...], np.float64) for of_device in each)
        assert np.linalg.norm(summed[name]["kernel"][...] - exact) < 1e-5 * np.linalg.norm(exact), name


@jax.jit
def load_of(params, batch):
    return forward.completion_logprobs_and_load(Decoder(CONFIG), params, batch, Sampling())[1]


def test_load_and_its_loss_are_those_of_the_trained_tokens_alone():
    model, params = tiny.model_and_params(CONFIG)
    batch = tiny.batch()
    trained = batch.completion_mask & (np.arange(tiny.C) != 1)
    places, segment_ids = np.broadcast_to(np.arange(tiny.C), trained.shape), batch.completion_mask.astype(int)
    rows = PackedRows(batch.completions, places, segment_ids)
    run = jax.jit(partial(model.forward, collect=lambda routed: routed))
    *_, routed = run(params, batch.prompt, rows)
    chosen, p = np.asarray(routed.chosen)[:, trained], np.asarray(routed.probabilities)[:, trained]
    found = load_of(params, replace(batch, loss_mask=trained))
    cost, metrics = jax.jit(lambda load: (balance_loss(load, load), load_metrics(load)))(found)
    assert cost == pytest.approx(restated(chosen, p), rel=1e-5)
    counts = np.stack([np.bincount(c.reshape(-1), minlength=EXPERTS) for c in chosen])
    np.testing.assert_array_equal(found.choices, counts)
    assert metrics["router/busiest"] == pytest.approx((counts.max(1) / counts.mean(1)).mean(), rel=1e-5)
    assert metrics["router/unused"] == pytest.approx((counts == 0).sum(1).mean())
    assert metrics["router/entropy"] == pytest.approx(-(p * np.log(p)).sum(-1).mean(), rel=1e-4)
    other = replace(batch, loss_mask=trained, completions=np.where(batch.completion_mask, batch.completions, 7))
    jax.tree.map(np.testing.assert_array_equal, load_of(params, other), found)  # other padding


def test_experts_without_a_token_are_counted_in_each_layer():
    choices, ones = np.float32([[1, 2, 5, 0], [8, 0, 0, 0]]), np.ones((2, 4), np.float32)
    assert load_metrics(ExpertLoad(np.float32([8, 8]), choices, ones, np.ones(2)))["router/unused"] == 2


@cache
def gradients(shape=(1, 1, 1), microbatch=0, packed=(), **changes) -> dict[float, tuple]:
    """Gradients and metrics of an update, by the coefficient of its load-balance loss, on the host."""
    mesh, config = tiny.mesh_of(shape), replace(CONFIG, **changes)
    _, params = tiny.model_and_params(config)
    objective = update.policy_objective(Decoder(config, mesh), losses.ppo_clip, Sampling(), kl=k3)
    aggregate = partial(losses.aggregation_weights, mode="token_mean")
    of = jax.jit(update.make_gradient(objective, mesh, microbatch, aggregate=aggregate, dtype="float32"))
    whole = tiny.batch()
    if packed:
        whole = replace(whole, packed_index=pack(whole.completion_mask.sum(axis=-1), tiny.C, packed))
    placed = jax.device_put(params, sharding.shardings(params, mesh)), transfers.shard_batch(whole, mesh)
    coefs = {x: {"kl/coef": 0.1, "router/balance_coef": x} for x in (0.0, 0.1, 1000.0)}
    return {x: transfers.to_host(of(*placed, c)) for x, c in coefs.items()}


@pytest.mark.parametrize(
    "how",
    [
        dict(shape=(2, 2, 2), microbatch=2, packed=(2, 10)),
        # 3 devices cannot split the experts.
        pytest.param(dict(row_parts=2, remat="dots", shape=(1, 1, 3)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_micro_batches_parts_and_meshes_change_no_gradient_and_no_load(how):
    (whole, expected), (found, metrics) = gradients()[0.1], gradients(**how)[0.1]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        assert np.abs(one - other).max() <= 1e-4 * np.abs(other).max()
    assert {name for name in metrics if "router/" in name} == {
        "router/balance", "router/busiest", "router/entropy", "router/unused",
    }  # fmt: skip
    for name in expected:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_the_load_balance_loss_has_the_gradient_of_the_mean_probabilities():
    _, params = tiny.model_and_params(CONFIG)
    without, found = (gradients()[x][0]["layers"]["experts"]["router"]["kernel"] for x in (0.0, 1000.0))
    # Of the last layer: the experts of the layers before it stay.
    router = np.zeros((CONFIG.layers, CONFIG.width, EXPERTS), np.float32)
    router[-1] = np.random.default_rng(0).normal(size=router.shape[1:])
    kernel = np.asarray(params["layers"]["experts"]["router"]["kernel"])

    def load(step):
        moved = jax.tree.map(lambda x: x, params)
        moved["layers"]["experts"]["router"]["kernel"] = kernel + np.float32(step) * router
        return load_of(moved, tiny.batch())

    still, ahead, behind = load(0.0), load(1e-2), load(-1e-2)
    numeric = (balance_loss(ahead, still) - balance_loss(behind, still)) / 2e-2  # f stays
    assert np.sum((found - without) * router) == pytest.approx(1000 * float(numeric), rel=0.02)


def test_without_a_coefficient_there_is_no_load_balance_loss():
    made = update.policy_objective(tiny.model_and_params(CONFIG)[0], losses.ppo_clip, Sampling())
    batch, mesh = tiny.batch(), tiny.mesh_of((1, 1, 1))
    assert update.full_batch_load(made, {}, batch, {}, microbatch=2, mesh=mesh) is None


# ---- sampler and trainer


def test_sampler_and_trainer_agree_on_log_probabilities_and_experts():
    config, mesh = replace(CONFIG, layers=1), tiny.mesh_of((2, 2, 2))
    model, params = Decoder(config, mesh), tiny.model_and_params(config, scale=3.0)[1]
    params = jax.device_put(params, sharding.shardings(params, mesh))
    sampler = Sampler(model, mesh, max_completion_tokens=8, stop_ids=(3,), pad_id=0)
    sampler.update_weights(params)
    given = Prompts(*tiny.prompts(), [], np.arange(tiny.B))
    rollouts = sampler.sample(given, jax.random.key(0), group_size=tiny.G, sampling=Sampling())
    batch = Batch(*tiny.prompts(), rollouts.completions, rollouts.completion_mask, rollouts.loss_mask)
    batch = transfers.shard_batch(batch, mesh)
    scored, _ = jax.jit(partial(forward.completion_logprobs, model, sampling=Sampling()))(params, batch)
    np.testing.assert_allclose(rollouts.logprobs, scored, atol=1e-5 * np.abs(scored).max())
    assert routing.routing_agreement(model, params, batch, mesh) == 1.0


def test_experts_agree_in_any_order_and_only_trained_tokens_count():
    one = jnp.asarray([[0, 1], [2, 3], [4, 5], [6, 7]]).reshape(1, 1, 1, 4, 2)
    other = jnp.asarray([[1, 0], [2, 4], [4, 5], [0, 1]]).reshape(1, 1, 1, 4, 2)
    mask = jnp.asarray([True, True, True, False]).reshape(1, 1, 4)
    assert routing._agreement(one, other, mask) == pytest.approx(2 / 3)


def test_the_router_of_the_sampler_stays_in_float32():
    model = Decoder(replace(CONFIG, dtype="bfloat16"))
    used = model.cast_for_compute(model.init(jax.random.key(0)))["layers"]["experts"]
    assert used["router"]["kernel"].dtype == "float32" and used["gate"]["kernel"].dtype == "bfloat16"


# ---- what devices send, and what a step costs

WIDE = replace(test_collectives.CONFIG, mixture=Mixture(16, CHOSEN, True), mlp_width=4096)


@pytest.mark.parametrize(("program", "passes"), [("score", 1), pytest.param("update", 2, marks=pytest.mark.slow)])
def test_a_device_gathers_only_its_own_experts_and_no_tokens_of_others(program, passes):
    lowered = test_collectives.lower(program, WIDE, tiny.mesh_of((2, 2, 2)), test_collectives.SIZES)
    found = test_collectives.collectives(lowered.compile().as_text())
    in_layers = [c for c in found if WIDE.layers in c.loops and c.kind == "all-gather"]
    own = 16 // 2 * WIDE.width * WIDE.mlp_width * 4  # a stack of kernels
    assert sum(c.bytes == own for c in in_layers) == 3 * passes  # gate, up and down
    assert all(c.bytes == own or c.bytes <= 2 * WIDE.width**2 * 4 for c in in_layers)


def test_operations_and_parameters_are_those_of_the_chosen_experts():
    made, _ = layer()
    tokens = 64
    traced = jax.jit(lambda x: made(x)[0]).trace(jnp.ones((1, 1, tokens, CONFIG.width)))
    each = 2 * CONFIG.width * WIDTH * 3
    assert flops(traced) == tokens * (CHOSEN * each + 2 * CONFIG.width * EXPERTS)
    model = Decoder(CONFIG)
    of_one = 3 * CONFIG.width * WIDTH * CONFIG.layers
    assert model.size() - model.size(active=True) == (EXPERTS - CHOSEN) * of_one


@pytest.mark.tpu
def test_a_layer_compiles_for_a_tpu_without_a_copy_of_its_rows_for_each_expert():
    from jaxrl_llm.tools.plan.chips import topology

    mesh = meshes.mesh_over(topology("v5e:2x2")[1], data=1, fsdp=2, tensor=2)
    model = Decoder(replace(CONFIG, mixture=Mixture(32, 4, True), width=512, mlp_width=256, dtype="bfloat16"), mesh)
    given = jax.ShapeDtypeStruct((8, 1, 2048, 512), jnp.bfloat16, sharding=jax.NamedSharding(mesh, sharding.BATCH))
    params = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        model.shapes, sharding.shardings(model.shapes, mesh),
    )  # fmt: skip

    def loss(params, x):
        block = model._block(jax.tree.map(lambda leaf: leaf[0], params["layers"]))
        return jnp.sum(block.experts(x)[0].astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(loss)).lower(params, given).compile()
    rows = 4 * 2048 * 4 * 512 * 2  # bytes of a device's tokens, once for each expert that they choose
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * rows  # dense: 16 experts of a device, several times


# ---- settings


def test_settings_of_the_router_are_for_models_with_experts(refused):
    config = configs.load(ROOT / "configs" / "recipes" / "qwen3_30b_a3b_gsm8k.py")
    recipe = recipes.read(config)
    fit.check_router(recipe, CONFIG)
    with refused("config.router"):
        fit.check_router(recipe, tiny.CONFIG)
    config.router.balance_coef = -1.0
    with refused("config.router.balance_coef"):
        recipes.read(config)
    for coefficient, names in {0.0: [], 0.01: ["router/balance_coef"]}.items():
        config.router.balance_coef = coefficient
        assert list(recipes.read(config).router_coefficients) == names
    assert recipes.read(configs.load(ROOT / "configs" / "grpo.py")).router_coefficients == {}


# ---- transformers itself


@pytest.mark.parity
@pytest.mark.needs("torch")
def test_with_one_layer_the_load_balance_loss_is_that_of_transformers():
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    rng = np.random.default_rng(0)
    logits, mask = rng.normal(size=(4 * 7, EXPERTS)).astype(np.float32), rng.random((4, 7)) < 0.7
    theirs = load_balancing_loss_func((torch.tensor(logits),), EXPERTS, CHOSEN, torch.tensor(mask))
    probabilities = jax.nn.softmax(jnp.asarray(logits))
    routed = experts.Routing(probabilities, jax.lax.top_k(probabilities, CHOSEN)[1])
    load = jax.tree.map(lambda x: x[None], forward._sum_load(jnp.asarray(mask.reshape(-1)), routed))
    assert balance_loss(load, load) == pytest.approx(float(theirs), rel=1e-5)
