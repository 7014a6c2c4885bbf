"""The log of a run: console lines, metrics.jsonl, completions.jsonl, and the loggers that the config names.

Every process has the records. The first one writes them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

import jax
import numpy as np
from rich.progress import Progress

from jaxrl_llm import loggers
from jaxrl_llm.config.load import flatten
from jaxrl_llm.config.names import resolve
from jaxrl_llm.data import image_files, image_layout
from jaxrl_llm.data.image_columns import chat_text, text_of
from jaxrl_llm.data.settings import accuracies_of, set_name
from jaxrl_llm.errors import printable
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.health.history import History
from jaxrl_llm.machine import disk, distributed, progress, sharding
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.session import json_lines
from jaxrl_llm.session.record import Record, Timer
from jaxrl_llm.session.settings import LogSettings
from jaxrl_llm.structs import Images

# Label in the console line, key in metrics.jsonl, format. Keys that a run does not have are left out.
COLUMNS = (
    ("loss", "loss/sft", ".4f"),
    ("reward", "reward/mean", ".3f"),
    ("margin", "reward/margin", ".3f"),  # of pairs, between the chosen and the rejected completion
    ("preferred", "reward/accuracy", ".1%"),
    ("length", "completion/length", ".1f"),
    ("kl", "kl/ref", ".1e"),
    ("entropy", "entropy", ".3f"),
    ("clip", "clip/fraction", ".3f"),
    ("gap", "sampler/gap_max", ".0e"),
    ("grad", "grad_norm", ".2f"),
    ("accuracy", "eval/accuracy", ".1%"),
)
# Labels that a narrow line leaves out, the first one first.
LEAST = ("speed", "gap", "clip", "kl", "entropy", "grad", "margin", "preferred", "left", "length", "accuracy", "loss")
NOTEBOOK = 100  # characters of a line in the output of a cell
T = TypeVar("T")
PHASES = ("rollout", "reward", "score", "update")


class Log:
    """Writes the console, metrics.jsonl and completions.jsonl of a run in one thread, in order, and feeds the loggers.

    The thread waits for a step's numbers while the next step runs. `start` opens the files.
    """

    def __init__(self, workdir: Path, settings: LogSettings, num_steps: int, config: dict[str, Any], name: str = ""):
        """config: all fields of the run, for the loggers. name: of the workdir for the user, if it is in a bucket."""
        self._workdir, self._num_steps, self._name = workdir, num_steps, name or str(workdir)
        self._settings, self._config = settings, config
        # Metrics of further evaluation sets, by their labels in the console line.
        metrics = {set_name(section): metric for section, metric in accuracies_of(flatten(config)).items()}
        self._extra_sets = {f"accuracy {name}": metric for name, metric in metrics.items() if name}
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._written: Future[dict[str, Any]] | None = None  # record of the last `write`, done when it is on disk
        self._watched: Future[float] | None = None
        self._files: dict[str, TextIO] = {}
        self._loggers: list[loggers.Background] = []
        self._bars: Progress | None = None
        terminal = sys.stdout.isatty()  # rich would also trust a notebook's FORCE_COLOR
        self._console = progress.UnhiddenConsole(
            highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=terminal
        )
        self._terminal = terminal and distributed.first()
        self._console.quiet = not distributed.first()

    def start(self, step: int) -> None:
        """Continues after `step`. Drops later lines of the files; the run writes them again."""
        self._close_files()
        self._start, self._began = step, time.perf_counter()
        self._written = None
        if distributed.first():
            self._open(step)

    def _open(self, step: int) -> None:
        for name in ("metrics", "completions"):
            self._files[name] = self._opened(name, step if step else -1)  # the record of step 0 is written again
        of = self._settings
        run = loggers.LoggedRun(self._workdir, step, of.project, self._config, of.name, of.tags)
        for name in self._settings.to:
            self._loggers.append(loggers.Background(name, resolve(name, loggers), run, self.say))
        if self._terminal and not self._bars:
            self._bars = progress.make_bars(self._console)
            self._bar = self._bars.add_task("steps", total=self._num_steps, count="", detail="")
            self._bars.start()
            progress.DISPLAY.lend(self._bars)
        self._show_step(step)

    def timer(self) -> Timer:
        """Returns the timer of a step that begins now, or when the last watched arrays are ready."""
        return Timer(after=self._watched)

    def watch(self, arrays: Any) -> Future[float]:
        """Returns a future of the time at which the arrays are ready."""
        self._watched = self._thread.submit(_ready, arrays)
        return self._watched

    def write(self, record: Record) -> None:
        """Starts to write a record. Raises: UserError, if the previous one could not be written."""
        self.finish()
        self._written = self._thread.submit(self._write, record)

    def finish(self) -> list[dict[str, Any]]:
        """Waits for the last record since `start` and returns it in a list, which is empty without one. Raises: UserError, if it is not written."""
        return [self._written.result()] if self._written else []

    def sync(self) -> None:
        """Waits until the written lines are on the disk itself: a host that is lost takes its page cache with it."""
        self.finish()
        with disk.writing(self._workdir):
            for file in self._files.values():
                os.fsync(file.fileno())

    def say(self, text: str) -> None:
        """Prints a line on the console, if it is still open."""
        try:
            self._console.print(printable(text), markup=False)
        except (OSError, SystemExit):  # nobody reads the output; rich raises SystemExit for a closed pipe
            self._console.quiet = True
            if callable(signal.getsignal(signal.SIGHUP)):
                signal.raise_signal(signal.SIGHUP)  # ends the run, as a closed terminal does

    def tell(self, step: int, finding: Finding) -> None:
        """Shows a finding at a step: a line on the console, and a text for the loggers."""
        self.say(f"    health {finding.line()}")
        for logger in self._loggers:
            logger.write_text(step, f"health/{finding.id}", finding.line())

    def read(self, pick: Callable[[TextIO], list[T]]) -> list[T]:
        """Returns pick(lines of metrics.jsonl), which the first process reads, in all processes."""
        picked: list[T] = []
        if distributed.first():
            with (self._workdir / "metrics.jsonl").open(encoding="utf-8") as file:
                picked = pick(file)
        return distributed.exchange(picked)[0]

    def last(self) -> list[dict[str, Any]]:
        """Returns the last record of metrics.jsonl, if there is one."""
        return self.read(lambda file: [json.loads(line) for line in deque(file, maxlen=1)])

    def seen_by_health(self) -> list[dict[str, Any]]:
        """Returns those records of metrics.jsonl that health rules look at."""
        return self.read(lambda file: History(map(json.loads, file)).records)

    def accuracies(self) -> dict[int, float]:
        """Returns the accuracies of all evaluations in metrics.jsonl, by step."""
        return dict(self.read(lambda file: [*json_lines.accuracies(map(json.loads, file)).items()]))

    def lacks_evaluation(self, step: int) -> bool:
        """Returns whether metrics.jsonl, which ends at `step` or before, has no evaluation of `step`."""
        return all(record["step"] < step or "eval/accuracy" not in record for record in self.last())

    def with_verdicts(self, step: int, evaluation: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of the evaluation sets whose accuracy is a number, and says which sets have none.

        An accuracy is NaN if no completion has a verdict.
        """
        unknown = [name.removesuffix("/accuracy") for name, value in evaluation.items() if math.isnan(value)]
        for prefix in unknown:
            self.say(f"    step {step}: no completion of {prefix} has a verdict, so it has no accuracy")
        return {name: value for name, value in evaluation.items() if name.rpartition("/")[0] not in unknown}

    def add_evaluation(self, step: int, evaluation: dict[str, Any]) -> None:
        """Adds an evaluation to the record of `step`, which is the last one, or writes a first record."""
        before = self.last()
        record = {"step": step} | (before[0] if before else {})
        if distributed.first():
            self._files["metrics"].close()
            self._files["metrics"] = self._opened("metrics", step - 1)
        self._written = self._thread.submit(self._write_plain, record | evaluation)
        self.finish()

    def end(self, step: int, compilations: object, stopped: str = "") -> None:
        """Prints what was compiled and how the run ended after `step`; stopped: the signal and the time since."""
        self.say(str(compilations))
        if stopped:
            again = f"the same command or call goes on, with workdir {self._name}"
            end = f"stopped by {stopped}, after step {step}: {again}"
        else:
            end = f"done: the trained model, as transformers and vLLM load it, is {self._name}/hf"
        self.say(end)

    def close(self) -> None:
        """Closes all outputs. Each line was flushed when it was written."""
        self._thread.shutdown()
        if self._bars:
            progress.DISPLAY.lend(None)
            self._bars.stop()
        self._close_files()

    def _opened(self, name: str, step: int) -> TextIO:
        """Opens a file for appending, without its lines after `step`."""
        file = self._workdir / f"{name}.jsonl"
        with disk.writing(self._workdir):
            if damage := json_lines.cut_back(file, step):
                self.say(damage)
            return file.open("a", encoding="utf-8")

    def _close_files(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # a full disk refuses the rest of a line again
                file.close()
        for logger in self._loggers:
            logger.close()
        self._files, self._loggers = {}, []

    def _write(self, record: Record) -> dict[str, Any]:
        """Waits for the numbers of a step and writes them. Runs in the thread."""
        written = self._write_plain({"step": record.step} | record.summary())
        if record.samples and self._shows(record.step):
            self._write_sample(record.step, record.samples, sharding.to_host(record.rewards))
        return written

    def _shows(self, step: int) -> bool:
        """Returns whether completions of a step are shown. A setting above 0 always shows the first and last step."""
        every = self._settings.completions_every
        return bool(every) and (step % every == 0 or step in (1, self._num_steps))

    def _write_plain(self, record: dict[str, Any]) -> dict[str, Any]:
        """Writes one object to metrics.jsonl, flushed before this returns, and one line to the console."""
        record = {k: _plain(v) for k, v in record.items()}
        step = record["step"]
        self._append("metrics", record)
        for logger in self._loggers:
            logger.write(step, {k: v for k, v in record.items() if k != "step" and v is not None})
        self.say(self._line(step, record))
        self._show_step(step)
        return record

    def _write_sample(self, step: int, samples: Samples, rewards: np.ndarray) -> None:
        """Writes one group of the batch to completions.jsonl and the loggers, and two completions to the console."""
        prompt, graded, rewards = samples.prompts.rows[0]["prompt"], samples.wait_for_grades(), rewards[0]
        texts, turns = graded.texts[0], graded.turns[:1]
        line = {"step": step, "prompt": prompt, "completions": texts, "rewards": [_plain(x) for x in rewards]}
        line |= ({"turns": turns[0]} if turns else {}) | _thumbnails(samples.prompts.images)
        self._append("completions", line)
        for logger in self._loggers:
            logger.write_samples(step, samples_of(line))
        asked = _short(text_of(prompt[-1]["content"]) if isinstance(prompt, list) else prompt)
        for i, reward in enumerate(rewards[:2]):
            earned = f"(reward {reward:g})" if math.isfinite(reward) else "(no reward)"
            if not turns:
                self.say(f"    {asked} -> {_short(texts[i])}  {earned}")
                continue
            self.say(f"    {asked}  {earned}")
            for turn in turns[0][i]:
                self.say(f"      {'>' if turn['role'] == 'assistant' else '<'} {_short(turn['content'])}")

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if not distributed.first():
            return
        with disk.writing(self._workdir):
            self._files[name].write(json.dumps(line, ensure_ascii=name == "metrics", allow_nan=False) + "\n")
            self._files[name].flush()

    def _line(self, step: int, record: dict[str, Any]) -> str:
        """Returns the line of a step. On a terminal and in a notebook, what says least is left out until it fits."""
        parts = {"step": f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"}
        parts |= {label: f"{label} {record[key]:{form}}" for label, key, form in COLUMNS if record.get(key) is not None}
        extra = {label: metric for label, metric in self._extra_sets.items() if record.get(metric) is not None}
        parts |= {label: f"{label} {record[metric]:.1%}" for label, metric in extra.items()}
        if "time/step" in record:
            phases = " ".join(f"{p} {record[f'time/{p}']:.2f}" for p in PHASES if f"time/{p}" in record)
            parts["seconds"] = f"{record['time/step']:.2f}s ({phases})"
            parts["speed"] = f"{record['tokens_per_second']:,.0f} tok/s"
        if not self._bars and (left := self._left(step)):
            parts["left"] = left
        line = "  ".join(parts.values())
        for label in ("seconds", *extra, *LEAST):
            if len(line) <= self._width():
                break
            # The step's seconds stay, and only their phases are left out.
            parts[label] = parts.get(label, "").partition(" (")[0] if label == "seconds" else ""
            line = "  ".join(filter(None, parts.values()))
        return line

    def _width(self) -> float:
        """Returns how many characters fit a line: any number in a file."""
        return self._console.width if self._terminal else NOTEBOOK if "ipykernel" in sys.modules else math.inf

    def _show_step(self, step: int) -> None:
        if self._bars:
            self._bars.update(self._bar, completed=step, count=f"{step}/{self._num_steps}", detail=self._left(step))

    def _left(self, step: int) -> str:
        done = step - self._start
        if done < 1:
            return ""
        left = (time.perf_counter() - self._began) / done * (self._num_steps - step)
        return f"left {int(left // 60)}m{int(left % 60):02d}s"


def samples_of(line: dict[str, Any]) -> list[loggers.Sample]:
    """Returns the completions in a line of completions.jsonl, as loggers show them."""
    texts = map(chat_text, line["turns"]) if "turns" in line else line["completions"]
    prompt = chat_text(line["prompt"])
    return [loggers.Sample(prompt, *about) for about in zip(texts, line["rewards"], strict=True)]


def _thumbnails(images: Images | None) -> dict[str, list[str]]:
    """Returns small copies of the images of the first prompt, as data URLs."""
    if images is None or not (first_prompt := image_layout.pixels(images, 0)):
        return {}
    from PIL import Image  # an extra, which rows with images need anyway

    return {"pictures": [image_files.thumbnail(Image.fromarray(pixels)) for pixels in first_prompt]}


def _plain(value: Any) -> float | int | None:
    """Returns a number for JSON; None if it is not finite."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def _short(text: str, length: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


def _ready(arrays: Any) -> float:
    jax.block_until_ready(arrays)
    return time.perf_counter()
