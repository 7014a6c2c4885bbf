"""The kernels for TPU and GPU: against the plain form, and compiled for devices that are not there."""

from __future__ import annotations

import os
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import forward
from jaxrl_llm.machine import meshes, sharding
from jaxrl_llm.models import attention_gpu, attention_tpu
from jaxrl_llm.models.attention import KeyValue, Visible, attend, causal_mask, prompt_visibility
from jaxrl_llm.models.attention_gpu import attend_gpu
from jaxrl_llm.models.attention_tpu import AttentionLimits, attend_tpu
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.rope import default_rope
from jaxrl_llm.structs import Batch

K, R, H = 2, 3, 64


def case(rows, p):
    """rows[b][n]: the lengths of its completions, then padding; prompts have padding on both sides."""
    b, n, t = len(rows), len(rows[0]), max(sum(x) for row in rows for x in row) + 7
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    segment_ids = np.zeros((b, n, t), np.int32)
    mask = np.zeros((b, p), bool)
    for i, row in enumerate(rows):
        mask[i, 3 * i + 1 : p - 5 * i] = True
        for j, lengths in enumerate(row):
            flat = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            segment_ids[i, j, : len(flat)] = flat
    arrays = (draw(b, K, n, R, t, H), *(draw(b, K, n, t, H) for _ in "kv"), *(draw(b, K, p, H) for _ in "kv"))
    return arrays, segment_ids, mask


def assert_same_gradients(simple, ours, arrays, segment_ids):
    """Compares values, and gradients of a random weighting of them; what padding computes is nobody's concern."""
    weights = np.random.default_rng(1).standard_normal(arrays[0].shape).astype(np.float32)
    arrays = (arrays[0] * np.float32(H**-0.5), *arrays[1:])

    def loss(f, arrays):
        query, keys, values, prompt_keys, prompt_values = arrays
        out = f(query, KeyValue(keys, values), KeyValue(prompt_keys, prompt_values))
        out = jnp.where((segment_ids > 0)[:, None, :, None, :, None], out, 0.0)
        return jnp.sum(out * weights), out

    with jax.default_matmul_precision("highest"):
        expected, found = (jax.jit(jax.grad(partial(loss, f), has_aux=True))(arrays) for f in (simple, ours))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), expected, found)


def on_tpu(query, own, segment_ids, visible, prompt, mask, limits, mesh):
    return attend_tpu(query, own, segment_ids, prompt, mask, limits=AttentionLimits(*limits), mesh=mesh, interpret=True)


def on_gpu(query, own, segment_ids, visible, prompt, mask, limits, mesh):
    return attend_gpu(query, own, segment_ids, visible, prompt, mesh=mesh, implementation="xla")


PACKED = [[[40, 1, 30], [20, 60]], [[80], []]], 90, (1, 1, 1)
ON_A_MESH = [[[57]], [[9, 20]]], 40, (2, 1, 2)


@pytest.mark.parametrize(
    ("kernel", "limits", "rows", "p", "mesh"),
    [
        pytest.param(on_tpu, (50, 2.0), *PACKED, id="tpu, packed, with limits"),
        pytest.param(on_gpu, (50, 0.0), *PACKED, id="gpu, packed, with a window"),
        pytest.param(on_tpu, (0, 0.0), *ON_A_MESH, id="tpu, on a mesh"),
        pytest.param(on_gpu, (0, 0.0), *ON_A_MESH, id="gpu, on a mesh"),
    ],
)
def test_a_kernel_is_the_plain_form_and_so_are_its_gradients(kernel, limits, rows, p, mesh):
    arrays, segment_ids, mask = case(rows, p)
    mesh, visible = tiny.mesh_of(mesh), visible_of(segment_ids, mask, limits[0])

    def simple(query, own, prompt):
        return attend(query, own, visible, prompt, soft_cap=limits[1])

    def ours(query, own, prompt):
        return kernel(query, own, segment_ids, visible, prompt, mask, limits, mesh)

    assert_same_gradients(simple, ours, arrays, segment_ids)


@pytest.mark.parametrize(("limits", "mesh"), [((20, 2.0), (2, 1, 2)), ((0, 0.0), (1, 1, 1))], ids=str)
def test_the_kernel_of_a_tpu_sees_whole_images_of_prompts(limits, mesh, monkeypatch):
    # As prompts, with padding on both sides: a row of one segment and no prompt. The window ends within an image.
    monkeypatch.setattr(attention_tpu, "MAX_BLOCK", 128)  # one image is in two blocks
    arrays, segment_ids, _ = case([[[170]], [[150]]], 10)
    segment_ids = np.roll(segment_ids, 5, axis=-1)
    index = np.broadcast_to(np.arange(segment_ids.shape[-1]), segment_ids.shape)
    reach, ahead = index.copy(), 30
    for b, first, last in ((0, 20, 49), (0, 51, 80), (0, 110, 139), (1, 5, 34), (1, 125, 154)):
        reach[b, 0, first : last + 1] = last
    keys, queries, window = index[0, 0], index[0, 0][:, None], limits[0] or 1000
    seen = (keys <= reach[..., None]) & (queries - keys < window)
    visible = Visible(jnp.asarray(seen & (segment_ids[..., :, None] == segment_ids[..., None, :])))
    np.testing.assert_array_equal(causal_mask(segment_ids, limits[0], jnp.asarray(reach)), visible.row)

    def simple(query, own, prompt):
        return attend(query, own, visible, soft_cap=limits[1])

    def ours(query, own, prompt):
        limited = AttentionLimits(*limits, jnp.asarray(reach), ahead)
        return attend_tpu(query, own, segment_ids, limits=limited, mesh=tiny.mesh_of(mesh), interpret=True)

    assert_same_gradients(simple, ours, arrays, segment_ids)


