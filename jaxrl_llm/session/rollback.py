"""Rollbacks: a run returns to a checkpoint before a problem, and trains differently from there.

Each decision is written to WORKDIR/rollbacks before anything changes. Therefore a run that is killed at any moment
resumes with the same decisions, and computes the same numbers bit for bit.
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

# Logs that each rollback copies, because the run then rewrites the records of the repeated steps.
LOGS = ("metrics.jsonl", "completions.jsonl", "health.jsonl")


@dataclass(frozen=True)
class Decision:
    """A decision to roll the run back."""

    step: int  # step whose record made a health rule roll back
    to: int  # step of the checkpoint to which the run returns; 0 = the start of the run
    finding: dict[str, Any]


class Rollbacks:
    """The rollback decisions of a run: WORKDIR/rollbacks/N.json, with a copy of the logs in WORKDIR/rollbacks/N."""

    def __init__(self, workdir: Path, sync_workdir: Callable[[], None] = lambda: None):
        """sync_workdir(): copies the local files of the run into its bucket, if it has one."""
        self._workdir, self._folder, self._sync_workdir = workdir, workdir / "rollbacks", sync_workdir

    def read(self) -> list[Decision]:
        """Returns all decisions in order. Process 0 reads them, and all processes must call this."""
        decisions: list[dict[str, Any]] = []
        if distributed.first() and self._folder.is_dir():
            files = sorted(self._folder.glob("*.json"), key=lambda file: int(file.stem))
            decisions = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return [Decision(**fields) for fields in distributed.exchange(decisions)[0]]

    def decide(self, step: int, finding: dict[str, Any], checkpoints: Collection[int], limit: int) -> Decision:
        """Decides to roll back because of a finding at `step`. The decision is on the disk when this returns.

        checkpoints: steps of the checkpoints to which the run may return. Raises: StoppedByHealth, if the run has
        made `limit` decisions already.
        """
        earlier_decisions = self.read()
        if len(earlier_decisions) >= limit:
            raise StoppedByHealth(
                f"step {step}: {finding['evidence']}, because {finding['cause']}; the run has rolled back "
                f"config.health.rollback.most = {limit} times already: {finding['fix']}"
            )
        decision = Decision(step, rollback_step(last_healthy(step, finding), checkpoints, earlier_decisions), finding)
        if distributed.first():
            self._write(len(earlier_decisions) + 1, decision)
            self._sync_workdir()
        # No process may change its checkpoints before the decision is on the disk.
        distributed.wait("rollback")
        return decision

    def _write(self, number: int, decision: Decision) -> None:
        """Stores a decision to roll back, with copies of the logs as they are at this point."""
        logs = self._folder / str(number)
        with disk.writing(self._workdir):
            logs.mkdir(parents=True, exist_ok=True)
            for name in LOGS:
                if (self._workdir / name).is_file():
                    shutil.copy2(self._workdir / name, logs / name)
            # The decision is written last, because it counts as soon as its file exists. A run that is killed earlier
            # decides again.
            disk.replace(self._folder / f"{number}.json", json.dumps(asdict(decision), indent=2) + "\n")


def last_healthy(step: int, finding: dict[str, Any]) -> int:
    """Returns the last step before the problem that a finding at `step` reports.

    A rule judges the mean over RECENT steps, so the problem may be RECENT steps old. It is older if the finding has the
    entry "since".
    """
    since = finding.get("since")
    return step - RECENT_STEPS if since is None else min(since, step - RECENT_STEPS)


def rollback_step(last_healthy_step: int, checkpoints: Collection[int], earlier_decisions: list[Decision]) -> int:
    """Returns the step of the newest checkpoint up to `last_healthy_step`, or of the oldest if all are later.

    If the last rollback went to this checkpoint, the next older checkpoint is chosen, if the run has one. Returns 0 if
    the run has no checkpoint.
    """
    if not checkpoints:
        return 0
    candidates = sorted(saved for saved in checkpoints if saved <= last_healthy_step) or [min(checkpoints)]
    is_repeated = earlier_decisions and candidates[-1] <= earlier_decisions[-1].to
    older_candidates = [saved for saved in candidates if saved < earlier_decisions[-1].to] if is_repeated else []
    return older_candidates[-1] if older_candidates else candidates[-1]
