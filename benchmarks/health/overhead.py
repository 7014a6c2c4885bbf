"""What rules, metrics and log cost: `python -m benchmarks.health.overhead --config FILE [--config.field=value ...]`.

It runs 30 steps of a config and prints the seconds of each part as a share of a step: of the clock, and of the
CPU time of its thread. Most of it runs in the log's thread, beside the next step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from jaxrl_llm.config.load import config_parser, parse_config
from jaxrl_llm.session import log, record
from jaxrl_llm.session.health import Health
from jaxrl_llm.train import steps

FIRST = 5  # step from which it counts: the earlier ones compile


def main() -> None:
    config, _ = parse_config(config_parser("benchmarks.health.overhead", __doc__ or ""))
    with config.unlocked():
        config.num_steps, config.eval, config.checkpoint.keep_best = 30, None, 0
    clock, cpu = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def timed(owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            began, used = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **more)
            finally:
                clock[part].append(time.perf_counter() - began)
                cpu[part].append(time.thread_time() - used)

        setattr(owner, name, call)

    timed(Health, "judge", "rules")
    timed(record, "rollout_metrics", "lengths")
    timed(record, "text_metrics", "texts")
    timed(log.Log, "_write_numbers", "writing")
    with TemporaryDirectory() as workdir:
        times = [one["time/step"] for one in steps(config, Path(workdir) / "run")]
    step = median(times[FIRST:])
    print(f"a step takes {step:.3f} s (median)")
    for part in clock:
        of_clock, of_cpu = (sum(seconds[part][FIRST:]) / len(times[FIRST:]) for seconds in (clock, cpu))
        print(f"{part:<8} {1000 * of_clock:6.2f} ms, {of_clock / step:6.2%} of a step; CPU {1000 * of_cpu:6.2f} ms")
    whole = sum(sum(seconds[FIRST:]) for seconds in cpu.values()) / len(times[FIRST:])
    print(f"all      CPU {1000 * whole:.2f} ms, {whole / step:.2%} of a step")


if __name__ == "__main__":
    main()