def visible_of(segment_ids, mask, window):
    """What tokens see, in plain loops: a token's position is that in its completion, after the prompt's."""
    own = np.zeros((*segment_ids.shape, segment_ids.shape[2]), bool)
    of_prompt = np.zeros((*segment_ids.shape, mask.shape[1]), bool)
    for b, n, t in np.ndindex(segment_ids.shape):
        row, real = segment_ids[b, n], np.flatnonzero(mask[b])
        first = np.flatnonzero(row == row[t])[0]
        for s in range(first if row[t] else t, t + 1):
            own[b, n, t, s] = not window or t - s < window
        for at, column in enumerate(real):
            of_prompt[b, n, t, column] = not window or len(real) + t - first - at < window
    return Visible(jnp.asarray(own), jnp.asarray(of_prompt))


@pytest.mark.parametrize("window", [0, 1, 5, 200])
def test_a_token_sees_the_window_before_it_in_its_completion_and_its_prompt(window):
    _, segment_ids, mask = case([[[6, 1, 5], [3, 9]], [[12], []]], 14)
    steps = np.arange(segment_ids.shape[2])
    first = segment_ids != np.roll(segment_ids, 1, axis=-1)
    places = steps - np.maximum.accumulate(np.where(first, steps, 0), axis=2)
    positions = mask.sum(axis=-1)[:, None, None] + places
    expected, real = visible_of(segment_ids, mask, window), segment_ids > 0
    found = jax.jit(lambda *x: Visible(causal_mask(x[0], window), prompt_visibility(*x[1:], window)))(
        segment_ids, mask, positions
    )
    of_prompt = np.broadcast_to(found.prompt, expected.prompt.shape)
    np.testing.assert_array_equal(np.asarray(found.row)[real], np.asarray(expected.row)[real])
    np.testing.assert_array_equal(of_prompt[real], np.asarray(expected.prompt)[real])


def traced_gradient_of_score(mesh, *, b, g, p, t, **own):
    config = DecoderConfig(
        family="qwen2",
        vocab_size=3072, width=256, layers=2, heads=4, kv_heads=2, head_dim=64, mlp_width=512, max_positions=4096,
        rope=default_rope(1e4, 64), norm_eps=1e-6, tied_head=True, qkv_bias=True, qk_norm=False, dtype="bfloat16",
        remat="full", **own,
    )  # fmt: skip
    model = Decoder(config, mesh)
    placed = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)  # noqa: E731
    params = jax.tree.map(placed, model.shapes, sharding.shardings(model.shapes, mesh))
    of = lambda shape, dtype: placed(  # noqa: E731
        jax.ShapeDtypeStruct(shape, dtype), jax.sharding.NamedSharding(mesh, sharding.BATCH)
    )
    batch = Batch(of((b, p), "int32"), of((b, p), "bool"), of((b, g, t), "int32"), *(of((b, g, t), "bool"),) * 2)

    def loss(params, batch):
        return jnp.sum(forward.completion_logprobs(model, params, batch, Sampling())[0])

    return jax.jit(jax.grad(loss)).trace(params, batch)


def device(platform, **more):
    return SimpleNamespace(platform=platform, **more)


def test_a_kernel_refuses_dtypes_sizes_and_devices_that_it_does_not_fit():
    tpu, h100, t4 = device("tpu"), device("gpu", compute_capability="9.0"), device("gpu", compute_capability="7.5")
    assert attention_tpu.fits(tpu, 64, "bfloat16", 1024)
    assert not attention_tpu.fits(tpu, 64, "float32", 1024)
    assert not attention_tpu.fits(tpu, 80, "bfloat16", 1024)
    assert not attention_tpu.fits(tpu, 64, "bfloat16", 2**15)
    assert not attention_tpu.fits(h100, 64, "bfloat16", 1024)
    assert attention_gpu.fits(h100, 80, "bfloat16", 0.0)
    assert not attention_gpu.fits(h100, 64, "float32", 0.0)
    assert not attention_gpu.fits(h100, 256, "bfloat16", 0.0)
    assert not attention_gpu.fits(h100, 64, "bfloat16", 50.0)
    for other in (t4, tpu, device("gpu", compute_capability="gfx90a"), jax.devices()[0]):
        assert not attention_gpu.fits(other, 64, "bfloat16", 0.0)


def test_on_a_gpu_score_and_gradient_lower_to_cudnn(monkeypatch):
    # JAX asks the GPU itself for these, while it traces.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda _: False)
    monkeypatch.setattr(attention_gpu, "fits", lambda *_: True)
    traced = traced_gradient_of_score(meshes.make_mesh(data=2, fsdp=1, tensor=2), b=4, g=4, p=250, t=100)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmax(" in text
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward(" in text


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("topology", "own"),
    [("v5e:2x2", {}), ("v5p:2x2x1", {"window": 300, "local": (True, False), "soft_cap": 50.0})],
    ids=["v5e", "v5p, every other layer with a window"],
)
def test_score_and_gradient_compile_for_a_tpu_without_a_score_matrix(topology, own):
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled"}
    from jax.experimental import topologies

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    mesh = Mesh(devices.reshape(1, 2, 2), meshes.AXES, axis_types=(AxisType.Auto,) * 3)
    text = traced_gradient_of_score(mesh, b=4, g=4, p=256, t=1024, **own).lower().compile().as_text()
    calls = re.findall(r"%(splash_\w+)[^\n]* custom-call\(", text)
    assert any("fwd" in name for name in calls), calls
    assert any("dq" in name for name in calls), calls
    assert any("dkv" in name for name in calls), calls
    assert not re.search(r"f32\[[\d,]*1024,1024\]", text)
