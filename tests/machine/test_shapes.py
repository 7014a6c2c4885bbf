"""Shapes of a run: when a policy adds one, and a ragged run that never waits for the compiler."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest
from test_steps import SHORT, tiny

from jaxrl_llm import build
from jaxrl_llm.learner import learning
from jaxrl_llm.machine import shapes
from jaxrl_llm.machine.shapes import Rates, ShapeCache, ShapePolicy
from jaxrl_llm.train import rl_step

COSTS = {(8,): 8.0, (4,): 4.0, (2,): 2.0, (1,): 1.0}


def call(shape_policy: ShapePolicy, needed: int) -> list[int]:
    """One call that needs a shape of at least this size. Returns the shapes that were usable in it."""
    shape_policy.start_call((8,))
    in_use = [size for (size,) in shape_policy.usable_shapes()]
    shape_policy.add_shapes(lambda have: min(COSTS[shape] for shape in have if shape[0] >= needed))
    return in_use


def test_a_smaller_shape_is_added_when_padding_has_cost_its_compilation():
    shape_policy = ShapePolicy(tuple(COSTS), compile_seconds=20.0, limit=4)
    seen = [call(shape_policy, needed=2) for _ in range(12)]
    # Each call would save 6: the order is in call 4 (24 >= 20), and the shape is in use 20 / 8 -> 3 calls later.
    assert seen == [[8]] * 6 + [[8, 2]] * 6


def test_a_shape_that_pays_in_the_first_call_is_in_use_at_once():
    shape_policy = ShapePolicy(tuple(COSTS), compile_seconds=5.0, limit=4)
    call(shape_policy, needed=1)
    assert shape_policy.usable_shapes() == [(8,), (1,)]


def test_no_more_shapes_are_in_use_than_allowed():
    shape_policy = ShapePolicy(tuple(COSTS), compile_seconds=1e-3, limit=3)
    for needed in (1, 2, 4, 8) * 5:
        call(shape_policy, needed)
    assert len(shape_policy.usable_shapes()) == 3


def test_a_policy_resumes_from_its_state_as_if_it_had_never_stopped():
    def calls(shape_policy: ShapePolicy, numbers: range) -> list[list[int]]:
        return [call(shape_policy, 1 + i % 3) for i in numbers]

    whole = ShapePolicy(tuple(COSTS), compile_seconds=15.0, limit=3)
    expected = calls(whole, range(20))
    for stop in range(20):
        first, shape_cache = ShapePolicy(tuple(COSTS), compile_seconds=15.0, limit=3), ShapeCache()
        calls(first, range(stop))
        shape_cache.load_policies({"training": first.state()})
        again = shape_cache.policy("training", COSTS, compile_seconds=15.0, limit=3)
        assert calls(again, range(stop, 20)) == expected[stop:]
        assert again.state() == whole.state()


def test_an_error_in_the_background_is_raised_by_the_step():
    def fails(shape: tuple[int, ...]) -> None:
        raise MemoryError(f"{shape}")

    shape_cache = ShapeCache()
    shape_policy = shape_cache.policy("training", COSTS, compile_seconds=1.0, limit=4)
    call(shape_policy, 1)
    shape_cache.ensure_compiled("training", (8,), lambda shape: None)
    with suppress(MemoryError):  # raised here, if the thread is quick
        shape_cache.compile_ahead("training", fails)
    with pytest.raises(MemoryError, match=r"\(1,\)"):
        shape_cache.ensure_compiled("training", (1,), fails)
    with pytest.raises(MemoryError, match=r"\(1,\)"):
        shape_cache.compile_ahead("training", fails)
    shape_cache.close()


def ragged_config(steps: int):
    """A small run with completions of up to 64 tokens, most of them short."""
    ragged = {"microbatch": 4, "rollout.max_completion_tokens": 64, "rollout.temperature": 1.3, "checkpoint.every": 10}
    return tiny(num_steps=steps, **SHORT | ragged)


@pytest.fixture
def cheap(monkeypatch):
    """Rates at which smaller shapes pay within a few steps."""
    rates = {"cpu": Rates(flops=1e9, scores=1e12, bandwidth=1e8, compile=1.0)}
    for module in (shapes, learning):
        monkeypatch.setattr(module, "RATES", rates)


@pytest.mark.slow
def test_no_later_step_compiles_and_a_resumed_run_takes_the_same_shapes(cheap, tmp_path):
    here, compiled, used = threading.get_ident(), Counter(), []

    def count(event: str, seconds: float, **kwargs) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == here:
            compiled[step, str(kwargs.get("fun_name"))] += 1

    def steps(workdir: Path, last: int) -> tuple[dict, list]:
        nonlocal step
        used.clear()
        with build.build(ragged_config(18), workdir) as (session, parts):
            lease = session.restore()
            step = session.run_state.step
            while step < last:
                step += 1
                lease, record = rl_step(session, parts, lease, step)
                session.log.finish()
                session.write(record)
                used.append((step, parts.shape_cache.policy_states()))
                if step == 2:  # the second call of the sampler has started to compile what the first did not need
                    parts.actor.engine._compiled_ahead._thread.submit(int).result()
            session.checkpoints.wait()
            return jax.device_get(lease.states), list(used)

    step = 0
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        whole, shapes_used = steps(tmp_path / "whole", 18)
        late = {key: n for key, n in compiled.items() if key[0] >= 3}
        assert late.keys() <= {(10, "jit(_sums)")}, late  # the first checkpoint
        assert sum(n for (_, name), n in compiled.items() if name == "jit(decode)") >= 2  # of several sizes
        steps(tmp_path / "parts", 11)  # its last checkpoint is of step 10
        resumed, again = steps(tmp_path / "parts", 18)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert again == shapes_used[-len(again) :]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_checkpoint_has_the_shapes_of_its_step_after_the_next_has_counted(cheap, tmp_path):
    """A signal saves the last whole step from another thread, at any moment of the next one."""
    with build.build(ragged_config(10), tmp_path) as (session, parts):
        rl_step(session, parts, session.restore(), 1)
        parts.packing(np.full((8, 4), 5), 8)  # the next step has begun
        session.save()
        session.checkpoints.wait()
        _, saved = session.checkpoints.resume(parts.learning.shapes())
    assert saved["shapes"].notes["training"]["calls"] == 1
