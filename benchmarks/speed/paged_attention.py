"""The kernel for own pages of decoding sequences, against the plain form: `python -m benchmarks.speed.paged_attention`.

First whether both compute the same, then the times of both. On a CPU the kernel is interpreted, on small sizes, and its
time says nothing.
"""

from __future__ import annotations

import argparse
import itertools
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import paged_attention_gpu, paged_attention_tpu
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.models.paged_attention import HIDDEN_SCORE, LayerCache, PageReaders, Pages, PartialAttention, attend
from jaxrl_llm.structs import Array

NEAR = {"float32": 1e-5, "bfloat16": 2e-2}


class Step(NamedTuple):
    """A decode step's attention to own pages."""

    query: Array  # [K, S, R, h]
    pages: Pages  # twice as many as the sequences may need, in any order
    table: Array  # [S, n]
    length: Array  # [S]


def make_step(heads: int, rows: int, r: int, h: int, n: int, page: int, dtype: str, *, in_int8: bool = False) -> Step:
    """Returns random numbers; the sequences have any length, the first the largest. in_int8: the pages."""
    rng, count = np.random.default_rng(0), 2 * rows * n
    length = rng.integers(1, n * page + 1, rows)
    length[0] = n * page
    order = rng.permutation(count)[: rows * n].reshape(rows, n)
    has = np.arange(n)[None] * page < length[:, None]
    keys = iter(jax.random.split(jax.random.key(0), 3))
    normal = lambda *shape: jax.random.normal(next(keys), shape, dtype)  # noqa: E731
    query = normal(heads, rows, r, h) * jnp.asarray(h**-0.5, dtype)
    pages = Pages.empty((heads, count), page, h, "int8" if in_int8 else dtype)
    pages = pages.from_tokens(KeyValue(normal(heads, count, page, h), normal(heads, count, page, h)))
    table = np.where(has, order, count).astype(np.int32)
    return Step(query, pages, jnp.asarray(table), jnp.asarray(length.astype(np.int32)))


def attend_plain(step: Step, *, window: int, soft_cap: float) -> jax.Array:
    """Attends to pages as the engine does without a kernel. The prompt is a hidden token."""
    precision = jax.lax.Precision.HIGHEST if step.query.dtype == jnp.float32 else None
    heads, rows, _, h = step.query.shape
    each = jnp.arange(rows)
    readers = PageReaders(step.table, step.length[:, None] - 1, jnp.ones((rows, 1), bool), each[None], each)
    prompt = Pages.empty((heads, 1), 1, h, step.query.dtype.name)
    hidden = jnp.full((1, 1, 1), HIDDEN_SCORE, jnp.float32)
    settings: Any = dict(window=window, soft_cap=soft_cap, precision=precision)
    return attend(step.query[:, :, None], LayerCache(prompt, step.pages), hidden, readers, **settings)[0][:, :, 0]


def difference(kernel: Any, step: Step, **settings: Any) -> float:
    """Returns the largest difference between the attention of both forms."""
    found, wanted = jax.jit(partial(kernel, **settings))(step), jax.jit(partial(attend_plain, **settings))(step)
    return float(jnp.max(jnp.abs(found.weighted_values / found.weight_sum[..., None] - wanted)))


def seconds(function: Any, step: Step, times: int) -> float:
    """Returns the median time of a call."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(step))
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            last = compiled(step)
        jax.block_until_ready(last)
        taken.append((time.perf_counter() - began) / times)
    return sorted(taken)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=2, help="key heads")
    parser.add_argument("--page", type=int, help="tokens of a page; default: 64, on a TPU 128")
    parser.add_argument("--kernel", choices=("gpu", "tpu"), help="on a CPU: the kernel that is interpreted")
    parser.add_argument("--int8", action="store_true", help="pages in int8, which the kernel of the GPU reads")
    args = parser.parse_args()
    device = jax.devices()[0]
    small = device.platform == "cpu"
    on_tpu = device.platform == "tpu" or args.kernel == "tpu"
    page = args.page or (16 if small else 128 if on_tpu else 64)
    of = paged_attention_tpu if on_tpu else paged_attention_gpu
    kind = f"pages of {page} tokens{' in int8' * args.int8}"
    print(f"{device.device_kind}, JAX {jax.__version__}, {of.__name__}, {args.heads} key heads, {kind}")
    sized = partial(make_step, args.heads, page=page, in_int8=args.int8)

    def kernel(step: Step, *, window: int, soft_cap: float) -> PartialAttention:
        return of.attend_own(*step, window, soft_cap, interpret=small)

    grids = ((64,), (1, 3)) if small else ((64, 128), (1, 3, 7, 8))
    # Each case has one: to compile takes most of the time.
    limits = itertools.cycle([(0, 0.0), (2 * page - 5, 0.0), (0, 2.0)])
    failed = 0
    for (h, r, dtype), (window, cap) in zip(itertools.product(*grids, NEAR), limits, strict=False):
        step = sized(3 if small else 16, r, h, 4 if small else 8, dtype=dtype)
        found = difference(kernel, step, window=window, soft_cap=cap)
        failed += not found < NEAR[dtype]
        print(f"h {h}, R {r}, {dtype}, window {window}, soft cap {cap}: differs by {found:.1e}", flush=True)
    print(f"parity: {failed} of the cases differ too much" if failed else "parity: all are near")

    for rows, h in ((4, 64),) if small else itertools.product((64, 256), (64, 128)):
        step = sized(rows, 7, h, 3 if small else 16, dtype="bfloat16")
        settings = dict(window=0, soft_cap=0.0)
        plain = seconds(partial(attend_plain, **settings), step, 1 if small else 20)
        ours = seconds(partial(kernel, **settings), step, 1 if small else 20)
        used = int(jnp.sum(-(-step.length // page))) * page * args.heads * (2 * h + 8 if args.int8 else 4 * h)
        print(
            f"S {rows}, h {h}, R 7, bfloat16: plain {plain * 1e6:.0f} us, kernel {ours * 1e6:.0f} us, "
            f"{used / ours / 1e9:.0f} GB/s of the pages in tables",
            flush=True,
        )
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
