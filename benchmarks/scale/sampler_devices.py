"""Whether a sampler with devices of its own works while the others learn: `python -m benchmarks.scale.sampler_devices`.

Eight virtual devices of a CPU, four of them the sampler's. A program's time is that from its call to its result.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from jaxrl_llm.configs import grpo
from jaxrl_llm.learner.learning import Learning
from jaxrl_llm.rollout.jax.compiled import CallPrograms
from jaxrl_llm.train import steps

WARM = 4  # steps at the start of a run, which may compile
SETTINGS: dict[str, Any] = {
    "num_steps": 12, "eval": None, "checkpoint.keep_best": 0, "log.to": (), "health.self_test": False,
    "engine.devices": 4,
}  # fmt: skip
Span = tuple[float, float]


def timed(function: Callable[..., Any], spans: list[Span]) -> Callable[..., Any]:
    """Returns the function, with a span from each call to its result on the devices."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = jax.block_until_ready(function(*args, **kwargs))
        spans.append((began, time.perf_counter()))
        return result

    return call


def measure(lag: int) -> None:
    """Trains with a lag and prints how long each side worked, and both at once."""
    config = grpo.get_config()
    config.update_from_flattened_dict(SETTINGS | {"rollout.max_lag": lag})
    sampling, learning = list[Span](), list[Span]()
    methods = [(CallPrograms, "prefill", sampling), (CallPrograms, "decode", sampling)]
    methods += [(Learning, "score", learning), (Learning, "update", learning)]
    plain = [(kind, name, getattr(kind, name)) for kind, name, _ in methods]
    for (kind, name, function), (*_, spans) in zip(plain, methods, strict=True):
        setattr(kind, name, timed(function, spans))
    with TemporaryDirectory() as folder:
        for record in steps(config, Path(folder) / "run"):
            if record["step"] == WARM:
                sampling.clear(), learning.clear()
                began = time.perf_counter()
    for kind, name, function in plain:
        setattr(kind, name, function)
    end = max(b for _, b in learning)
    total = lambda spans: sum(min(b, end) - a for a, b in spans if a < end)  # noqa: E731
    both = sum(max(min(b, d) - max(a, c), 0) for (a, b), (c, d) in itertools.product(sampling, learning))
    print(
        f"lag {lag}: {end - began:.2f} s, sampling {total(sampling):.2f} s, learning {total(learning):.2f} s, "
        f"both at once {both:.2f} s"
    )


def main() -> None:
    for lag in (0, 1):
        measure(lag)


if __name__ == "__main__":
    main()
