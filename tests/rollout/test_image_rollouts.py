"""Prompts with images in the sampler and in the learner: both compute the same, whatever computes together."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from PIL import Image
from test_vision import Loaded, load, scored

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data.image_format import ImageFormat
from jaxrl_llm.learner import forward
from jaxrl_llm.learner.microbatches import Microbatch, map_reduce
from jaxrl_llm.learner.packing import pack, packed_shapes
from jaxrl_llm.machine import transfers
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.jax import sizes as engine_sizes
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.protocol import ImageLimits
from jaxrl_llm.rollout.vllm.images import check_images, server_prompt
from jaxrl_llm.structs import Batch, Prompts, Rollouts

GROUP, LENGTH = 3, 24


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def loaded(request) -> Loaded:
    return load(request.param)


def prompts_of(loaded: Loaded) -> Prompts:
    prompt = loaded.prompt("left")
    numbers = np.arange(len(prompt.tokens), dtype=np.int32)
    return Prompts(prompt.tokens, prompt.mask, [{}] * len(numbers), numbers, images=prompt.images)


def sampler(folder: Path, shape=(1, 1, 1), **bounds) -> Sampler:
    mesh = tiny.mesh_of(shape)
    model = hf.load_model(folder, mesh)
    made = Sampler(model, mesh, max_completion_tokens=LENGTH, stop_ids=(3,), pad_id=0, **bounds)
    made.update_weights(hf.load_params(folder, model, mesh))
    return made


unbounded = cache(sampler)


def sample(engine: Sampler, prompts: Prompts) -> Rollouts:
    return engine.sample(prompts, jax.random.key(0), group_size=GROUP, sampling=Sampling())


@cache
def sampled(name: str) -> Rollouts:
    loaded = load(name)
    return sample(unbounded(loaded.folder), prompts_of(loaded))


def batch_of(loaded: Loaded, rollouts: Rollouts) -> Batch:
    prompts = prompts_of(loaded)
    completions = rollouts.completions, rollouts.completion_mask, rollouts.loss_mask
    return Batch(prompts.tokens, prompts.mask, *completions, images=prompts.images)


@pytest.mark.parametrize("loaded", ["qwen3_vl_moe"], indirect=True)
def test_the_trainer_computes_the_log_probabilities_of_the_sampler(loaded):
    rollouts = sampled(loaded.folder.name)
    score = forward.make_logprob_fn(loaded.model, Sampling(), tiny.mesh_of((1, 1, 1)), 0)
    real = rollouts.completion_mask
    assert real.sum() > 100
    scored = np.asarray(score(loaded.params, batch_of(loaded, rollouts)))
    np.testing.assert_allclose(scored[real], rollouts.logprobs[real], atol=2e-5)


def test_what_computes_together_changes_no_completion(loaded, monkeypatch):
    """On devices with tensor parts, where few completions are there at once and prompts begin in parts."""
    prompts, rollouts = prompts_of(loaded), sampled(loaded.folder.name)
    monkeypatch.setattr(engine_sizes, "PREFILL_TOKENS", prompts.tokens.shape[1])
    # Devices have equal parts: the last prompt may be there twice.
    even = [*range(len(prompts.tokens)), len(prompts.tokens) - 1][: -(-len(prompts.tokens) // 2) * 2]
    again = sample(sampler(loaded.folder, (2, 1, 2), pages=4), prompts.take(even))
    np.testing.assert_array_equal(again.completions, rollouts.completions[even])
    np.testing.assert_allclose(again.logprobs, rollouts.logprobs[even], atol=2e-5)


def test_a_completion_depends_on_its_images(loaded):
    prompts = prompts_of(loaded)
    black = replace(prompts, images=replace(prompts.images, patches=np.zeros_like(prompts.images.patches)))
    with_images = (prompts.images.segments > 0).any(axis=1)
    assert 0 < with_images.sum() < len(with_images)
    whole, other = sampled(loaded.folder.name), sample(unbounded(loaded.folder), black)
    first = np.abs(whole.logprobs - other.logprobs)[:, :, 0].max(axis=1)
    assert (first[with_images] > 1e-3).all() and (first[~with_images] < 1e-5).all()


def smaller_sizes(batch: Batch, form: ImageFormat) -> tuple[tuple[int, int], ...]:
    """A size that holds half of the prompts of a batch."""
    window = ((form.window or 1) * form.merge) ** 2
    patches = [-(-int(np.max(np.flatnonzero(row), initial=-1) + 1) // window) * window for row in batch.images.segments]
    half = partial(np.quantile, q=0.5, method="inverted_cdf")
    return ((int(half(batch.prompt_mask.sum(axis=1))), int(half(patches))),)


def test_packed_rows_micro_batches_and_meshes_change_no_log_probability(loaded):
    rollouts, mesh = sampled(loaded.folder.name), tiny.mesh_of((2, 1, 2))
    # Devices have equal parts: some prompts are there twice.
    at = np.arange(8) % len(rollouts.completions)
    batch = jax.tree.map(lambda x: x[at], batch_of(loaded, rollouts))
    index = pack(batch.completion_mask.sum(axis=-1), LENGTH, packed_shapes(GROUP, LENGTH)[0])
    batch = replace(batch, smaller=smaller_sizes(batch, loaded.form), packed_index=index)
    model = hf.load_model(loaded.folder, mesh)
    score = forward.make_logprob_fn(model, Sampling(), mesh, 2)
    scored = score(hf.load_params(loaded.folder, model, mesh), transfers.shard_batch(batch, mesh))
    real = batch.completion_mask
    np.testing.assert_allclose(np.asarray(scored)[real], rollouts.logprobs[at][real], atol=2e-5)


def test_a_micro_batch_runs_with_the_smallest_size_that_holds_its_prompts():
    loaded = load("qwen2_5_vl")
    batch = batch_of(loaded, sampled("qwen2_5_vl"))
    batch = replace(batch, smaller=((22, batch.images.sizes.patches), (10, 0)))
    assert batch.prompt_mask.sum(axis=1).tolist() == [22, 10, 22, 32]

    def visit(part: Microbatch) -> dict[int, jax.Array]:
        """Counts the micro-batches of each width. The tokens and the images of their prompts are all there."""
        prompt, whole = part.batch.prompt, part.take(batch.prompt)
        same = jnp.sum(prompt.mask) == jnp.sum(whole.mask)
        if prompt.images is None:
            same &= ~jnp.any(whole.images.segments > 0)
        else:
            same &= jnp.sum(prompt.images.segments) == jnp.sum(whole.images.segments)
            same &= jnp.all(prompt.images.columns >= 0)
        return {width: jnp.int32(same) * (width == prompt.tokens.shape[1]) for width in (32, 22, 10)}

    counts = {}
    for mesh, microbatch in ((tiny.mesh_of((1, 1, 1)), 1), (tiny.mesh_of((2, 1, 1)), 2)):
        found = jax.jit(partial(map_reduce, visit=visit, microbatch=microbatch, mesh=mesh))(
            transfers.shard_batch(batch, mesh)
        )
        counts[mesh.size, microbatch] = {width: int(count) for width, count in found.items() if count}
    assert counts == {(1, 1): {32: 1, 22: 2, 10: 1}, (2, 2): {32: 1, 22: 1}}


def test_an_image_token_of_an_environment_gives_no_infinite_number(loaded):
    rollouts = sampled(loaded.folder.name)
    completions, trained = rollouts.completions.copy(), rollouts.loss_mask.copy()
    completions[:, :, 1], trained[:, :, 1] = loaded.form.image_token, False
    batch = batch_of(loaded, replace(rollouts, completions=completions, loss_mask=trained))
    (_, (logprobs, entropy)), gradient = scored(loaded.model)(loaded.params, batch)
    assert np.all(np.asarray(logprobs)[:, :, 1] == 0.0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((logprobs, entropy, gradient)))


@pytest.mark.parametrize("loaded", ["qwen2_vl", "qwen2_5_vl"], indirect=True)
def test_a_server_gets_the_trainers_pixels_and_one_token_for_each_image(loaded):
    prompts = prompts_of(loaded)
    assert prompts.images is not None
    for b, images in enumerate(loaded.images):
        asked = server_prompt(prompts, b)
        grids = [(x.shape[0] // loaded.form.factor, x.shape[1] // loaded.form.factor) for x in images]
        ours = prompts.tokens[b][prompts.mask[b]]
        assert asked.expanded == ours.tolist()
        assert asked.tokens == tiny.collapsed(ours, grids, loaded.form.image_token)
        request = asked.request([7])
        assert request["token_ids"] == [*asked.tokens, 7]
        assert len(request.get("content_parts", ())) == len(images)
        assert ("return_token_ids" in request) == bool(images)
        for part, pixels in zip(asked.images, images, strict=True):
            png = base64.b64decode(part["url"].removeprefix("data:image/png;base64,"))
            np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))), pixels)


def test_squares_of_gemma_are_not_sent_to_a_server(refused):
    check_images(None)
    check_images(ImageLimits(2, 3136, 50176))
    with refused("config.engine"):
        check_images(ImageLimits(2, 0, 0))
