"""Attention to keys and values in pages: against a dense softmax, and the kernels for TPU and GPU."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.machine import meshes
from jaxrl_llm.models import paged_attention_gpu, paged_attention_tpu
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.models.paged_attention import (
    HIDDEN_SCORE,
    LayerCache,
    PageReaders,
    Pages,
    attend,
    attend_prompts,
    finish,
)

K, R, H, PAGE, N, PROMPT, G = 2, 3, 16, 8, 3, 5, 2
LENGTHS = np.array([1, N * PAGE, 9, 16])  # of two groups of two
KERNELS = pytest.mark.parametrize("kernel", [paged_attention_tpu, paged_attention_gpu], ids=["tpu", "gpu"])


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def paged(own, lengths, order, count, dtype="float32"):
    """Keys and values own[i] [K, S, N * s, h] in the pages `order` [S, N] of `count`, the rest noise; their table."""
    k, rows, tokens, h = own[0].shape
    n = order.shape[1]
    size = tokens // n
    keys, values = draw(k, count, h, size, seed=8), draw(k, count, size, h, seed=9)
    keys[:, order] = np.moveaxis(own[0].reshape(k, rows, n, size, h), 3, 4)
    values[:, order] = own[1].reshape(k, rows, n, size, h)
    table = np.where(np.arange(n)[None] * size < lengths[:, None], order, count)
    return Pages(jnp.asarray(keys, dtype), jnp.asarray(values, dtype)), jnp.asarray(table, jnp.int32)


def reading(table, lengths, window):
    """What is hidden in prompts, and the readers."""
    lengths = np.asarray(lengths)
    rows, groups = len(lengths), len(lengths) // G
    # The last token's place in the text is PROMPT + length - 1.
    first_seen = PROMPT + lengths.reshape(groups, G, 1) - (window or 9999)
    hidden = np.where(np.arange(PROMPT) < first_seen, HIDDEN_SCORE, 0.0).astype(np.float32)
    members, is_real = np.arange(rows).reshape(groups, G), np.ones((rows, 1), bool)
    return hidden, PageReaders(np.asarray(table), lengths[:, None] - 1, is_real, members, np.arange(rows))


def attend_plain(query, pages, prompt, table, lengths, window=0, soft_cap=0.0):
    """[K, S, R, h] of query [K, S, R, h], by the form that a CPU uses."""
    plain = partial(attend, window=window, soft_cap=soft_cap, precision=jax.lax.Precision.HIGHEST)
    hidden, readers = reading(table, lengths, window)
    k, rows, r, _ = query.shape
    memory = jnp.full((k, table.shape[1], rows, r * pages.keys.shape[3]), np.nan)  # any content
    caches = (LayerCache(prompt, pages, scores) for scores in (None, memory))
    found, kept = (jax.jit(plain)(query[:, :, None], cache, hidden, readers)[0] for cache in caches)
    np.testing.assert_allclose(found, kept, rtol=1e-5, atol=1e-6)  # computed again or kept
    return found[:, :, 0]


def attend_with(kernel, query, pages, prompt, table, lengths, window=0, soft_cap=0.0):
    """The same by a kernel, joined with the prompt."""
    hidden, readers = reading(table, lengths, window)

    @jax.jit
    def joined():
        prompts = partial(attend_prompts, soft_cap=soft_cap, precision=jax.lax.Precision.HIGHEST)
        own = kernel.attend_own(query, pages, table, lengths, window=window, soft_cap=soft_cap, interpret=True)
        to_prompts = prompts(query[:, :, None], prompt, hidden, readers)
        return finish(to_prompts, jax.tree.map(lambda x: x[:, :, None], own))[:, :, 0]

    return joined()


def dense(query, own, prompt, window, soft_cap):
    """[K, S, R, h] in NumPy: sequence i sees the prompt of its group, and LENGTHS[i] own tokens."""
    out = np.zeros(query.shape)
    for k, row, r in np.ndindex(query.shape[:3]):
        length = LENGTHS[row]
        keys, values = (
            np.concatenate([p[k, row // G], x[k, row, :length]]).astype(np.float64)
            for p, x in zip(prompt, own, strict=True)
        )
        if window:
            keys, values = keys[-window:], values[-window:]
        scores = keys @ query[k, row, r]
        scores = soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores
        weights = np.exp(scores - scores.max())
        out[k, row, r] = weights @ values / weights.sum()
    return out


def with_prompts(query, own, prompt, order, count, window=0, soft_cap=0.0):
    """[K, S, R, h], by pages: the prompt of a group is one page, which its members read together."""
    pages, table = paged(own, LENGTHS, order, count)
    return attend_plain(query, pages, page_of(prompt), table, LENGTHS, window, soft_cap)


def page_of(prompt, dtype="float32"):
    keys, values = prompt
    return Pages(jnp.asarray(np.swapaxes(keys, 2, 3), dtype), jnp.asarray(values, dtype))


def text():
    own = [draw(K, len(LENGTHS), N * PAGE, H, seed=i) for i in (1, 2)]
    prompt = [draw(K, len(LENGTHS) // G, PROMPT, H, seed=i) for i in (3, 4)]
    return draw(K, len(LENGTHS), R, H), own, prompt


def shuffled(rows, n, count, seed=0):
    return np.random.default_rng(seed).permutation(count)[: rows * n].reshape(rows, n)


LATE = np.array([24, 20, 19, 18])  # a window of 3 hides the first page of all sequences


@pytest.mark.parametrize(
    ("window", "soft_cap", "lengths"), [(0, 0.0, LENGTHS), (10, 0.0, LENGTHS), (3, 2.0, LENGTHS), (3, 0.0, LATE)]
)
def test_attention_by_pages_is_one_softmax_over_the_prompt_and_the_own_tokens(window, soft_cap, lengths, monkeypatch):
    monkeypatch.setitem(globals(), "LENGTHS", lengths)
    orders = np.arange(len(LENGTHS) * N).reshape(-1, N), shuffled(len(LENGTHS), N, 20)
    found, other = (with_prompts(*text(), order, 20, window, soft_cap) for order in orders)
    np.testing.assert_allclose(found, dense(*text(), window, soft_cap), atol=1e-5)
    np.testing.assert_array_equal(found, other)  # where the pages are changes no bit


def decoding(r, h, size, n, dtype, lengths):
    """Query [K, S, R, h], pages, table and lengths of a decode step."""
    rows, count = len(lengths), 2 * len(lengths) * n
    own = [draw(K, rows, n * size, h, seed=i) for i in (1, 2)]
    pages, table = paged(own, lengths, shuffled(rows, n, count), count, dtype)
    return jnp.asarray(draw(K, rows, r, h) / np.sqrt(h), dtype), pages, table, jnp.asarray(lengths, jnp.int32)


@KERNELS
@pytest.mark.parametrize(
    ("r", "h", "size", "n", "window", "soft_cap", "dtype"),
    [(7, 64, 64, 3, 0, 0.0, "bfloat16"), (8, 128, 16, 20, 70, 2.0, "float32")],
)
def test_a_kernel_computes_what_the_plain_form_computes(kernel, r, h, size, n, window, soft_cap, dtype):
    lengths = np.array([n * size, 1, size, size + 1])
    step = decoding(r, h, size, n, dtype, lengths)
    query, pages, table, lengths = step
    prompt = page_of([draw(K, len(lengths) // G, PROMPT, h, seed=i) for i in (3, 4)], dtype)
    rest = pages, prompt, table, lengths, window, soft_cap
    atol = 1e-2 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(attend_with(kernel, query, *rest), attend_plain(query, *rest), atol=atol)


def in_int8(pages):
    """Pages in int8, and floats of the same numbers."""
    tokens = KeyValue(np.swapaxes(pages.keys, 2, 3), np.asarray(pages.values))
    empty = Pages.empty(pages.keys.shape[:2], pages.keys.shape[3], pages.keys.shape[2], "int8")
    whole = jax.tree.map(np.asarray, jax.jit(empty.from_tokens)(tokens))
    keys, values = whole.keys * whole.key_scale[:, :, None], whole.values * whole.value_scale[..., None]
    for exact, rounded, scale in zip(tokens, (np.swapaxes(keys, 2, 3), values), whole[2:], strict=True):
        # To the nearest step, of which the largest number of a token has 127.
        np.testing.assert_allclose(scale, np.abs(exact).max(axis=-1) / 127, rtol=1e-5)
        assert np.all(np.abs(rounded - exact) <= 0.501 * scale[..., None])
    return whole, Pages(keys, values)


@pytest.mark.parametrize("kernel", [None, paged_attention_gpu], ids=["plain", "gpu"])
def test_pages_in_int8_are_read_as_the_numbers_that_they_stand_for(kernel):
    query, pages, table, lengths = decoding(3, 64, 16, 3, "float32", np.array([48, 1, 16, 17]))
    prompt = page_of([draw(K, len(lengths) // G, PROMPT, 64, seed=i) for i in (3, 4)])
    (whole, floats), (prompts, prompt_floats) = in_int8(pages), in_int8(prompt)
    run = partial(attend_with, kernel) if kernel else attend_plain
    found = run(query, whole, prompts, table, lengths, 20, 2.0)
    expected = attend_plain(query, floats, prompt_floats, table, lengths, 20, 2.0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_tokens_that_are_written_one_by_one_are_rounded_as_all_together():
    whole, floats = in_int8(Pages(draw(K, 3, H, PAGE), draw(K, 3, PAGE, H, seed=1)))
    written = Pages.empty((K, 3), PAGE, H, "int8")
    write = jax.jit(lambda pages, place, new: pages.write(np.arange(3)[:, None], place, new))
    for place in range(PAGE):
        new = KeyValue(np.swapaxes(floats.keys, 2, 3)[:, :, [place]], floats.values[:, :, [place]])
        written = write(written, np.full((3, 1), place), new)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), written, whole)


@KERNELS
def test_a_kernels_row_depends_on_its_own_tokens_alone(kernel):
    attend = jax.jit(partial(kernel.attend_own, window=40, interpret=True))
    query, pages, table, length = decoding(3, 64, 16, 5, "float32", np.array([80, 0, 33, 17]))
    found = attend(query, pages, table, length)
    assert np.all(found.weight_sum[:, 1] == 0) and np.all(found.highest_score[:, 1] == HIDDEN_SCORE)
    assert np.all(found.weighted_values[:, 1] == 0)
    # Other rows, in another number and order, and other tokens in all pages that row 0 does not see.
    query, table, length = map(np.asarray, (query, table, length))
    seen = np.isin(np.arange(pages.keys.shape[1]), table[0, 2:])[None, :, None, None]
    other = Pages(*(np.where(seen, x, np.float32(7)) for x in pages[:2]))
    alone = attend(query[:, [2, 0]], other, table[[2, 0]], length[[2, 0]])
    for one, two in zip(found, alone, strict=True):
        np.testing.assert_array_equal(one[:, 0], two[:, 1])


@pytest.mark.parametrize(("h", "size", "dtype"), [(64, 128, "bfloat16"), (128, 16, "float32")])
def test_the_kernel_for_a_tpu_writes_a_token_of_each_sequence_in_range(h, size, dtype):
    count = 9
    pages = Pages(*(jnp.asarray(draw(K, count, *last), dtype) for last in ((h, size), (size, h))))
    page, offset = jnp.array([3, count, 0, 7, count]), jnp.array([5, 0, size - 1, 0, 2])
    token = KeyValue(*(jnp.asarray(draw(K, 5, 1, h, seed=i), dtype) for i in (1, 2)))
    found = jax.jit(partial(paged_attention_tpu.write_own, interpret=True))(pages, page, offset, token)
    for one, two in zip(found, pages.write(page[:, None], offset[:, None], token), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_kernel_refuses_devices_and_sizes_that_it_does_not_know():
    tpu = SimpleNamespace(platform="tpu")
    h100 = SimpleNamespace(platform="gpu", compute_capability="9.0")
    t4 = SimpleNamespace(platform="gpu", compute_capability="7.5")
    fits = paged_attention_tpu.fits
    assert fits(tpu, 128, "bfloat16", 64) and fits(tpu, 64, "bfloat16", 128) and fits(tpu, 128, "float32", 16)
    assert not fits(tpu, 64, "bfloat16", 64)  # its compiler would copy all pages
    assert (
        not fits(tpu, 128, "bfloat16", 8) and not fits(tpu, 128, "float16", 64) and not fits(h100, 128, "bfloat16", 64)
    )
    fits = paged_attention_gpu.fits
    assert fits(h100, 64, "bfloat16", 64) and fits(h100, 128, "float32", 16)
    assert (
        not fits(h100, 80, "bfloat16", 64) and not fits(h100, 64, "bfloat16", 24) and not fits(h100, 64, "bfloat16", 8)
    )
    assert not any(fits(other, 64, "bfloat16", 64) for other in (t4, tpu, jax.devices()[0]))


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize(("r", "h", "size", "dtype"), [(7, 64, 128, "bfloat16"), (4, 128, 64, "float32")])
def test_the_kernel_compiles_for_a_tpu_without_a_copy_of_the_pages(topology, r, h, size, dtype):
    from jaxrl_llm.tools.plan import chips

    rows, n, count = 64, 8, 1024
    mesh = meshes.mesh_over(chips.topology(topology)[1][:1], data=1, fsdp=1, tensor=1)
    of = partial(jax.ShapeDtypeStruct, sharding=jax.NamedSharding(mesh, jax.P()))
    pages = Pages(of((K, count, h, size), dtype), of((K, count, size, h), dtype))
    token = KeyValue(*[of((K, rows, 1, h), dtype)] * 2)
    where = of((rows,), jnp.int32)

    def write_and_attend(pages, page, offset, token, query, table, length):
        pages = paged_attention_tpu.write_own(pages, page, offset, token)
        return pages, paged_attention_tpu.attend_own(query, pages, table, length, window=300, soft_cap=30.0)

    query, table = of((K, rows, r, h), dtype), of((rows, n), jnp.int32)
    compiled = (
        jax.jit(write_and_attend, donate_argnums=0).lower(pages, where, where, token, query, table, where).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < K * count * h * size
    assert re.search(r"%paged_write\S* = [^\n]* custom-call\(", compiled.as_text())
