"""Array shapes for which a run compiles its programs: few of them, and smaller ones only where they save time.

JAX compiles one program per array shape, which takes seconds to minutes. So each kind of work, such as an update, has
a `ShapePolicy`: a short list of allowed shapes. The run starts with a shape that holds every batch. A smaller shape
is compiled as soon as the time that it would have saved so far exceeds the time to compile it. This rule of the
ski-rental problem costs at most twice the best choice in hindsight. A background thread compiles the new shape while
training steps continue with the old ones.

The policy uses estimates from `RATES` instead of measured times, and a new shape becomes usable a fixed number of calls
later. Therefore the shapes of a step depend only on the data and on the earlier steps. A checkpoint holds the
`ShapeCache`, so a resumed run uses the same shapes as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax

from jaxrl_llm.machine import transfers
from jaxrl_llm.machine.compilation import COMPILER
from jaxrl_llm.structs import PartState, PyTree

Shape: TypeAlias = tuple[int, ...]
Cost: TypeAlias = Callable[[Iterable[Shape]], float]  # usable shapes -> estimated seconds of a call
LEARNING = "training"  # name of the shape policy of updates and scoring, which checkpoints hold
# Names of `ShapePolicy.first_calls` and `ShapePolicy.saved_seconds` in checkpoints, which must not change.
FIRST_CALLS, SAVED_SECONDS = "due", "rent"
MAX_SHAPES = 3  # usable shapes of a policy at most, because each shape is one more program to compile
MIN_DELAY, MAX_DELAY = 2, 50  # calls from the decision to compile a shape to its first use


class Rates(NamedTuple):
    """Rough speeds of a device, which only decide when a smaller shape saves time."""

    flops: float  # floating-point operations per second
    scores: float  # pairs of a query and a key per second, in addition to their products
    bandwidth: float  # bytes of weights that are read per second
    compile: float  # seconds to compile a forward pass; an update takes three times as long


# {platform of the devices: speeds from which the time of a call is estimated}.
RATES = {"cpu": Rates(7e10, 2e8, 2e10, 4.0), "gpu": Rates(3e14, 2e12, 2e12, 30.0), "tpu": Rates(1e14, 5e11, 7e11, 60.0)}


@dataclass
class ShapePolicy:
    """Decides for one kind of work, such as an update, which shapes are usable. One thread at a time may use it."""

    shapes: tuple[Shape, ...]  # allowed shapes, the largest first
    compile_seconds: float  # estimated time to compile one shape
    limit: int  # maximum number of usable shapes
    calls: int = 0  # calls that have started
    first_calls: dict[Shape, int] = field(default_factory=dict)  # shape -> number of the first call that may use it
    saved_seconds: dict[Shape, float] = field(default_factory=dict)  # shape -> time that it would have saved so far

    def start_call(self, *initial_shapes: Shape) -> None:
        """Counts a call. initial_shapes: shapes that are usable from the first call on; one must hold every batch."""
        self.calls += 1
        if not self.first_calls:
            self.first_calls = dict.fromkeys(initial_shapes, self.calls)

    def usable_shapes(self) -> list[Shape]:
        """Returns the shapes that the current call may use, the largest first."""
        return [shape for shape in self.shapes if self.first_calls.get(shape, math.inf) <= self.calls]

    def add_shapes(self, cost: Cost) -> None:
        """Adds up what each missing shape would save in this call, and adds the best shape if it pays off.

        cost(shapes): estimated seconds of this call if these shapes are usable. The first call adds every shape that
        pays off, because the run compiles in that call anyway.
        """
        while self._add_best_shape(cost) and self.calls == 1:
            pass

    def _add_best_shape(self, cost: Cost) -> bool:
        """Adds the shape that would have saved the most time, if it pays off. Returns whether a shape was added."""
        chosen_shapes = list(self.first_calls)
        if len(chosen_shapes) == self.limit:
            return False
        # Add up the seconds that each missing shape would save in this call.
        call_seconds = cost(chosen_shapes)
        for shape in self.shapes:
            if shape not in self.first_calls:
                saving = call_seconds - cost([*chosen_shapes, shape])
                self.saved_seconds[shape] = self.saved_seconds.get(shape, 0.0) + saving
        best_shape = max(self.saved_seconds, key=lambda shape: self.saved_seconds[shape], default=None)
        if best_shape is None or self.saved_seconds[best_shape] < self.compile_seconds:
            return False
        # The delay covers the estimated compile time, so that no step waits for the compiler. The delay must not be
        # measured, because a resumed run has to switch its shapes at the same call.
        delay = min(max(math.ceil(self.compile_seconds / max(call_seconds, 1e-9)), MIN_DELAY), MAX_DELAY)
        self.first_calls[best_shape] = self.calls + (delay if self.calls > 1 else 0)
        # The sums start again, because each missing shape saves less than before now that the new shape exists.
        self.saved_seconds = {}
        return True

    def state(self) -> dict[str, Any]:
        """Returns the policy's state for a checkpoint, as values of JSON."""
        by_name = {FIRST_CALLS: self.first_calls, SAVED_SECONDS: self.saved_seconds}
        rows = {name: [[*shape, x] for shape, x in values.items()] for name, values in by_name.items()}
        return {"calls": self.calls, **rows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state()`; {} resets the policy. Ignores shapes that this policy does not allow."""
        self.calls = state.get("calls", 0)

        def value_by_shape(name: str) -> dict[Shape, Any]:
            return {tuple(shape): x for *shape, x in state.get(name, ()) if tuple(shape) in self.shapes}

        self.first_calls, self.saved_seconds = value_by_shape(FIRST_CALLS), value_by_shape(SAVED_SECONDS)


class ShapeCache:
    """The shape policies of a run by name, and the thread that compiles their shapes in the background."""

    def __init__(self) -> None:
        self._policies: dict[str, ShapePolicy] = {}
        self._unclaimed_states: dict[str, Any] = {}  # states from a checkpoint whose policy does not exist yet
        self._committed_states: dict[str, Any] = {}  # states after the last finished step
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix=COMPILER)
        self._jobs: dict[tuple[str, Shape], Future[Any]] = {}  # finished and running compilations

    def policy(self, name: str, shapes: Iterable[Shape], *, compile_seconds: float, limit: int) -> ShapePolicy:
        """Returns the shape policy of this name. The first call creates it, from its checkpointed state if one exists.

        The arguments are the fields of `ShapePolicy`.
        """
        if name not in self._policies:
            self._policies[name] = ShapePolicy(tuple(shapes), compile_seconds, limit)
            self._policies[name].load(self._unclaimed_states.pop(name, {}))
        return self._policies[name]

    def ensure_compiled(self, name: str, shape: Shape, compile: Callable[[Shape], Any]) -> None:
        """Compiles a shape in this thread, or waits for the background thread if it compiles the shape already."""
        if (name, shape) not in self._jobs:
            # The job exists before the compilation, so that `compile_ahead` in another thread does not compile the
            # shape a second time.
            self._jobs[name, shape] = Future()
            self._jobs[name, shape].set_result(None)
            compile(shape)
        self._jobs[name, shape].result()

    def compile_ahead(self, name: str, compile: Callable[[Shape], Any]) -> None:
        """Starts to compile the shapes that a policy has chosen in the background thread, each shape once.

        Raises: the error of a failed compilation, for example of a program that does not fit the memory.
        """
        for shape in self._policies[name].first_calls:
            if (name, shape) not in self._jobs:
                self._jobs[name, shape] = self._compiler.submit(compile, shape)
        # Iterate over a copy, because the thread that samples ahead adds jobs at the same time.
        for job in list(self._jobs.values()):
            if job.done():
                job.result()

    def policy_states(self) -> dict[str, Any]:
        """Returns the current states of all policies, as values of JSON."""
        return self._unclaimed_states | {name: policy.state() for name, policy in self._policies.items()}

    def load_policies(self, states: Mapping[str, Any]) -> None:
        """Restores the result of `policy_states`; {} resets all policies."""
        for name, policy in self._policies.items():
            policy.load(states.get(name, {}))
        self._unclaimed_states = {name: state for name, state in states.items() if name not in self._policies}

    def commit(self) -> None:
        """Fixes the current states as those after the last finished step, which the next checkpoint holds."""
        # A checkpoint may be written after the next step has counted its call already, so it needs this copy.
        self._committed_states = self.policy_states()

    def state(self, seconds: float | None = None) -> PartState:
        """Returns the policies' states after the last finished step, for a checkpoint."""
        return PartState(self._committed_states)

    def load(self, state: PartState | None) -> None:
        """Restores the policies from a checkpoint; None resets them."""
        self._committed_states = state.notes if state else {}
        self.load_policies(self._committed_states)

    def close(self) -> None:
        """Cancels waiting compilations, and does not wait for a running one: after SIGTERM a run has only seconds."""
        self._compiler.shutdown(wait=False, cancel_futures=True)


def abstract(tree: PyTree) -> PyTree:
    """Replaces arrays by their shapes, dtypes and shardings, from which a program can be compiled without the arrays.

    The shardings name the devices' memory also for arrays that are in host memory now, because a running program has
    its arguments in the devices' memory.
    """

    def describe_array(array: Any) -> Any:
        # JAX moves an uncommitted array to the devices of a program's other arguments, so the description of such an
        # array names no devices.
        is_committed = isinstance(array, jax.Array) and array.committed
        device_sharding = array.sharding.with_memory_kind(transfers.DEVICE) if is_committed else None
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=device_sharding)

    return jax.tree.map(describe_array, tree)


def placed(tree: PyTree, new_sharding: jax.sharding.Sharding) -> PyTree:
    """Returns the shapes and dtypes of a tree, all with the same sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=new_sharding), tree)
