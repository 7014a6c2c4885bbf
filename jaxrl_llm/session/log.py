"""The log of a run: console lines, metrics.jsonl, completions.jsonl, and the loggers that the config names.

All processes compute the records, and process 0 writes them.
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
from jaxrl_llm.health import json_lines
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.health.history import History
from jaxrl_llm.machine import disk, distributed, progress, transfers
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.session.record import Record, Timer
from jaxrl_llm.session.sample_files import SampleFiles
from jaxrl_llm.session.settings import LogSettings
from jaxrl_llm.structs import Images

# The numbers of the console line of a step: label, key in metrics.jsonl, and format. A run shows only the keys that its
# record has.
COLUMNS = (
    ("loss", "loss/sft", ".4f"),
    ("reward", "reward/mean", ".3f"),
    ("margin", "reward/margin", ".3f"),  # reward difference between the completions of a preference pair
    ("preferred", "reward/accuracy", ".1%"),
    ("length", "completion/length", ".1f"),
    ("kl", "kl/ref", ".1e"),
    ("entropy", "entropy", ".3f"),
    ("clip", "clip/fraction", ".3f"),
    ("gap", "sampler/gap_max", ".0e"),
    ("grad", "grad_norm", ".2f"),
    ("accuracy", "eval/accuracy", ".1%"),
)
# Labels that a narrow console line omits, in this order until the line fits.
DROP_ORDER = (
    "speed",
    "gap",
    "clip",
    "kl",
    "entropy",
    "grad",
    "margin",
    "preferred",
    "left",
    "length",
    "accuracy",
    "loss",
)
NOTEBOOK_WIDTH = 100  # characters of a console line in a notebook
T = TypeVar("T")
PHASES = ("rollout", "reward", "score", "update")  # phases of a step whose seconds the console line shows


class Log:
    """Writes the console lines, metrics.jsonl and completions.jsonl of a run in one thread, and feeds the loggers.

    The thread waits for a step's numbers from the device while the next step runs. `start` opens the files.
    """

    def __init__(
        self,
        workdir: Path,
        settings: LogSettings,
        num_steps: int,
        config: dict[str, Any],
        *,
        sample_files: SampleFiles,
        name: str = "",
    ):
        """config: all fields of the run, for the loggers. name: address of the work directory, if it is in a bucket."""
        self._workdir, self._num_steps, self._name = workdir, num_steps, name or str(workdir)
        self._settings, self._config, self._sample_files = settings, config, sample_files
        # The keys are the labels of further evaluation sets in the console line, the values their metrics.
        metrics = {set_name(section): metric for section, metric in accuracies_of(flatten(config)).items()}
        self._extra_sets = {f"accuracy {name}": metric for name, metric in metrics.items() if name}
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._written_record: Future[dict[str, Any]] | None = None  # record of the last `write` once it is on disk
        self._ready_time: Future[float] | None = None  # time at which the last watched arrays were ready
        self._files: dict[str, TextIO] = {}
        self._loggers: list[loggers.BackgroundLogger] = []
        self._bars: Progress | None = None
        terminal = sys.stdout.isatty()  # rich would also trust a notebook's FORCE_COLOR
        self._console = progress.UnhiddenConsole(
            highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=terminal
        )
        self._terminal = terminal and distributed.first()
        self._console.quiet = not distributed.first()

    def start(self, step: int) -> None:
        """Continues the files after `step`. Removes their later lines, which the run writes again."""
        self._close_files()
        self._start_step, self._start_time = step, time.perf_counter()
        self._written_record = None
        if distributed.first():
            self._open(step)

    def _open(self, step: int) -> None:
        """Opens the files, loggers and progress bar of a run that continues after `step`."""
        for name in ("metrics", "completions"):
            self._files[name] = self._open_file(name, step if step else -1)  # a new run also rewrites step 0
        self._sample_files.remove_after(step)
        settings = self._settings
        run = loggers.LoggedRun(
            workdir=self._workdir,
            step=step,
            project=settings.project,
            config=self._config,
            name=settings.name,
            tags=settings.tags,
        )
        for name in self._settings.to:
            self._loggers.append(loggers.BackgroundLogger(name, resolve(name, loggers), run, self.print_line))
        if self._terminal and not self._bars:
            self._bars = progress.make_bars(self._console)
            self._bar_id = self._bars.add_task("steps", total=self._num_steps, count="", detail="")
            self._bars.start()
            progress.DISPLAY.use_log_bars(self._bars)
        self._show_step(step)

    def timer(self) -> Timer:
        """Returns the timer of a step that starts now, or as soon as the last watched arrays are ready."""
        return Timer(previous_step_end=self._ready_time)

    def watch(self, arrays: Any) -> Future[float]:
        """Returns a future of the time at which the device has computed the arrays."""
        self._ready_time = self._thread.submit(_time_when_ready, arrays)
        return self._ready_time

    def write(self, record: Record) -> None:
        """Starts to write a record in the thread. Raises: UserError, if the previous record could not be written."""
        self.finish()
        self._written_record = self._thread.submit(self._write, record)

    def finish(self) -> list[dict[str, Any]]:
        """Waits for the last record since `start`, and returns a list of it, or [].

        Raises: UserError, if the disk write fails.
        """
        return [self._written_record.result()] if self._written_record else []

    def sync(self) -> None:
        """Waits until the written lines are on the disk, because a host that crashes loses its page cache."""
        self.finish()
        with disk.writing(self._workdir):
            for file in self._files.values():
                os.fsync(file.fileno())

    def print_line(self, text: str) -> None:
        """Prints a line on the console, unless the console is closed."""
        try:
            self._console.print(printable(text), markup=False)
        except (OSError, SystemExit):  # nobody reads the output; rich raises SystemExit for a closed pipe
            self._console.quiet = True
            if callable(signal.getsignal(signal.SIGHUP)):
                signal.raise_signal(signal.SIGHUP)  # ends the run in the same way as a closed terminal

    def show_finding(self, step: int, finding: Finding) -> None:
        """Prints a finding of a health rule, and sends it to the loggers as a text of `step`."""
        self.print_line(f"    health {finding.line()}")
        for logger in self._loggers:
            logger.write_text(step, f"health/{finding.id}", finding.line())

    def read(self, pick: Callable[[TextIO], list[T]]) -> list[T]:
        """Returns the result of pick(open metrics.jsonl) in all processes. Only the first process reads the file."""
        picked: list[T] = []
        if distributed.first():
            with (self._workdir / "metrics.jsonl").open(encoding="utf-8") as file:
                picked = pick(file)
        return distributed.exchange(picked)[0]

    def last_records(self) -> list[dict[str, Any]]:
        """Returns a list of the last record of metrics.jsonl, or [] if the file is empty."""
        return self.read(lambda file: [json.loads(line) for line in deque(file, maxlen=1)])

    def health_records(self) -> list[dict[str, Any]]:
        """Returns the records of metrics.jsonl that health rules need."""
        return self.read(lambda file: History(map(json.loads, file)).records)

    def accuracies(self) -> dict[int, float]:
        """Returns the accuracies of all evaluations in metrics.jsonl, by step."""
        return dict(self.read(lambda file: [*json_lines.accuracies(map(json.loads, file)).items()]))

    def lacks_evaluation(self, step: int) -> bool:
        """Returns whether metrics.jsonl has no evaluation of `step`. The file has no later steps."""
        return all(record["step"] < step or "eval/accuracy" not in record for record in self.last_records())

    def with_verdicts(self, step: int, evaluation: dict[str, float]) -> dict[str, float]:
        """Removes the evaluation sets whose accuracy is NaN from the metrics, and prints a line for each removed set.

        An accuracy is NaN if the reward function judged none of the completions.
        """
        unknown = [name.removesuffix("/accuracy") for name, value in evaluation.items() if math.isnan(value)]
        for prefix in unknown:
            self.print_line(f"    step {step}: the reward function judged no completion of {prefix}: no accuracy")
        return {name: value for name, value in evaluation.items() if name.rpartition("/")[0] not in unknown}

    def add_evaluation(self, step: int, evaluation: dict[str, Any]) -> None:
        """Adds an evaluation to the last record, which must be that of `step`, or writes the first record."""
        last_records = self.last_records()
        record = {"step": step} | (last_records[0] if last_records else {})
        if distributed.first():
            # The record of this step is removed from the file, because it is written again with the evaluation.
            self._files["metrics"].close()
            self._files["metrics"] = self._open_file("metrics", step - 1)
        self._written_record = self._thread.submit(self._write_numbers, record | evaluation)
        self.finish()

    def end(self, step: int, compilations: object, stopped: str = "") -> None:
        """Prints what was compiled, and how the run ended after `step`.

        stopped: text of `Stop.ending_text`; "" if the run ended after its last step.
        """
        self.print_line(str(compilations))
        if stopped:
            remedy = f"the same command or call resumes the run from {self._name}"
            last_line = f"stopped by {stopped}, after step {step}: {remedy}"
        else:
            last_line = f"done: the trained model, as transformers and vLLM load it, is {self._name}/hf"
        self.print_line(last_line)

    def close(self) -> None:
        """Closes the files, the loggers and the progress bar."""
        self._thread.shutdown()
        if self._bars:
            progress.DISPLAY.use_log_bars(None)
            self._bars.stop()
        self._close_files()

    def _open_file(self, name: str, step: int) -> TextIO:
        """Opens WORKDIR/NAME.jsonl for appending, and removes its lines after `step`."""
        file = self._workdir / f"{name}.jsonl"
        with disk.writing(self._workdir):
            if damage := json_lines.remove_after(file, step):
                self.print_line(damage)
            return file.open("a", encoding="utf-8")

    def _close_files(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # a full disk refuses the rest of a line again
                file.close()
        for logger in self._loggers:
            logger.close()
        self._files, self._loggers = {}, []

    def _write(self, record: Record) -> dict[str, Any]:
        """Waits for the numbers of a step and writes them, in the thread of the log."""
        numbers = {"step": record.step} | record.summary()
        if record.samples:
            self._sample_files.write(record.step, record.samples)  # before the line, which says that the step is logged
        written = self._write_numbers(numbers)
        if record.samples and self._shows_completions(record.step):
            self._write_sample(record.step, record.samples, transfers.to_host(record.rewards))
        return written

    def _shows_completions(self, step: int) -> bool:
        """Returns whether completions of a step are shown. The first and the last step are shown unless it is 0."""
        interval = self._settings.completions_every
        return bool(interval) and (step % interval == 0 or step in (1, self._num_steps))

    def _write_numbers(self, record: dict[str, Any]) -> dict[str, Any]:
        """Writes one record to metrics.jsonl and flushes the file, then prints one line on the console."""
        record = {k: json_number(v) for k, v in record.items()}
        step = record["step"]
        self._append("metrics", record)
        for logger in self._loggers:
            logger.write(step, {k: v for k, v in record.items() if k != "step" and v is not None})
        self.print_line(self._step_line(step, record))
        self._show_step(step)
        return record

    def _write_sample(self, step: int, samples: Samples, rewards: np.ndarray) -> None:
        """Writes one group of the batch to completions.jsonl and the loggers, and two completions to the console."""
        # The record of completions.jsonl holds the first group of the batch.
        prompt, graded, rewards = samples.prompts.rows[0]["prompt"], samples.wait_for_grades(), rewards[0]
        texts, turns_of_group = graded.texts[0], graded.turns[:1]  # turns_of_group is [] without an environment
        line = {"step": step, "prompt": prompt, "completions": texts, "rewards": [json_number(x) for x in rewards]}
        pictures = thumbnails(samples.prompts.images, 0)
        line |= {"turns": turns_of_group[0]} if turns_of_group else {}
        line |= {"pictures": pictures} if pictures else {}
        self._append("completions", line)
        for logger in self._loggers:
            logger.write_samples(step, samples_of(line))
        # The console shows the prompt, or the last message of a chat, with two completions and their rewards.
        prompt_text = _shortened(text_of(prompt[-1]["content"]) if isinstance(prompt, list) else prompt)
        for i, reward in enumerate(rewards[:2]):
            reward_text = f"(reward {reward:g})" if math.isfinite(reward) else "(no reward)"
            if not turns_of_group:
                self.print_line(f"    {prompt_text} -> {_shortened(texts[i])}  {reward_text}")
                continue
            self.print_line(f"    {prompt_text}  {reward_text}")
            for turn in turns_of_group[0][i]:
                self.print_line(f"      {'>' if turn['role'] == 'assistant' else '<'} {_shortened(turn['content'])}")

    def _append(self, name: str, line: dict[str, Any]) -> None:
        """Appends a record to WORKDIR/NAME.jsonl, in the first process."""
        if not distributed.first():
            return
        with disk.writing(self._workdir):
            self._files[name].write(json.dumps(line, ensure_ascii=name == "metrics", allow_nan=False) + "\n")
            self._files[name].flush()

    def _step_line(self, step: int, record: dict[str, Any]) -> str:
        """Returns the console line of a step. On a terminal and in a notebook, DROP_ORDER shortens it until it fits."""
        # Each part of the line has a key, so that a narrow console can drop single parts.
        parts = {"step": f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"}
        parts |= {label: f"{label} {record[key]:{form}}" for label, key, form in COLUMNS if record.get(key) is not None}
        further_sets = {label: metric for label, metric in self._extra_sets.items() if record.get(metric) is not None}
        parts |= {label: f"{label} {record[metric]:.1%}" for label, metric in further_sets.items()}
        if "time/step" in record:
            phases = " ".join(f"{phase} {record[f'time/{phase}']:.2f}" for phase in PHASES if f"time/{phase}" in record)
            parts["seconds"] = f"{record['time/step']:.2f}s ({phases})"
            parts["speed"] = f"{record['tokens_per_second']:,.0f} tok/s"
        if not self._bars and (remaining := self._remaining_time(step)):
            parts["left"] = remaining
        line = "  ".join(parts.values())
        # Parts are removed one by one until the line fits.
        for label in ("seconds", *further_sets, *DROP_ORDER):
            if len(line) <= self._width():
                break
            # The step's seconds stay in the line, and only the seconds of its phases are omitted.
            parts[label] = parts.get(label, "").partition(" (")[0] if label == "seconds" else ""
            line = "  ".join(filter(None, parts.values()))
        return line

    def _width(self) -> float:
        """Returns how many characters fit into a console line; infinite if the output goes to a file."""
        if self._terminal:
            return self._console.width
        return NOTEBOOK_WIDTH if "ipykernel" in sys.modules else math.inf

    def _show_step(self, step: int) -> None:
        """Moves the progress bar to a step."""
        if self._bars:
            self._bars.update(
                self._bar_id, completed=step, count=f"{step}/{self._num_steps}", detail=self._remaining_time(step)
            )

    def _remaining_time(self, step: int) -> str:
        """Returns the expected time until the last step as text, from the mean time of a step so far."""
        steps_done = step - self._start_step
        if steps_done < 1:
            return ""
        seconds_left = (time.perf_counter() - self._start_time) / steps_done * (self._num_steps - step)
        return f"left {int(seconds_left // 60)}m{int(seconds_left % 60):02d}s"


def samples_of(line: dict[str, Any]) -> list[loggers.Sample]:
    """Converts a record of completions.jsonl to the samples that loggers show."""
    texts = map(chat_text, line["turns"]) if "turns" in line else line["completions"]
    prompt = chat_text(line["prompt"])
    return [loggers.Sample(prompt, text, reward) for text, reward in zip(texts, line["rewards"], strict=True)]


def thumbnails(images: Images | None, b: int) -> list[str]:
    """Returns small copies of the images of prompt b, as data URLs; [] if it has no image."""
    if images is None or not (prompt_images := image_layout.pixels(images, b)):
        return []
    from PIL import Image  # imported here, because only rows with images need this optional package

    return [image_files.thumbnail(Image.fromarray(pixels)) for pixels in prompt_images]


def json_number(value: Any) -> float | int | None:
    """Returns a number for JSON, or None if the number is not finite."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def _shortened(text: str, length: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


def _time_when_ready(arrays: Any) -> float:
    jax.block_until_ready(arrays)
    return time.perf_counter()
