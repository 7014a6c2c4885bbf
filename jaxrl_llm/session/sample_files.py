"""The files of a run's samples, from which `jaxrl replay` makes a step again.

A judge, a tool, a vLLM server or a clock would give other results in the replay, so the run keeps their results.
Each process writes one compressed file for a step, samples/STEP-PROCESS.npz in the work directory, also in a bucket.
The file is written before the step's record in metrics.jsonl, and holds the tokens without padding.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from jaxrl_llm.data import prompts as data
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import bucket, disk, distributed
from jaxrl_llm.rollout.grading import GradedCompletions, RewardFn
from jaxrl_llm.rollout.named_environments import Environments
from jaxrl_llm.rollout.samples import CompletionTask, Samples
from jaxrl_llm.session.record import LOG_CHANNEL
from jaxrl_llm.structs import Rewards, Rollouts, Tree

FOLDER = "samples"  # folder of the files in the work directory
PER_TOKEN = ("completions", "loss_mask", "logprobs", "versions")  # fields of `Rollouts` with a value for each token
TURNS = ("turn_numbers", "turn_rewards")  # further fields of this kind, if the estimator needs the turns


class SampledTask(NamedTuple):
    """What turns the token ids in a file into samples: the rows of the run, its tokenizer and its environments."""

    dataset: data.Dataset
    tokenizer: Any
    environments: Environments | None = None  # None if a completion is a single turn
    masks_truncated: bool = False  # argument of `Samples`


class SampleFiles:
    """The files of samples of a run."""

    def __init__(self, folder: Path, every: int = 0, check_lock: Callable[[], None] = lambda: None):
        """folder: folder of the files, which need not exist. every: N of config.log.keep_samples.

        check_lock: raises a UserError if another process has taken the lock of a work directory in a bucket.
        """
        self._folder, self._every, self._check_lock = folder, every, check_lock

    def is_due(self, step: int) -> bool:
        """Returns whether the samples of a step are kept, as at steps 1, N + 1, 2 N + 1 and so on."""
        return self._every > 0 and (step - 1) % self._every == 0

    def steps(self) -> set[int]:
        """Returns the steps that have a file."""
        return {step for step, _ in self._files()}

    def remove_after(self, step: int) -> None:
        """Removes the files of the steps after `step`, which the run makes again. Only the first process calls it."""
        with self._as_user_errors():
            for number, file in [*self._files()]:
                if number > step:
                    file.unlink()

    def write(self, step: int, samples: Samples) -> None:
        """Writes the samples of a step if they are kept. All processes call it, in the thread of the log.

        Raises: UserError, if the file cannot be written.
        """
        if not self.is_due(step):
            return
        self._check_lock()
        content = io.BytesIO()
        np.savez_compressed(content, **to_arrays(samples))
        with self._as_user_errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / f"{step}-{distributed.index()}.npz"
            if bucket.address(file):
                file.write_bytes(content.getvalue())  # an object exists only once it is complete
            else:
                disk.replace(file, content.getvalue())
        distributed.exchange(None, LOG_CHANNEL)  # the line of the step comes after the files of all processes

    def read(self, step: int, task: SampledTask) -> Samples:
        """Reads the samples of a step, of all processes. Judges nothing. Raises: UserError, for an unreadable file."""
        files = sorted((int(file.stem.partition("-")[2]), file) for number, file in self._files() if number == step)
        try:
            parts = [dict(np.load(io.BytesIO(file.read_bytes()))) for _, file in files]
            notes = [json.loads(str(part.pop("notes"))) for part in parts]
            if len(parts) != notes[0]["processes"]:
                raise ValueError(f"{len(parts)} of {notes[0]['processes']} files")
            arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            return from_arrays(arrays, notes, task)
        except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(
                f"{self._folder}: the samples of step {step} cannot be read ({error}): replay another step"
            ) from error

    def _as_user_errors(self) -> AbstractContextManager[None]:
        """Turns errors of a block that changes the files into a UserError."""
        address = bucket.address(self._folder)
        return bucket.bucket_errors("--workdir", address) if address else disk.writing(self._folder.parent)

    def _files(self) -> Iterator[tuple[int, Path]]:
        """Yields each file with its step."""
        if self._folder.is_dir():
            for file in self._folder.iterdir():
                number, _, process = file.name.removesuffix(".npz").partition("-")
                if file.suffix == ".npz" and number.isdecimal() and process.isdecimal():
                    yield int(number), file


def to_arrays(samples: Samples) -> dict[str, Any]:
    """Returns the arrays of a file. An array of tokens holds the real tokens of all completions, without padding."""
    rollouts, graded, rewards = samples.rollouts, samples.wait_for_grades(), samples.rewards()
    mask = rollouts.completion_mask
    notes = {
        "processes": distributed.count(),
        "metrics": {name: float(x) for name, x in samples.metrics.items()},
        "reward_metrics": graded.metrics,
    }
    arrays = {"numbers": samples.prompts.numbers, "completion_mask": mask, "truncated": rollouts.truncated}
    # A mask [B, G, C] selects the real tokens, so these arrays have one dimension.
    token_fields = PER_TOKEN if rollouts.turn_numbers is None else PER_TOKEN + TURNS
    arrays |= {name: getattr(rollouts, name)[mask] for name in token_fields}
    arrays |= {f"tree/{name}": x[mask] for name, x in vars(rollouts.tree).items()} if rollouts.tree else {}
    arrays |= {f"episodes/{name}": x for name, x in rollouts.episodes.items()}
    arrays |= {f"channels/{name}": x for name, x in rewards.channels.items()}
    for name, x in vars(rewards).items():
        if name not in ("channels", *TURNS) and x is not None:
            arrays[f"rewards/{name}"] = x
    return arrays | {"notes": json.dumps(notes)}


def from_arrays(arrays: dict[str, np.ndarray], notes: list[dict[str, Any]], task: SampledTask) -> Samples:
    """Returns samples from the arrays of `to_arrays`, those of all processes joined. notes: notes of each process."""
    mask, pad_id = arrays["completion_mask"], task.tokenizer.pad_token_id

    def padded(name: str) -> np.ndarray:
        """Returns the array [B, G, C] of this name, with padding."""
        padding_value = {"completions": pad_id, "turn_numbers": -1, "turn_rewards": np.nan}.get(name, 0)
        padding = np.full(mask.shape, padding_value, arrays[name].dtype)
        return with_tokens(padding, arrays[name])

    def with_tokens(padding: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns a copy of `padding` [B, G, C] with the values of the real tokens in their places."""
        padded_tokens = padding.copy()
        padded_tokens[mask] = tokens
        return padded_tokens

    def table(prefix: str) -> dict[str, Any]:
        """Returns the arrays whose names have this prefix, by the rest of their names."""
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    tree, padding = table("tree/"), Tree.chains(mask)
    rollouts = Rollouts(
        **{name: padded(name) for name in PER_TOKEN + TURNS if name in arrays},
        completion_mask=mask,
        truncated=arrays["truncated"],
        episodes=table("episodes/"),
        tree=Tree(**{name: with_tokens(getattr(padding, name), x) for name, x in tree.items()}) if tree else None,
    )
    rewards = Rewards(channels=table("channels/"), **table("rewards/"))
    # Metrics of rewards are the means over the processes that wrote the files.
    metrics_of_processes = [note["reward_metrics"] for note in notes]
    names = metrics_of_processes[0]
    means = {name: sum(metrics[name] for metrics in metrics_of_processes) / len(notes) for name in names}
    prompts = data.make_prompts(task.dataset, arrays["numbers"].tolist(), pad_id)
    no_reward_function = cast(RewardFn, None)  # because the rewards come from the file
    decoded = CompletionTask(task.tokenizer, no_reward_function, task.environments).completions(prompts, rollouts)
    graded = GradedCompletions(decoded.texts, rewards, [*decoded.columns.get("turns", [])], means)
    return Samples(prompts, rollouts, lambda: graded, masks_truncated=task.masks_truncated, metrics=notes[0]["metrics"])
