"""A group's image once against once for each completion: `python -m benchmarks.speed.picture_layout`.

The same code scores and differentiates the same completions in both layouts: a prompt with G completions, and G
prompts with one each, as trainers have it that repeat a prompt. Operations are counted in the jaxpr, for the sizes of
published models, of which nothing is computed. A small model is timed, and its operations counted by the compiler.

Then the small model learns from prompts of which one in eight has an image four times as large as the others, with all
prompts in the size of the largest, and with a smaller size beside it (docs/vision.md).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import forward
from jaxrl_llm.learner.microbatches import map_reduce
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Batch, Images, ImageSizes
from jaxrl_llm.tools.plan.flops import flops

TEXT = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
TOWER = ("depth", "hidden_size", "num_heads", "intermediate_size")
# Of Qwen2.5-VL (docs/models.md), and of a model that is computed here.
MODELS = {
    "3B": ((2048, 36, 16, 2, 11008), (32, 1280, 16, 3420), 151936),
    "7B": ((3584, 28, 28, 4, 18944), (32, 1280, 16, 3420), 152064),
    "small": ((256, 4, 4, 2, 768), (4, 128, 4, 384), 2048),
}
GRID = (16, 32)  # merged tokens of the image: 448 x 896 pixels
TEXT_TOKENS = 88  # of a prompt, beside those of its image


def make_model(name: str) -> Decoder:
    """Returns a Qwen2.5-VL of a published size, or a small one."""
    text, tower, vocabulary = MODELS[name]
    config = dict(zip(TEXT, text, strict=True)) | dict(model_type="qwen2_5_vl", vocab_size=vocabulary)
    config |= dict(max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=name == "3B")
    half = text[0] // text[2] // 2
    sections = [half // 4, half * 3 // 8, half - half // 4 - half * 3 // 8]
    config |= dict(rope_scaling=dict(type="mrope", mrope_section=sections), image_token_id=vocabulary - 1)
    config["vision_config"] = dict(zip(TOWER, tower, strict=True)) | dict(out_hidden_size=text[0])
    full = [*range(7, tower[0], 8)] or [tower[0] - 1]
    config["vision_config"] |= dict(window_size=112, fullatt_block_indexes=full, hidden_act="silu")
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        (Path(folder) / "preprocessor_config.json").write_text("{}")
        return hf.load_model(Path(folder), dtype="float32" if name == "small" else "bfloat16")


def make_batch(vocabulary: int, prompts: int, group: int, tokens: int) -> Batch:
    """Returns random prompts, of which each has one image, and their completions."""
    rng = np.random.default_rng(0)
    merged = GRID[0] * GRID[1]
    width = merged + TEXT_TOKENS
    images = Images.padding((prompts,), width, ImageSizes(4 * merged, 3 * 14 * 14, merged))
    rows, columns = np.indices((2 * GRID[0], 2 * GRID[1])).reshape(2, -1)
    images.patches[:] = rng.integers(0, 256, images.patches.shape)
    images.places[:], images.segments[:] = np.stack([rows, columns], axis=1), 1
    images.columns[:], images.positions[:] = np.arange(merged), np.arange(width)
    images.end[:] = width
    shape = prompts, group, tokens
    mask = np.ones(shape, bool)
    ids = lambda *of: rng.integers(0, vocabulary - 1, of).astype(np.int32)  # noqa: E731
    return Batch(ids(prompts, width), np.ones((prompts, width), bool), ids(*shape), mask, mask, images=images)


def flattened(batch: Batch) -> Batch:
    """Returns the batch with each prompt repeated for its completions."""
    group = batch.completions.shape[1]
    repeat = lambda x: np.repeat(x, group, axis=0)  # noqa: E731
    alone = lambda x: x.reshape(-1, 1, *x.shape[2:])  # noqa: E731
    prompts, images = (repeat(batch.prompts), repeat(batch.prompt_mask)), jax.tree.map(repeat, batch.images)
    return Batch(*prompts, *map(alone, (batch.completions, batch.completion_mask, batch.loss_mask)), images=images)


def gradient(model: Decoder, params: Any, batch: Batch) -> tuple[jax.Array, Any]:
    """Returns the sum of the log-probabilities of completions, and its gradient."""
    return jax.value_and_grad(lambda params: jnp.sum(forward.completion_logprobs(model, params, batch, Sampling())[0]))(
        params
    )


def cut(batch: Batch) -> Batch:
    """Returns the batch with a quarter of their image for all prompts but one of eight, and a size for these."""
    images, merged = batch.images, GRID[0] * GRID[1]
    few, mask = merged // 4, batch.prompt_mask.copy()
    others = np.arange(len(mask)) % 8 > 0
    mask[others, : merged - few] = False
    images.segments[others, 4 * few :] = 0
    images.columns[others, few:] = mask.shape[1]
    images.columns[others, :few] = merged - few + np.arange(few)
    smaller = ((few + TEXT_TOKENS, 4 * few),)
    return replace(batch, prompt_mask=mask, images=images, smaller=smaller)


def summed(model: Decoder, mesh: Mesh, params: Any, batch: Batch) -> Any:
    """Returns `gradient` in micro-batches of two prompts."""
    return map_reduce(batch, lambda part: gradient(model, params, part.batch), microbatch=2, mesh=mesh)


def seconds(compiled: Any, params: Any, batch: Batch, repetitions: int) -> float:
    """Returns the median time of a call."""
    taken = []
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        jax.block_until_ready(compiled(params, batch))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt, G")
    parser.add_argument("--tokens", type=int, default=256, help="of a completion, C")
    parser.add_argument("--repetitions", type=int, default=3, help="of each timed call")
    args = parser.parse_args()
    for name in MODELS:
        model = make_model(name)
        grouped = make_batch(model.cfg.vocab_size, 1, args.group, args.tokens)
        program, layouts = jax.jit(partial(gradient, model)), [grouped, flattened(grouped)]
        ours, theirs = (flops(program.trace(model.shapes, batch)) for batch in layouts)
        line = f"{name}: {ours / 1e12:.3g} and {theirs / 1e12:.3g} TFLOP a group, {theirs / ours:.2f} x"
        if name == "small":
            compiled = [program.lower(model.shapes, batch).compile() for batch in layouts]
            counted = [x.cost_analysis()["flops"] for x in compiled]
            params = jax.jit(model.init)(jax.random.key(0))
            taken = [seconds(x, params, batch, args.repetitions) for x, batch in zip(compiled, layouts, strict=True)]
            line += f"; by the compiler, which visits a loop once, {counted[1] / counted[0]:.2f} x"
            line += f"; {taken[0]:.2f} and {taken[1]:.2f} s, {taken[1] / taken[0]:.2f} x"
        print(line, flush=True)
    # Of the small model, which is the last.
    batch = cut(make_batch(model.cfg.vocab_size, 8, args.group, args.tokens))
    mesh = meshes.make_mesh(data=1, fsdp=1, tensor=1)
    program = jax.jit(partial(summed, model, mesh))
    sizes = [batch, replace(batch, smaller=())]
    ours, one = (seconds(program, params, x, args.repetitions) for x in sizes)
    print(f"images of two sizes: {ours:.2f} s, and {one:.2f} s as if all were large, {one / ours:.2f} x")


if __name__ == "__main__":
    main()
