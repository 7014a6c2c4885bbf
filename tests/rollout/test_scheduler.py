"""The scheduler of the in-JAX engine: what holds for any schedule."""

from __future__ import annotations

import random
from collections import deque

import jax
import jax.numpy as jnp

from jaxrl_llm.machine import memory
from jaxrl_llm.rollout.jax.scheduler import PromptGroup, Scheduler, least_loaded
from jaxrl_llm.rollout.jax.sizes import PageKind, cache_bytes, sizes_of


def run(seed: int) -> int:
    """Lets groups of random sizes and lengths end, and checks each moment. Returns the number of preemptions."""
    rng = random.Random(seed)
    group, prompts, length = rng.randint(1, 5), rng.randint(1, 6), rng.randint(2, 300)
    devices, sequences = rng.choice([1, 1, 2, 3]), rng.choice([0, rng.randint(1, 12)])
    bounds = dict(max_sequences=sequences * devices, kind=PageKind(devices))
    sizes = sizes_of(prompts * devices, group, 8, length, **bounds)
    sizes = sizes_of(prompts * devices, group, 8, length, pages=rng.choice([0, rng.randint(1, sizes.pages)]), **bounds)
    schedulers = [Scheduler(sizes) for _ in range(devices)]
    pending = deque(PromptGroup.with_members(b, group) for b in range(prompts * devices))
    members = [member for one in pending for member in one.members]
    ends = {member: rng.randint(1, length) for member in members}
    paused = {member: rng.random() < 0.3 for member in members}
    rounds, begun, ended = 0, set(), []

    def goal(member) -> int:
        return member.cached if paused[member] else min(member.cached + 32, ends[member] - 1)

    while len(ended) < len(members):
        rounds += 1
        assert rounds < 50 * len(members) * (length // 32 + 2), "a sequence starves"
        while pending and (scheduler := least_loaded(schedulers)):
            scheduler.add(pending.popleft())
        for scheduler in schedulers:
            oldest = list(scheduler.page_holders)[:1]
            new = scheduler.schedule(goal)
            assert list(scheduler.page_holders)[:1] == oldest or not oldest  # it always goes on
            assert not begun.intersection(new)  # a prompt is computed once
            begun.update(new)
            pages = [page for member in scheduler.page_holders for page in member.pages]
            assert len(set(pages)) == len(pages)
            assert sorted([*pages, *scheduler._free_pages]) == list(range(sizes.pages))
            places = [one.cache_place for one in {member.group for member in scheduler.page_holders}]
            assert len(set(places)) == len(places) and min(places, default=0) >= 0
            assert len(scheduler.page_holders) <= sizes.sequences
            for order in (scheduler.page_holders, scheduler.waiting):
                assert [member.number for member in order] == sorted(member.number for member in order)
            for member in list(scheduler.page_holders):
                assert len(member.pages) * sizes.page >= goal(member)
                if paused[member]:
                    paused[member] = rng.random() < 0.7
                    continue
                member.cached = goal(member)
                if member.cached >= ends[member] - 1:
                    scheduler.retire(member)
                    ended.append(member)
    assert all(len(s._free_pages) == sizes.pages and len(s._free_places) == sizes.prompts for s in schedulers)
    return sum(s.preemptions for s in schedulers)


def test_no_page_is_lost_or_owned_twice_and_no_sequence_starves():
    assert sum(run(seed) > 0 for seed in range(400)) > 12


def test_a_group_whose_sequences_end_at_once_gives_its_place_to_the_next_one():
    scheduler = Scheduler(sizes_of(2, 3, 8, 100, max_sequences=1))
    first, second = PromptGroup.with_members(0, 3), PromptGroup.with_members(1, 3)
    scheduler.add(first)
    assert scheduler.schedule(lambda member: 10) == [first]
    for member in [*scheduler.page_holders, *scheduler.waiting]:
        scheduler.retire(member)
    assert scheduler.can_admit_group and first.cache_place == -1
    scheduler.add(second)
    assert scheduler.schedule(lambda member: 10) == [second]


def test_pages_are_as_many_as_completions_need_or_as_memory_holds():
    kind = PageKind(devices=2, token_bytes=1000)
    bounded = lambda cache, **more: sizes_of(8, 4, 16, 640, cache_bytes=cache, kind=kind, **more)  # noqa: E731
    all_pages = 16 * 10  # of 64 tokens, for the 16 completions of a device
    prompts = 4 * 16 * 1000
    assert bounded(0).pages == bounded(10**9).pages == all_pages and not bounded(10**9).refills
    short = bounded(prompts + 50 * 64_000 + 63_999)
    assert (short.pages, short.sequences, short.refills) == (50, 16, True)
    # The longest completion must have room; and what the config says holds.
    assert bounded(1).pages == 10 and bounded(prompts + 50 * 64_000, pages=70).pages == 70


def test_a_cache_begins_small_and_grows_unless_a_kernel_reads_it():
    plain, with_kernel = (sizes_of(8, 4, 16, 4096, kind=PageKind(has_kernel=kernel)) for kernel in (False, True))
    assert with_kernel.allocated_pages == with_kernel.pages == plain.pages == 32 * 64
    grown = [plain.with_room_for(pages).allocated_pages for pages in (1, 128, 129, 513, 2048)]
    assert plain.allocated_pages == 128 and grown == [128, 128, 512, 2048, 2048]


def test_the_memory_of_a_cpu_is_that_of_its_container(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", tmp_path / "memory.max")
    machine = memory.device_memory(jax.devices()[0])
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.device_memory(jax.devices()[0]) == machine > 0
    (tmp_path / "memory.max").write_text("80000\n")
    assert memory.device_memory(jax.devices()[0]) == 80_000 // len(jax.devices())


def test_long_prompts_begin_in_parts():
    short, long, longest = (sizes_of(64, 8, width, 100) for width in (256, 1024, 2**15))
    assert (short.initial_prompts, short.first_prefill_prompts, short.later_prefill_prompts) == (64, 64, 4)
    assert (long.initial_prompts, long.first_prefill_prompts, long.later_prefill_prompts) == (64, 16, 4)
    assert (longest.first_prefill_prompts, longest.later_prefill_prompts) == (1, 1)
    assert not long.refills


def test_a_cache_may_have_what_weights_and_states_leave():
    held = {"a": jnp.ones((4, 250)), "b": jnp.ones(10, jnp.int8)}
    assert cache_bytes(10_000, held, beside_learning=False) == 8_500 - 4_010
    assert cache_bytes(4_000, held, beside_learning=False) == 1
    assert cache_bytes(0, held, beside_learning=False) == cache_bytes(10_000, held, beside_learning=True) == 0
