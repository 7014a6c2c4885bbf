"""What a run loses when it is hit at random moments: `python -m benchmarks.faults [--kinds ...] [--moments 20]`.

One tiny run for each kind of fault is hit again and again, each time while the named phase goes on, and resumed by
the same command. In the end it must have the metrics, the completions and the weights of a run that nothing hit, bit
for bit but for wall-clock time. After every hit: the exit code, one line that says why, no process left, and
(Ctrl-C) a checkpoint of the last logged step. The phases last 0.2 s longer than they do, so that hits meet them.
`disk` mounts a tmpfs of 96 MiB, which needs root.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KINDS = ("compile", "rollout", "update", "save", "push", "disk", "second")
STEPS = 60
ARGUMENTS = [
    "--config", "configs/grpo.py", "--config.prompts_per_step=8",
    "--config.prompts_per_update=8", "--config.group_size=4", "--config.optim.warmup_steps=2",
    "--config.optim.decay=constant", "--config.eval.every=10", "--config.eval.problems=32",
    "--config.checkpoint.every=2", "--config.log.completions_every=5", "--config.mesh.fsdp=1",
]  # fmt: skip
MARK = "phase: "


def slow_down(owner: Any, name: str) -> None:
    """Makes a method say that it begins, and last longer, in a call that no Python signal handler interrupts."""
    real: Callable[..., Any] = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        print(MARK, flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
        made = real(*args, **kwargs)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
        return made

    setattr(owner, name, slow)


def child(kind: str) -> None:
    """The run itself, in a process of its own."""
    import orbax.checkpoint as ocp

    from jaxrl_llm import train
    from jaxrl_llm.errors import run_main
    from jaxrl_llm.rollout.jax.engine import Sampler
    from jaxrl_llm.rollout.prefetch import Prefetcher

    saving = (ocp.CheckpointManager, "_finalize")
    slowed = {
        "rollout": (Sampler, "sample"), "update": (Prefetcher, "used"), "push": (Sampler, "update_weights"),
        "save": saving, "disk": saving, "second": saving,
    }  # fmt: skip
    if kind in slowed:
        slow_down(*slowed[kind])
    run_main(train.main)


def start(kind: str, workdir: Path, *, cached: bool = True) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.faults", "--child", kind, *ARGUMENTS, f"--config.num_steps={STEPS}"]
    command += ["--workdir", str(workdir)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment |= {} if cached else {"JAX_COMPILATION_CACHE_DIR": ""}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def descendants(pid: int) -> dict[int, str]:
    """Returns {process: when it began} of the children of a process, and of theirs."""
    # Reward processes and sandboxes have sessions of their own, so only their parents tell whose they are.
    below: dict[int, str] = {}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for child in map(int, children.read_text().split()):
                below |= {child: began(child)} | descendants(child)
    return below


def began(pid: int) -> str:
    """Returns when a process began, in ticks of the kernel; "" if it has ended."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else fields[18]
    return ""


def orphans(session: int, below: dict[int, str]) -> list[int]:
    """Returns processes that live on: of a session whose leader has ended, or among those that were below it."""
    found = [pid for pid, start in below.items() if start and began(pid) == start]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, of, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            found += [int(process.name)] if int(of) == session and state != "Z" else []
    return found


def records(workdir: Path) -> list[dict[str, Any]]:
    *whole, _ = (workdir / "metrics.jsonl").read_text().split("\n")  # a full disk tears the last line
    lines = [json.loads(line) for line in whole]
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "tokens_per_second"} for r in lines]


def state(workdir: Path) -> tuple[int, int]:
    """The last step logged, and the last one with a checkpoint."""
    log = workdir / "metrics.jsonl"
    steps = [path.name for path in workdir.glob("checkpoints/*") if path.name.isdigit()]
    logged = records(workdir)[-1]["step"] if log.is_file() and "\n" in log.read_text() else 0
    return logged, max(map(int, steps), default=0)


def until(process: subprocess.Popen[str], word: str, count: int) -> bool:
    """Reads on to the count-th line with a word; False if the run has ended before."""
    for line in process.stdout or ():
        count -= word in line
        if not count:
            return True
    return False


def fail(kind: str, what: str, process: subprocess.Popen[str], out: str, error: str) -> None:
    raise SystemExit(f"{kind}: {what} (exit code {process.returncode})\n{out[-1000:]}\n{error[-3000:]}")


