"""Episodes of several turns in JAX. The KV cache stays from turn to turn: nothing is computed twice.

A completion has a place in the batch for its whole episode. The decode loop runs a few tokens of all completions that
are in a turn, whatever their lengths. Those whose environment works are left out meanwhile, so a slow tool delays no
other episode. An observation goes through the model in chunks, and into the cache behind the turn.

Which completions compute together depends on the time that tools take. The results do not: each program has one
shape, in which a row's numbers do not depend on the other rows, and random numbers depend on completion and token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.shapes import placed
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.models.decoder import Decoder, last_state
from jaxrl_llm.rollout.decoding import Decoding, choose
from jaxrl_llm.rollout.protocol import Environments
from jaxrl_llm.structs import AnyArray, Array, PyTree, Rollouts

# Tokens, at most, between two looks at the texts.
SEGMENT = 32
CHUNKS = (32, 128)  # tokens of an observation that run at once
# Seconds in which other answers may join the first: a segment costs the same for one and for all.
GRACE = 0.01
# A program: its phase, its name, and what traces it.
Traced: TypeAlias = tuple[str, str, Callable[[], jax.stages.Traced]]


class Caches(NamedTuple):
    """What stays on the device during the episodes of a batch."""

    prompt_mask: AnyArray  # [B, P]
    prefix: AnyArray  # per layer, prompt keys and values [B, K, P, h]
    cache: AnyArray  # per layer, completion keys and values [B, K, G, C, h]


class Positions(NamedTuple):
    """Where each completion is: arrays [B, G]."""

    last: AnyArray  # token length - 1, whose keys and values are not in the cache yet
    length: AnyArray  # number of tokens
    limit: AnyArray  # length at which its turn ends; 0: it is in no turn


class Sampled(NamedTuple):
    """Tokens that were sampled, with their log-probabilities: [B, G, SEGMENT], of which `count` [B, G] are real."""

    tokens: AnyArray
    logprobs: AnyArray
    count: AnyArray


def _uniform(key: Array, number: Array, t: Array) -> jax.Array:
    """Uniform numbers [B, G, 2] for token t of completion `number` [B, G]."""
    # By completion and token: what is drawn does not depend on when a tool answers.
    draw_one = lambda n, t: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, n), t), (2,))  # noqa: E731
    return jax.vmap(jax.vmap(draw_one))(number, t)


def start(
    model: Decoder, fixed: Decoding, params: PyTree, prompts: Array, mask: Array, number: Array, key: Array
) -> tuple[Caches, Sampled]:
    """Prefills prompts [B, P] and samples the first token of each completion."""
    hidden, prefix = model.prefill(params, prompts, mask)
    logits = model.logits(params, last_state(hidden, mask))
    uniform = _uniform(key, number, jnp.zeros_like(number))
    each = jax.vmap(partial(choose, sampling=fixed.sampling), in_axes=(None, 1), out_axes=1)
    # A group shares its logits.
    token, logprob = each(logits, uniform)
    cfg = model.cfg
    shape = (fixed.batch, cfg.kv_heads, fixed.group, fixed.length, cfg.head_dim)
    cache = [KeyValue(jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype)) for _ in range(cfg.layers)]
    first = [(0, 0), (0, 0), (0, SEGMENT - 1)]
    sampled = Sampled(jnp.pad(token[..., None], first), jnp.pad(logprob[..., None], first), jnp.ones_like(number))
    return Caches(mask, prefix, cache), sampled


def run(
    model: Decoder,
    fixed: Decoding,
    params: PyTree,
    caches: Caches,
    turns: Positions,
    may_end: Array,
    number: Array,
    key: Array,
) -> tuple[Caches, Sampled]:
    """Samples tokens of the completions that are in a turn, each up to a look at its text.

    It ends after SEGMENT tokens, or when a third of these completions need a look: with fewer, much of a step is lost.
    may_end [V]: the tokens that need a look.
    """
    last, length, limit = turns
    alive = length < limit
    few, shape = jnp.sum(alive) * 2 // 3, (*last.shape, SEGMENT)

    def go_on(loop: tuple) -> Array:
        t, alive, *_ = loop
        return (t < SEGMENT) & (jnp.sum(alive) > few)

    def step(loop: tuple) -> tuple:
        t, alive, token, at, cache, tokens, logprobs = loop
        # A completion that waits writes nothing: count is 0.
        hidden, cache = model.decode_at(
            params, token[..., None], at - 1, alive.astype(jnp.int32), cache, caches.prefix, caches.prompt_mask
        )
        new, logprob = choose(model.logits(params, hidden[:, :, 0]), _uniform(key, number, at), fixed.sampling)
        write = partial(jax.lax.dynamic_update_index_in_dim, index=t, axis=2)
        tokens, logprobs = write(tokens, new), write(logprobs, logprob)
        token, at = jnp.where(alive, new, token), at + alive
        alive &= ~may_end[new] & (at < limit)
        return t + 1, alive, token, at, cache, tokens, logprobs

    empty = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    end = jax.lax.while_loop(go_on, step, (jnp.int32(0), alive, last, length, caches.cache, *empty))
    return caches._replace(cache=end[4]), Sampled(end[5], end[6], end[3] - length)


def feed(
    model: Decoder, fixed: Decoding, params: PyTree, caches: Caches, rows: Array, tokens: Array, at: Array, count: Array
) -> Caches:
    """Puts tokens of observations into the cache: [d, n, T] for completions rows [d, n] of each device, from `at` on.

    count [d, n]: how many tokens are real. A row with none writes nothing.
    """
    group, heads = fixed.group, sharding.heads_spec(model.cfg.kv_heads, fixed.mesh)
    # Each device reads and writes its own part. A `vmap` over devices, as in `decoding.take`, would copy the cache.
    on_device = partial(jax.shard_map, mesh=fixed.mesh, check_vma=False)

    def read_rows(caches: Caches, rows: Array) -> tuple:
        prompt, member = rows[0] // group, rows[0] % group
        row_caches = lambda x: x[prompt, :, member][:, :, None]  # noqa: E731
        return jax.tree.map(lambda x: x[prompt], caches.prefix), jax.tree.map(row_caches, caches.cache)

    def write_rows(cache: PyTree, updated: PyTree, rows: Array) -> PyTree:
        prompt, member = rows[0] // group, rows[0] % group
        return jax.tree.map(lambda x, new: x.at[prompt, :, member].set(new[:, :, 0], mode="drop"), cache, updated)

    specs = Caches(sharding.BATCH, heads, heads), sharding.BATCH
    prefix, cache = on_device(read_rows, in_specs=specs, out_specs=heads)(caches, rows)
    mask = on_device(lambda x, rows: x[rows[0] // group], in_specs=(sharding.BATCH,) * 2, out_specs=sharding.BATCH)(
        caches.prompt_mask, rows
    )
    flat = lambda x: x.reshape(-1, 1, *x.shape[2:])  # noqa: E731
    _, cache = model.decode_at(params, flat(tokens), flat(at), flat(count), cache, prefix, mask)
    # Out of range: JAX drops what is written there.
    written = jnp.where(count > 0, rows, np.iinfo(np.int32).max)
    back = on_device(write_rows, in_specs=(heads, heads, sharding.BATCH), out_specs=heads)
    return caches._replace(cache=back(caches.cache, cache, written))


TURN, WAITS, ENDED = range(3)


@dataclass
class Episodes:
    """The episodes of a batch on the host: N = B * G of this process."""

    length: np.ndarray  # [N] tokens until now
    tokens: np.ndarray  # [N, C]
    logprobs: np.ndarray  # [N, C], 0 on observations
    sampled: np.ndarray  # [N, C] bool, True on tokens of the policy
    state: np.ndarray  # [N] TURN, WAITS or ENDED
    begin: np.ndarray  # [N] place of the first token of the turn
    truncated: np.ndarray  # [N] bool
    first: int  # number of the first one among the environments
    answers: dict[Future[list[int] | None], int] = field(default_factory=dict)  # those that are not there yet

    @classmethod
    def empty(cls, count: int, length: int, pad_id: int, first: int) -> Episodes:
        ints, bools = partial(np.zeros, dtype=np.int32), partial(np.zeros, dtype=bool)
        tokens, logprobs = np.full((count, length), pad_id, np.int32), np.zeros((count, length), np.float32)
        sampled, zeros = bools((count, length)), partial(ints, count)
        return cls(zeros(), tokens, logprobs, sampled, zeros(), zeros(), bools(count), first)

    def limits(self, turn_tokens: int) -> np.ndarray:
        """Returns the length at which each episode's turn ends; 0: it is not in a turn."""
        return np.where(self.state == TURN, np.minimum(self.begin + turn_tokens, self.tokens.shape[1]), 0)

    def add(self, sampled: Sampled) -> None:
        """Appends what was sampled."""
        tokens, logprobs, count = (x.reshape(len(self.length), *x.shape[2:]) for x in sampled)
        for i in np.flatnonzero(count).tolist():
            self.append(i, tokens[i, : count[i]], logprobs[i, : count[i]])

    def append(self, i: int, tokens: Sequence[int] | np.ndarray, logprobs: Sequence[float] | np.ndarray) -> None:
        """Appends what was sampled in one episode."""
        WATCHDOG.moved()
        at = slice(self.length[i], self.length[i] + len(tokens))
        self.tokens[i, at], self.logprobs[i, at], self.sampled[i, at] = tokens, logprobs, True
        self.length[i] += len(tokens)

    def end_turns(self, turns: np.ndarray, environments: Environments, stop_ids: tuple[int, ...]) -> None:
        """Asks the environments of those `turns` that have ended. Drops the tokens after the end of a turn."""
        texts = [self.tokens[i, self.begin[i] : self.length[i]].tolist() for i in turns]
        limits = self.limits(environments.turn_tokens)
        for i, turn, end in zip(turns.tolist(), texts, environments.ends(texts), strict=True):
            if end:
                # The turn ends in the middle of what was sampled: the tokens behind it were never said. Their keys in
                # the cache are written over before a token sees them.
                self._cut(i, int(self.begin[i]) + end)
            elif turn[-1] not in stop_ids:
                if self.length[i] >= limits[i]:
                    self.state[i], self.truncated[i] = ENDED, True
                continue
            self.state[i] = WAITS
            self.answers[environments.answer(self.first + i, turn[:end] if end else turn)] = i

    def rollouts(self, group_size: int, versions: np.ndarray) -> Rollouts:
        """Returns the episodes as completions [B, G, C]."""
        mask = np.arange(self.tokens.shape[1]) < self.length[:, None]
        by_prompt = lambda x: x.reshape(-1, group_size, *x.shape[1:])  # noqa: E731
        return Rollouts(*map(by_prompt, (self.tokens, mask, self.sampled, self.logprobs, self.truncated, versions)))

    def _cut(self, i: int, length: int) -> None:
        self.sampled[i, length:], self.logprobs[i, length:] = False, 0.0
        self.length[i] = length

    def take_answers(self) -> dict[int, int]:
        """Appends the observations that are there. Returns {episode: place from which the cache lacks tokens}."""
        lacking = {}
        for answer in [answer for answer in self.answers if answer.done()]:
            WATCHDOG.moved()
            i, observation = self.answers.pop(answer), answer.result()
            if observation is None:
                self.state[i] = ENDED
                continue
            start, end = self.length[i], self.length[i] + len(observation)
            if end >= self.tokens.shape[1]:
                # The policy needs room for a token.
                self.state[i], self.truncated[i] = ENDED, True
                continue
            self.tokens[i, start:end], self.state[i] = observation, TURN
            self.length[i] = self.begin[i] = end
            # The turn's last token is in no cache yet.
            lacking[i] = int(start) - 1
        return lacking


