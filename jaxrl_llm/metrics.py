"""What a person sees: the banner, a line a step, and the files that keep them."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxrl_llm import disk
from jaxrl_llm.board import Board
from jaxrl_llm.checkpoint import cut_back
from jaxrl_llm.health import rules
from jaxrl_llm.structs import Rollouts

# Label in the console line, key in metrics.jsonl, format. A key that a run has not got is left out.
COLUMNS = (
    ("loss", "loss/sft", ".4f"),
    ("reward", "reward/mean", ".3f"),
    ("length", "completion/length", ".1f"),
    ("kl", "kl/ref", ".1e"),
    ("entropy", "entropy", ".3f"),
    ("clip", "clip/fraction", ".3f"),
    ("gap", "sampler/gap_max", ".0e"),
    ("grad", "grad_norm", ".2f"),
    ("accuracy", "eval/accuracy", ".1%"),
)
PHASES = ("rollout", "reward", "score", "update")


class Timer:
    """Seconds by phase of one step. Phases may overlap: the host rewards while the device scores."""

    def __init__(self) -> None:
        self.began = self._last = time.perf_counter()
        self.at: dict[str, float] = {}  # when a phase ended
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str, *, since: float | None = None, at: float | None = None) -> None:
        """A phase ended, now or `at`, that had begun with the end of the one before, or at `since`."""
        at = time.perf_counter() if at is None else at
        since = self._last if since is None else since
        if not self.at:
            self.began = since
        self._last = self.at[phase] = at
        self.seconds[phase] = at - since

    @property
    def whole(self) -> float:
        """From the beginning of the first phase to the end of the last."""
        return max(self.at.values()) - self.began


class Log:
    """Console, metrics.jsonl, completions.jsonl, TensorBoard and W&B of one run, from step `start` on."""

    def __init__(self, workdir: Path, config: dict[str, Any], *, start: int):
        num_steps: int = config["num_steps"]
        self._workdir, self._num_steps, self._start = workdir, num_steps, start
        with disk.writing(workdir):
            for name in ("metrics.jsonl", "completions.jsonl", "health.jsonl"):
                cut_back(workdir / name, start if start else -1)  # step 0 is written again
        before = (workdir / "metrics.jsonl").read_text().splitlines() if (workdir / "metrics.jsonl").exists() else []
        self._history = [json.loads(line) for line in before[-rules.WINDOW :]]
        self._found = {found.id for found in rules.findings(self._history)}
        self._board = self._wandb = None
        with disk.writing(workdir):
            self._metrics = (workdir / "metrics.jsonl").open("a", encoding="utf-8")
            self._completions = (workdir / "completions.jsonl").open("a", encoding="utf-8")
            if config["log"]["tensorboard"]:
                self._board = Board(workdir / "tensorboard", start)
        if config["log"]["wandb_project"]:
            import wandb  # pyright: ignore[reportMissingImports]

            run_id = hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:16]  # the same when resumed
            where = dict(project=config["log"]["wandb_project"], name=workdir.name, dir=str(workdir))
            self._wandb = wandb.init(**where, id=run_id, config=config, resume="allow")
        terminal = sys.stdout.isatty()  # rich would also believe a notebook's FORCE_COLOR
        self.console = Console(highlight=False, soft_wrap=True, force_terminal=terminal)
        self._progress = None
        if terminal:
            columns = (BarColumn(), TextColumn("{task.completed}/{task.total} steps"), TimeElapsedColumn())
            self._progress = Progress(*columns, TextColumn("{task.fields[left]}"), console=self.console)
            self._bar = self._progress.add_task("", total=num_steps, completed=start, left="")
            self._progress.start()
            atexit.register(self._progress.stop)  # an error must not leave the cursor hidden
        self._began = time.perf_counter()

    def step(self, step: int, record: dict[str, Any]) -> None:
        """One object in metrics.jsonl, one line on the console; the file has it before this returns.

        Raises: UserError, if the disk does not take it.
        """
        record = {"step": step} | {k: _plain(v) for k, v in record.items()}
        with disk.writing(self._workdir):
            self._metrics.write(json.dumps(record, allow_nan=False) + "\n")
            self._metrics.flush()
            if self._board:
                self._board.write(step, {k: v for k, v in record.items() if k != "step" and v is not None})
        if self._wandb:
            self._wandb.log(record, step=step)
        self._print(self._line(step, record))
        self._check_health(record)
        if self._progress:
            self._progress.update(self._bar, completed=step, left=self._left(step))

    def _check_health(self, record: dict[str, Any]) -> None:
        """What the rules find goes to health.jsonl at every step, and to the console when it begins."""
        self._history = [*self._history, record][-rules.WINDOW :]
        found = rules.findings(self._history)
        for finding in found:
            with disk.writing(self._workdir), (self._workdir / "health.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": record["step"]} | finding.record()) + "\n")
            if finding.id not in self._found:
                self._print(f"    {finding.line()}")
        self._found = {finding.id for finding in found}

    def completions(self, step: int, rows: list[dict[str, Any]], texts: list[list[str]], rewards: np.ndarray) -> None:
        """A group of every batch into completions.jsonl, and its first member on the console."""
        sample = {"step": step, "prompt": rows[0]["prompt"], "completions": texts[0], "rewards": rewards[0].tolist()}
        with disk.writing(self._workdir):
            self._completions.write(json.dumps(sample, ensure_ascii=False) + "\n")
            self._completions.flush()
        prompt = rows[0]["prompt"]
        asked = prompt[-1]["content"] if isinstance(prompt, list) else prompt
        for text, reward in list(zip(texts[0], rewards[0], strict=True))[:2]:
            self._print(f"    {_short(asked)} -> {_short(text)}  (reward {reward:g})")

    def lacks_evaluation(self, step: int) -> bool:
        """Nothing after `step` is logged, and its record has no evaluation."""
        return all(record["step"] < step or "eval/accuracy" not in record for record in self._history[-1:])

    def add_evaluation(self, step: int, accuracy: float) -> None:
        """Writes the record of `step` with its evaluation, in the place of one without."""
        self._metrics.close()
        with disk.writing(self._workdir):
            for name in ("metrics.jsonl", "health.jsonl"):
                cut_back(self._workdir / name, step - 1)
            self._metrics = (self._workdir / "metrics.jsonl").open("a", encoding="utf-8")
        before = self._history.pop() if self._history else {}
        self.step(step, before | {"eval/accuracy": accuracy})

    def end(self, step: int, compilations: object, stopped: str = "") -> None:
        """Says what was compiled and how the run ended after `step`; stopped: by which signal, and after how long."""
        self._print(f"compiled: {compilations}")
        if stopped:
            end = f"stopped by {stopped}, after step {step}: the same command with --workdir {self._workdir} goes on"
        else:
            end = f"done: the trained model, as transformers and vLLM load it, is {self._workdir / 'hf'}"
        self._print(end)

    def close(self) -> None:
        """Closes every sink. Each line was flushed when it was written."""
        if self._progress:
            self._progress.stop()
        if self._wandb:
            self._wandb.finish()
        with suppress(OSError):  # the rest of a line that a full disk has refused already
            self._metrics.close()
        with suppress(OSError):
            self._completions.close()
        if self._board:
            self._board.close()

    def _print(self, text: str) -> None:
        try:
            self.console.print(text, markup=False)
        except (OSError, SystemExit):  # nobody reads any more; SystemExit is what rich makes of a closed pipe
            self.console.quiet = True
            if callable(signal.getsignal(signal.SIGHUP)):
                signal.raise_signal(signal.SIGHUP)  # the end of the run, as with a closed terminal

    def _line(self, step: int, record: dict[str, Any]) -> str:
        parts = [f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"]
        parts += [f"{label} {record[key]:{form}}" for label, key, form in COLUMNS if record.get(key) is not None]
        phases = " ".join(f"{p} {record[f'time/{p}']:.2f}" for p in PHASES if f"time/{p}" in record)
        if "time/step" in record:
            parts.append(f"{record['time/step']:.2f}s ({phases})")
            parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
        return "  ".join(parts) + ("" if self._progress else f"  {self._left(step)}")

    def _left(self, step: int) -> str:
        done = step - self._start
        if done < 1:
            return ""
        left = (time.perf_counter() - self._began) / done * (self._num_steps - step)
        return f"left {int(left // 60)}m{int(left % 60):02d}s"


def summary(
    step: int,
    rollouts: Rollouts,
    channels: dict[str, np.ndarray],
    penalty: np.ndarray,
    updates: list[dict[str, Any]],
    timer: Timer,
) -> dict[str, Any]:
    """A step's record for the log.

    channels [B, G] with the task's "total"; penalty [B, G, C], a KL penalty in the reward, logged apart as reward/kl;
    updates: the metrics of each. How sampler and trainer differ is the first update's, a coefficient the last one's;
    what else updates report is averaged.
    """
    total = channels["total"]
    record: dict[str, Any] = {"reward/mean": total.mean(), "reward/std": total.std()}
    for name, channel in channels.items():
        if name != "total" and not np.isnan(channel).all():  # else it had nothing to say on this batch
            record[f"reward/{name}"] = np.nanmean(channel)
    if penalty.any():
        of_sequence = penalty.sum(axis=-1)
        record |= {"reward/kl": -of_sequence.mean(), "reward/kl_pays": np.mean(of_sequence < 0)}
    if total.shape[1] > 1:
        record |= {"groups/no_signal": np.mean(np.ptp(total, axis=1) == 0)}
    lengths = rollouts.completion_mask.sum(axis=-1)
    record |= {"completion/length": lengths.mean(), "completion/length_max": lengths.max()}
    record |= {"completion/truncated": rollouts.truncated.mean()}
    if rollouts.loss_mask.any():
        lags = step - 1 - rollouts.versions[rollouts.loss_mask]
        record |= {"rollout/lag": lags.mean(), "rollout/lag_p95": np.percentile(lags, 95)}
    first, last = updates[0], updates[-1]
    record |= {name: np.mean([u[name] for u in updates]) for name in first}
    record |= {name: x for name, x in first.items() if name.startswith(("sampler/", "correction/"))}
    record |= {name: x for name, x in last.items() if name.endswith(("learning_rate", "/coef"))}
    if "correction/square" in record:
        record["correction/ess"] = record["correction/mean"] ** 2 / max(record.pop("correction/square"), 1e-30)
    record |= {f"time/{phase}": value for phase, value in timer.seconds.items()}
    return record | {"time/step": timer.whole, "tokens_per_second": lengths.sum() / timer.whole}


def banner(
    title: str, rows: list[tuple[str, Any]], console: Console | None = None, *, lines: Sequence[str] = ()
) -> None:
    """A title, aligned pairs, and lines of text below them."""
    console = console or Console(highlight=False, soft_wrap=True)
    console.print(title, markup=False, style="bold")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"  {name:<{width}}  {value:,}" if isinstance(value, int) else f"  {name:<{width}}  {value}",
                      markup=False)  # fmt: skip
    for line in lines:
        console.print(line, markup=False)


def _plain(value: Any) -> float | int | None:
    """A number that JSON has; None for one that it has not."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def _short(text: str, length: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"
