"""The shapes of a run: few programs, first those that hold everything, and others only where they pay.

Every shape of an array is another program, and a program takes seconds to minutes to compile. So a kind of work, such
as an update, has a short list of shapes, and begins with one that holds everything. Another shape is compiled
when the time that it would have saved until now exceeds the time to compile it (rent or buy: this costs at most twice
as much as the best choice in hindsight). A background thread compiles it while steps run in the others.

The times are estimates from `RATES`, not measurements, and a new shape comes into use a number of calls later. So the
shapes of a step depend only on the data and on the steps before: a run that is killed and resumed takes the same
shapes, because a checkpoint holds the book.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax

from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.compilation import COMPILER
from jaxrl_llm.structs import PartState, PyTree

Shape: TypeAlias = tuple[int, ...]
Cost: TypeAlias = Callable[[Iterable[Shape]], float]  # seconds that a call takes if these shapes are in use
LEARNING = "training"  # name of the ladder of updates and of scoring
MOST = 3  # shapes of a ladder that may be in use: a run has few programs
EARLIEST, LATEST = 2, 50  # calls between the order of a shape and its use


class Rates(NamedTuple):
    """Rough speeds of a device. They only decide when a smaller shape pays."""

    flops: float  # operations a second
    bandwidth: float  # bytes of weights a second
    compile: float  # seconds to compile a forward pass; an update takes three times as long


RATES = {"cpu": Rates(7e10, 2e10, 4.0), "gpu": Rates(3e14, 2e12, 30.0), "tpu": Rates(1e14, 7e11, 60.0)}


@dataclass
class Ladder:
    """The shapes of one kind of work. One thread at a time may use it."""

    shapes: tuple[Shape, ...]  # the largest first
    price: float  # seconds to compile a shape
    limit: int  # shapes that may be in use
    calls: int = 0
    due: dict[Shape, int] = field(default_factory=dict)  # shape -> call from which it is in use
    rent: dict[Shape, float] = field(default_factory=dict)  # shape -> seconds that it would have saved until now

    def begin(self, *first: Shape) -> None:
        """Begins a call. first: the shapes in use from the first call on; one of them holds everything."""
        self.calls += 1
        if not self.due:
            self.due = dict.fromkeys(first, self.calls)

    def in_use(self) -> list[Shape]:
        """Returns the shapes that this call may use, the largest first."""
        return [shape for shape in self.shapes if self.due.get(shape, math.inf) <= self.calls]

    def settle(self, cost: Cost) -> None:
        """Adds up what each missing shape saves in this call, and orders the best one if it pays.

        cost: the seconds of this call with given shapes. In the first call, all shapes that pay are in use at once: the
        run compiles there anyway.
        """
        while self._order(cost) and self.calls == 1:
            pass

    def _order(self, cost: Cost) -> bool:
        have = list(self.due)
        if len(have) == self.limit:
            return False
        now = cost(have)
        for shape in self.shapes:
            if shape not in self.due:
                self.rent[shape] = self.rent.get(shape, 0.0) + now - cost([*have, shape])
        best = max(self.rent, key=lambda shape: self.rent[shape], default=None)
        if best is None or self.rent[best] < self.price:
            return False
        # The shape is due after as many calls as its compilation may last, so that no step waits. The number is an
        # estimate and no measurement, because a resumed run must change its shapes at the same call.
        wait = min(max(math.ceil(self.price / max(now, 1e-9)), EARLIEST), LATEST)
        self.due[best] = self.calls + (wait if self.calls > 1 else 0)
        self.rent = {}  # the other shapes save less from now on
        return True

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, for JSON."""
        listed = {
            name: [[*shape, x] for shape, x in of.items()] for name, of in (("due", self.due), ("rent", self.rent))
        }
        return {"calls": self.calls, **listed}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; {}: from the beginning. Leaves out shapes that the ladder does not have."""
        self.calls = state.get("calls", 0)
        self.due, self.rent = (
            {tuple(shape): x for *shape, x in state.get(name, ()) if tuple(shape) in self.shapes}
            for name in ("due", "rent")
        )


class Book:
    """The ladders of a run, and the thread that compiles their shapes in the background."""

    def __init__(self) -> None:
        self._ladders: dict[str, Ladder] = {}
        self._loaded: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=COMPILER)
        self._jobs: dict[tuple[str, Shape], Future[Any]] = {}  # programs compiled or being compiled

    def ladder(self, name: str, shapes: Iterable[Shape], *, price: float, limit: int) -> Ladder:
        """Returns the ladder of this name, made at the first call from its state in a checkpoint if there is one."""
        if name not in self._ladders:
            self._ladders[name] = Ladder(tuple(shapes), price, limit)
            self._ladders[name].load(self._loaded.pop(name, {}))
        return self._ladders[name]

    def ready(self, name: str, shape: Shape, compile: Callable[[Shape], Any]) -> None:
        """Returns when a shape is compiled: compiles it in this thread, or waits for the background."""
        if (name, shape) not in self._jobs:
            # The job is set before it compiles, because `compile_ahead` in another thread must not compile the shape
            # again.
            self._jobs[name, shape] = Future()
            self._jobs[name, shape].set_result(None)
            compile(shape)
        self._jobs[name, shape].result()

    def compile_ahead(self, name: str, compile: Callable[[Shape], Any]) -> None:
        """Starts to compile the shapes of a ladder that are in use or ordered, in the background, each once.

        Raises: the error of a compilation that has failed, such as a program that does not fit the memory.
        """
        for shape in self._ladders[name].due:
            if (name, shape) not in self._jobs:
                self._jobs[name, shape] = self._thread.submit(compile, shape)
        # A copy: sampling ahead adds jobs in another thread.
        for job in list(self._jobs.values()):
            if job.done():
                job.result()

    def ladders(self) -> dict[str, Any]:
        """Returns the states of all ladders, for JSON."""
        return self._loaded | {name: ladder.state() for name, ladder in self._ladders.items()}

    def load_ladders(self, state: Mapping[str, Any]) -> None:
        """Goes on from the states of a checkpoint; {}: from the beginning."""
        for name, ladder in self._ladders.items():
            ladder.load(state.get(name, {}))
        # A ladder that does not exist yet takes its state later, in `ladder`.
        self._loaded = {name: x for name, x in state.items() if name not in self._ladders}

    def keep(self) -> None:
        """Marks the shapes as those of a finished step: a checkpoint keeps them as they are now."""
        # A copy: a checkpoint may come when the next step has counted already.
        self._kept = self.ladders()

    def state(self, seconds: float | None = None) -> PartState:
        """Returns the ladders after the last step, for a checkpoint."""
        return PartState(self._kept)

    def load(self, state: PartState | None) -> None:
        """Goes on with the ladders of a checkpoint; None: from the beginning."""
        self._kept = state.notes if state else {}
        self.load_ladders(self._kept)

    def close(self) -> None:
        """Drops what waits to be compiled. Does not wait for the compiler: after SIGTERM a run has seconds."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def abstract(tree: PyTree) -> PyTree:
    """Replaces arrays by their shapes, dtypes and placements, to compile a program without them.

    A program has its arguments in the memory of the devices, wherever they are now.
    """

    def describe(x: Any) -> Any:
        # JAX moves an array that is not committed to where the others are: its own place must not bind the program.
        placed = isinstance(x, jax.Array) and x.committed
        at = x.sharding.with_memory_kind(sharding.DEVICE) if placed else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

    return jax.tree.map(describe, tree)


def placed(tree: PyTree, at: jax.sharding.Sharding) -> PyTree:
    """Returns the shapes and dtypes of a tree, all with one sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree)