class EpisodeSampler:
    """Runs the episodes of a batch with programs of fixed shapes."""

    def __init__(self, model: Decoder, mesh: Mesh):
        self._mesh, self._vocabulary = mesh, model.cfg.vocab_size
        rows = NamedSharding(mesh, sharding.BATCH)
        heads = NamedSharding(mesh, sharding.heads_spec(model.cfg.kv_heads, mesh))
        self._caches = caches = Caches(rows, heads, heads)
        sampled = Sampled(rows, rows, rows)
        compiled = partial(jax.jit, static_argnums=0, compiler_options=ROUND_AS_WRITTEN)
        self._start = compiled(partial(start, model), out_shardings=(caches, sampled))
        # The caches are donated: there is never a second copy.
        self._run = compiled(partial(run, model), donate_argnums=2, out_shardings=(caches, sampled))
        self._feed = compiled(partial(feed, model), donate_argnums=2, out_shardings=caches)

    def sample(
        self,
        fixed: Decoding,
        params: PyTree,
        key: jax.Array,
        prompts: tuple[np.ndarray, np.ndarray],
        number: np.ndarray,
        environments: Environments,
        first: int,
    ) -> Episodes:
        """Runs the episodes of prompts [B, P] with their mask.

        number [B, G]: of each completion in the whole batch of all processes. first: the number of the first one here
        among the `environments`, which are those of this process.
        """
        on_devices = partial(sharding.shard_batch, mesh=self._mesh)
        episodes = Episodes.empty(number.size, fixed.length, fixed.pad_id, first)
        number = on_devices(number)
        may_end = environments.may_end(self._vocabulary)
        may_end[list(fixed.stop_ids)] = True
        caches, sampled = self._start(fixed, params, *on_devices(prompts), number, key)
        episodes.add(sharding.to_host(sampled))
        while True:
            episodes.end_turns(np.flatnonzero(episodes.state == TURN), environments, fixed.stop_ids)
            caches, in_turn, waits = self._observe(fixed, params, caches, episodes)
            if in_turn:
                # `number` has the rows of all processes by now, the episodes those of this one.
                shape = number.shape[0] // distributed.count(), fixed.group
                # The last token is still to be computed: its keys enter the cache with the step that samples the next
                # one.
                last = np.take_along_axis(episodes.tokens, episodes.length[:, None] - 1, axis=1)
                state = last, episodes.length, episodes.limits(environments.turn_tokens)
                turns = on_devices(Positions(*(x.reshape(shape).astype(np.int32) for x in state)))
                caches, sampled = self._run(fixed, params, caches, turns, may_end, number, key)
                episodes.add(sharding.to_host(sampled))
            elif waits:
                wait(episodes.answers, return_when=FIRST_COMPLETED)
                wait(episodes.answers, timeout=GRACE)
            else:
                return episodes

    def programs(self, fixed: Decoding, weights: PyTree, width: int) -> Iterator[Traced]:
        """Yields the programs for prompts of this width; of the weights, shapes are enough."""
        rows = NamedSharding(self._mesh, sharding.BATCH)
        of = lambda *size: jax.ShapeDtypeStruct(size, np.int32, sharding=rows)  # noqa: E731
        mask = jax.ShapeDtypeStruct((fixed.batch, width), bool, sharding=rows)
        prompts, completions = of(fixed.batch, width), of(fixed.batch, fixed.group)
        key = jax.eval_shape(lambda: jax.random.key(0))
        starting = self._start.trace(fixed, weights, prompts, mask, completions, key)
        caches = Caches(*map(placed, starting.out_info[0], self._caches))
        yield "prompts", f"prompts, {fixed.batch} x {width}", lambda: starting
        chunk = fixed.devices, chunk_rows(fixed)
        for size in CHUNKS:
            arrays = of(*chunk), of(*chunk, size), of(*chunk), of(*chunk)
            name = f"observations, {chunk[1]} x {size} a device"
            yield "prompts", name, partial(self._feed.trace, fixed, weights, caches, *arrays)
        turns = Positions(completions, completions, completions)
        may_end = jax.ShapeDtypeStruct((self._vocabulary,), bool)
        name = f"decoding, {fixed.batch} x {fixed.group}, {fixed.length} tokens"
        yield "decoding", name, partial(self._run.trace, fixed, weights, caches, turns, may_end, completions, key)

    def _observe(
        self, fixed: Decoding, params: PyTree, caches: Caches, episodes: Episodes
    ) -> tuple[Caches, bool, bool]:
        """Takes the observations that are there, and puts them into the cache.

        Also returns whether an episode of any process is in a turn, and whether one waits for an answer.
        """
        devices, chunk_limit = fixed.devices // distributed.count(), chunk_rows(fixed)
        device_episodes = fixed.batch // fixed.devices * fixed.group
        rounds = rounds_of(episodes, episodes.take_answers(), devices, device_episodes)
        # Of rounds, as `rounds_of` numbers.
        sizes = np.zeros((fixed.length // max(CHUNKS) + 4, len(CHUNKS)), np.int32)
        for (number, width), chunks in rounds.items():
            sizes[number, CHUNKS.index(width)] = max(map(len, chunks))
        pending = np.any(episodes.state == TURN), bool(episodes.answers)
        # All processes must call the same programs. The devices say which, because they run the next one anyway, and
        # this thread alone calls programs: the store of the processes would need milliseconds for each segment.
        counts = np.concatenate([np.array(pending, np.int32), sizes.ravel()])
        in_turn, waits, *flat = sharding.largest(counts, self._mesh).tolist()
        sizes = np.array(flat).reshape(sizes.shape)
        for number, kind in np.argwhere(sizes).tolist():
            width, size = CHUNKS[kind], int(sizes[number, kind])
            chunks = rounds.get((number, width), [[]] * devices)
            for first in range(0, size, chunk_limit):
                rows, at, count = (np.zeros((devices, chunk_limit), np.int32) for _ in range(3))
                tokens = np.full((devices, chunk_limit, width), fixed.pad_id, np.int32)
                for d, n, chunk in _numbered(chunks, first, chunk_limit):
                    rows[d, n], at[d, n] = chunk.episode % device_episodes, chunk.start
                    count[d, n] = chunk.end - chunk.start
                    tokens[d, n, : count[d, n]] = episodes.tokens[chunk.episode, chunk.start : chunk.end]
                arrays = sharding.shard_batch((rows, tokens, at, count), self._mesh)
                caches = self._feed(fixed, params, caches, *arrays)
        return caches, bool(in_turn), bool(waits)


def chunk_rows(fixed: Decoding) -> int:
    """Returns the completions of a device whose observations run at once: a sixteenth of all."""
    return max(fixed.batch // fixed.devices * fixed.group // 16, 1)


class Chunk(NamedTuple):
    """Tokens of an observation that run at once."""

    episode: int
    start: int
    end: int


def rounds_of(
    episodes: Episodes, lacking: dict[int, int], devices: int, device_episodes: int
) -> dict[tuple[int, int], list[list[Chunk]]]:
    """Splits the tokens that the cache lacks: {(number, width): chunks of each device}, a chunk of each episode.

    lacking: {episode: place of its first token that the cache lacks}. An episode's chunks have increasing numbers. Its
    last token is for the decode loop.
    """
    small, large = CHUNKS
    rounds: dict[tuple[int, int], list[list[Chunk]]] = {}
    for i, start in lacking.items():
        at, last, number = start, int(episodes.length[i]) - 1, 0
        while at < last:
            # Three small chunks cost less than a large one that is not full.
            size = small if last - at <= 3 * small else large
            chunks = rounds.setdefault((number, size), [[] for _ in range(devices)])
            chunks[i // device_episodes].append(Chunk(i, at, min(at + size, last)))
            at, number = at + size, number + 1
    return rounds


def _numbered(chunks: list[list[Chunk]], first: int, limit: int) -> Iterator[tuple[int, int, Chunk]]:
    for d, device_chunks in enumerate(chunks):
        for n, chunk in enumerate(device_chunks[first : first + limit]):
            yield d, n, chunk
