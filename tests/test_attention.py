"""The TPU kernel: interpreted here, against the plain form; and compiled for TPUs that are not there."""

from __future__ import annotations

import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxrl_llm import sharding, update
from jaxrl_llm.models.attention import KeyValue, attend
from jaxrl_llm.models.attention_tpu import attend_tpu, fits
from jaxrl_llm.models.blocks import DecoderConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.structs import Batch

K, R, H = 2, 3, 64


def case(lanes, p):
    """lanes[b][n]: the lengths of its completions, then padding; prompts have padding on both sides."""
    b, n, t = len(lanes), len(lanes[0]), max(sum(x) for row in lanes for x in row) + 7
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    members = np.zeros((b, n, t), np.int32)
    mask = np.zeros((b, p), bool)
    for i, row in enumerate(lanes):
        mask[i, 3 * i + 1 : p - 5 * i] = True
        for j, lengths in enumerate(row):
            flat = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            members[i, j, : len(flat)] = flat
    arrays = (draw(b, K, n, R, t, H), *(draw(b, K, n, t, H) for _ in "kv"), *(draw(b, K, p, H) for _ in "kv"))
    return arrays, jnp.asarray(members), jnp.asarray(mask)


def value_and_gradients(f, arrays, members):
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(arrays[0].shape), jnp.float32)
    real = (members > 0)[:, None, :, None, :, None]  # what padding computes is nobody's concern

    @partial(jax.value_and_grad, has_aux=True)
    def loss(arrays):
        query, keys, values, prompt_keys, prompt_values = arrays
        out = jnp.where(real, f(query, KeyValue(keys, values), KeyValue(prompt_keys, prompt_values)), 0.0)
        return jnp.sum(out * weights), out

    (_, out), gradients = jax.jit(loss)(arrays)
    return out, gradients


@pytest.mark.parametrize(
    ("lanes", "p", "mesh"),
    [([[[60, 1, 50], [30, 90]], [[128], []]], 140, (1, 1, 1)), ([[[57]], [[9, 20]]], 40, (2, 1, 2))],
    ids=["packed", "on a mesh"],
)
def test_the_tpu_kernel_is_the_plain_form_and_so_are_its_gradients(lanes, p, mesh):
    arrays, members, mask = case(lanes, p)
    mesh = sharding.make_mesh(*mesh)
    t = members.shape[-1]
    visible = np.tril(np.ones((t, t), bool))[None, None] & (members[..., :, None] == members[..., None, :])
    with jax.default_matmul_precision("highest"):
        plain = value_and_gradients(lambda q, own, prompt: attend(q, own, visible, prompt, mask), arrays, members)
        kernel = value_and_gradients(
            lambda q, own, prompt: attend_tpu(q, own, members, prompt, mask, mesh=mesh, interpret=True), arrays, members
        )
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(kernel), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_kernel_refuses_what_it_would_round_or_cannot_count():
    assert fits(1024, 64, "bfloat16")
    assert not fits(1024, 64, "float32")
    assert not fits(1024, 80, "bfloat16")
    assert not fits(2**15, 64, "bfloat16")


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_score_and_gradient_compile_for_a_tpu_with_the_kernel_and_without_a_score_matrix(topology):
    pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' to compile for TPUs")
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled"}
    from jax.experimental import topologies

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    mesh = Mesh(devices.reshape(1, 2, 2), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    config = DecoderConfig(
        vocab_size=3072, width=256, layers=2, heads=4, kv_heads=2, head_dim=64, mlp_width=512, max_positions=4096,
        rope_theta=1e4, norm_eps=1e-6, tied_head=True, qkv_bias=True, qk_norm=False, dtype="bfloat16", remat="full",
    )  # fmt: skip
    model, (b, g, p, t) = Decoder(config, mesh), (4, 4, 256, 1024)
    placed = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)  # noqa: E731
    params = jax.tree.map(placed, model.shapes(), sharding.shardings(model.shapes(), mesh))
    of = lambda shape, dtype: placed(  # noqa: E731
        jax.ShapeDtypeStruct(shape, dtype), jax.sharding.NamedSharding(mesh, sharding.BATCH)
    )
    batch = Batch(of((b, p), "int32"), of((b, p), "bool"), of((b, g, t), "int32"), *(of((b, g, t), "bool"),) * 2)

    def loss(params, batch):
        return jnp.sum(update.completion_logprobs(model, params, batch, Sampling())[0])

    text = jax.jit(jax.grad(loss)).lower(params, batch).compile().as_text()
    calls = re.findall(r"%(splash_\w+)[^\n]* custom-call\(", text)
    assert any("fwd" in name for name in calls), calls
    assert any("dq" in name for name in calls), calls
    assert any("dkv" in name for name in calls), calls
    assert not re.search(rf"f32\[[\d,]*{t},{t}\]", text)
