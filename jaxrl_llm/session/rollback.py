"""Rollbacks: a run goes back to a checkpoint before a problem, and does not repeat the steps after it.

Each decision is a file in WORKDIR/rollbacks before anything is changed. So a run that is killed at any moment resumes
with the same decisions, and repeats bit for bit what it did.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import StoppedByHealth
from jaxrl_llm.health.history import RECENT_STEPS
from jaxrl_llm.machine import disk, distributed

LOGS = ("metrics.jsonl", "completions.jsonl", "health.jsonl")


@dataclass(frozen=True)
class Decision:
    """A decision to go back."""

    step: int  # whose record a rule found ill
    to: int  # step of the checkpoint; 0: the start of the run
    finding: dict[str, Any]


class Rollbacks:
    """The decisions of a run, in WORKDIR/rollbacks: N.json, and in N the logs as they were."""

    def __init__(self, workdir: Path, keep: Callable[[], None] = lambda: None):
        """keep: copies the local workdir to where the run is kept."""
        self._workdir, self._folder, self._keep = workdir, workdir / "rollbacks", keep

    def read(self) -> list[Decision]:
        """Returns all decisions, in order, the same in all processes."""
        decisions: list[dict[str, Any]] = []
        if distributed.first() and self._folder.is_dir():
            files = sorted(self._folder.glob("*.json"), key=lambda file: int(file.stem))
            decisions = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return [Decision(**fields) for fields in distributed.exchange(decisions)[0]]

    def decide(self, step: int, finding: dict[str, Any], checkpoints: Collection[int], limit: int) -> Decision:
        """Decides to go back because of a finding at `step`. The decision is on the disk when this returns.

        checkpoints: steps of the complete checkpoints. Raises: StoppedByHealth, after `limit` decisions.
        """
        before = self.read()
        if len(before) >= limit:
            raise StoppedByHealth(
                f"step {step}: {finding['evidence']}, because {finding['cause']}; the run has gone back {limit} times "
                f"already (config.health.rollback.most): {finding['fix']}"
            )
        decision = Decision(step, target(last_healthy(step, finding), checkpoints, before), finding)
        if distributed.first():
            self._write(len(before) + 1, decision)
            self._keep()
        # No process may change its checkpoints before the decision is on the disk.
        distributed.wait("rollback")
        return decision

    def _write(self, number: int, decision: Decision) -> None:
        logs = self._folder / str(number)
        with disk.writing(self._workdir):
            logs.mkdir(parents=True, exist_ok=True)
            for name in LOGS:
                if (self._workdir / name).is_file():
                    shutil.copy2(self._workdir / name, logs / name)
            # Last: a decision counts once its file is there, and a run that is killed before it decides again.
            disk.replace(self._folder / f"{number}.json", json.dumps(asdict(decision), indent=2) + "\n")


def last_healthy(step: int, finding: dict[str, Any]) -> int:
    """Returns the last step that a finding at `step` leaves without doubt.

    A rule sees the mean of RECENT steps, so the problem may be as old; a slow one is older, if the rule can tell.
    """
    since = finding.get("since")
    return step - RECENT_STEPS if since is None else min(since, step - RECENT_STEPS)


def target(newest: int, checkpoints: Collection[int], before: list[Decision]) -> int:
    """Returns the step of the newest checkpoint at step `newest` or before, else of the oldest checkpoint.

    If the last rollback went to that checkpoint, the next older checkpoint is taken instead, if the run has one.
    Returns 0 if the run has no checkpoint.
    """
    if not checkpoints:
        return 0
    old = sorted(saved for saved in checkpoints if saved <= newest) or [min(checkpoints)]
    again = before and old[-1] <= before[-1].to
    older = [saved for saved in old if saved < before[-1].to] if again else []
    return older[-1] if older else old[-1]