def hit(kind: str, workdir: Path, chance: random.Random) -> float | None:
    """One start, hit at a random moment, and what must hold after it; seconds to the end, None if it was not hit."""
    process = start(kind, workdir, cached=kind != "compile")
    met = until(
        process, "compiled code" if kind == "compile" else MARK, 1 if kind == "compile" else chance.randint(1, 4)
    )
    time.sleep(chance.uniform(0, 8 if kind == "compile" else 0.25))
    below = descendants(process.pid)
    filler = workdir / "filler"
    if kind == "disk":
        fill(filler)
    elif process.poll() is None:
        process.send_signal(signal.SIGINT)
    hit_at = time.monotonic()
    out, error = process.communicate(timeout=300)
    seconds = time.monotonic() - hit_at
    filler.unlink(missing_ok=True)
    if left := orphans(process.pid, below):
        fail(kind, f"processes {left} are left", process, out, error)
    if kind == "disk":
        if process.returncode != 2 or error.count("\n") != 1 or "cannot be written (No space left" not in error:
            fail(kind, "not one line and exit code 2", process, out, error)
        return seconds
    last = [line for line in out.splitlines() if line][-1:] or [""]
    if process.returncode or error:
        fail(kind, "not a clean end", process, out, error)
    if not met or last[0].startswith("done"):
        return None
    if not last[0].startswith("stopped by Ctrl-C"):
        fail(kind, "no line that says why", process, out, error)
    logged, saved = state(workdir)
    if logged != saved:
        fail(kind, f"step {logged} is logged, the last checkpoint is of step {saved}", process, out, error)
    return seconds


def fill(file: Path) -> None:
    """Takes all the room there is."""
    with file.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(b"0" * 2**16)
        except OSError:
            return


def second_starts(workdir: Path, moments: int, chance: random.Random) -> list[float]:
    """Starts the command again and again while the run saves; only the first one may run."""
    times = []
    while len(times) < moments:
        first = start("second", workdir)
        while len(times) < moments and until(first, MARK, chance.randint(1, 2)):
            time.sleep(chance.uniform(0, 0.25))
            started = time.monotonic()
            again = start("second", workdir)
            out, error = again.communicate(timeout=300)
            if first.poll() is not None:
                break  # it came too late
            times.append(time.monotonic() - started)
            if again.returncode != 2 or error.count("\n") != 1 or "is in use by another run" not in error or out:
                fail("second", "the second start was not refused in one line", again, out, error)
        out, error = first.communicate(timeout=600)
        if first.returncode or error:
            fail("second", "the first run was disturbed", first, out, error)
        if len(times) < moments:
            subprocess.run(["rm", "-rf", *map(str, workdir.iterdir())], check=True)
    return times


def compare(kind: str, workdir: Path, whole: Path) -> None:
    """Raises: SystemExit, unless the run is, bit for bit, the one that nothing hit."""
    same = {
        "metrics": records(workdir) == records(whole),
        "completions": (workdir / "completions.jsonl").read_text() == (whole / "completions.jsonl").read_text(),
        "weights": (workdir / "hf/model.safetensors").read_bytes() == (whole / "hf/model.safetensors").read_bytes(),
        "checkpoints": all(path.name.isdigit() for path in (workdir / "checkpoints").iterdir()),
    }
    if not all(same.values()):
        raise SystemExit(f"{kind}: {same}")


def measure(kind: str, folder: Path, whole: Path, moments: int, chance: random.Random) -> list[float]:
    """Seconds from each hit to the end of the process."""
    workdir = folder / kind
    workdir.mkdir()
    if kind == "disk":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(workdir)], check=True)
    try:
        if kind == "second":
            times = second_starts(workdir, moments, chance)
        else:
            times = []
            while len(times) < moments:
                if state(workdir)[1] >= STEPS - 6:  # nearly done: the rest is another run's
                    finish(kind, workdir, whole)
                    subprocess.run(["rm", "-rf", *map(str, workdir.iterdir())], check=True)
                seconds = hit(kind, workdir, chance)
                times += [] if seconds is None else [seconds]
                print(f"{kind}: {len(times)} hits, now at step {state(workdir)[0]}", file=sys.stderr, flush=True)
        finish(kind, workdir, whole)
    finally:
        if kind == "disk":
            subprocess.run(["umount", str(workdir)], check=True)
    return times


def finish(kind: str, workdir: Path, whole: Path) -> None:
    process = start("whole", workdir)
    out, error = process.communicate(timeout=600)
    if process.returncode or error:
        fail(kind, "the run cannot be resumed to its end", process, out, error)
    compare(kind, workdir, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and theirs, ignore it
    with tempfile.TemporaryDirectory() as place:
        folder, whole = Path(place), Path(place) / "whole"
        for _ in range(2):  # the second one, of a finished run, fills the cache for resumed runs
            process = start("whole", whole)
            out, error = process.communicate(timeout=900)
            if process.returncode or error:
                fail("whole", "the run that nothing hits failed", process, out, error)
        print(
            f"seed {args.seed}, {args.moments} moments each\n\n| hit during | hits | seconds to the end: median, most |"
        )
        print("|---|---|---|", flush=True)
        for kind in args.kinds:
            times = measure(kind, folder, whole, args.moments, random.Random(f"{args.seed} {kind}"))
            print(f"| {kind} | {len(times)} | {statistics.median(times):.1f}, {max(times):.1f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        which = sys.argv[2]
        del sys.argv[1:3]
        child(which)
    main()
