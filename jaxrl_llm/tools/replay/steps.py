"""Makes a step of a run again, and compares its record with the run's own line of metrics.jsonl."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxrl_llm.build import Parts
from jaxrl_llm.config.load import flatten
from jaxrl_llm.config.names import resolve
from jaxrl_llm.data import encoding
from jaxrl_llm.errors import UserError
from jaxrl_llm.session import alike
from jaxrl_llm.session.log import json_number, thumbnails
from jaxrl_llm.session.record import Record
from jaxrl_llm.tasks import ENVIRONMENTS, owns_loop
from jaxrl_llm.tools.replay.observer import StepObserver, observed
from jaxrl_llm.tools.replay.record import StepRecord
from jaxrl_llm.tools.replay.start import ReplayStart, find_start, restored_run
from jaxrl_llm.tools.replay.what_if import MadeUpdates, compare_settings, read_changes
from jaxrl_llm.tools.report.runs import read_config
from jaxrl_llm.train import rl_step

# Prefixes of metrics that are not compared: they measure time, or the policy after the step.
NOT_COMPARED = ("time/", "tokens_per_second", "eval/")
# Largest difference of two equal values on another machine: relative to their size, and absolute for values near 0.
RELATIVE, ABSOLUTE = 1e-3, 1e-5
LONGEST_TEXT = 4000  # characters of a text of a data row


def step(
    run: str | Path,
    number: int,
    *,
    with_gradient: bool = True,
    changes: Mapping[str, str] = MappingProxyType({}),
    other_machine: bool = False,
    show: Callable[[str], None] = print,
) -> StepRecord:
    """Makes step `number` of a run again, and returns its record. Writes nothing into the folder of the run.

    run: work directory of a run of train, which may be running or in a bucket. with_gradient: whether to compute the
    gradient of each completion, in one more pass over the batch. changes: {config field: value as text}, settings with
    which the updates are made once more, to be compared. other_machine: whether the processor, the number of devices or
    a version may differ from the run's, where rounding differs. show: shows one line, which says how many steps run.
    Raises: UserError, if the step cannot be made again, or if a changed field would change its samples.
    """
    start = find_start(Path(run), number)
    if not other_machine and (difference := start.other_machine()):
        raise UserError(
            f"--step {number}: the machine of {run} differs from this one ({difference}), so the step may differ by "
            f"rounding: add --other-machine to compare within {RELATIVE:.1%}"
        )
    compared = read_changes(start.folder, changes) if changes else None
    show(start.announcement())
    with restored_run(start) as (session, parts, lease):
        # The steps between the checkpoint and the replayed step run without an observer.
        for earlier_step in range(start.start + 1, number):
            lease, _ = rl_step(session, parts, lease, earlier_step)
        learning = parts.learning
        observer = StepObserver(
            learning, parts.model, with_gradient=with_gradient or bool(compared), keep_states=bool(compared)
        )
        parts.learning = observed(learning, observer)
        _, record = rl_step(session, parts, lease, number)
        made = make_record(start, parts, observer, record)
        if not compared:
            return made
        updates = MadeUpdates(number, session.run_state.states, record.updates)
        return replace(made, what_if=compare_settings(parts, learning, compared, observer, updates))


def make_record(start: ReplayStart, parts: Parts, observer: StepObserver, record: Record) -> StepRecord:
    """Returns the record of a replayed step. record: result of the step, as the run would log it."""
    # The record holds the metrics of both steps, the arrays of the samples, and the numbers of the observer.
    metrics = {name: json_number(value) for name, value in record.summary().items()}
    reasons = reasons_for_rounding(start)
    assert record.samples, "a step of train samples"
    prompts, rollouts = record.samples.prompts, record.samples.rollouts
    token_ids = np.union1d(prompts.tokens[prompts.mask], rollouts.completions[rollouts.completion_mask]).tolist()
    return StepRecord(
        run=start.run,
        step=start.step,
        config=read_config(start.folder).to_dict(),
        logged=start.logged,
        metrics=metrics,
        differences=differences(start.logged, metrics, exact=not reasons),
        exact=not reasons,
        prompts=prompts.tokens,
        prompt_mask=prompts.mask,
        **{name: getattr(rollouts, name) for name in ("completions", "completion_mask", "truncated", "versions")},
        **{name: getattr(observer.batch, name) for name in ("loss_mask", "advantages", "rewards")},
        channels=record.samples.wait_for_grades().rewards.channels,
        columns=observer.columns(),
        gradient=observer.gradient,
        inputs=observer.inputs(),
        coefficients=observer.coefficients,
        first_update=observer.first_update,
        fingerprints=(start.notes["began_with"] if start.notes else {}) | alike.machine(),
        rows=[plain(row) for row in prompts.rows],
        token_ids=token_ids,
        token_texts=encoding.decode([[token] for token in token_ids], parts.tokenizer),
        images=[thumbnails(prompts.images, b) for b in range(len(prompts.rows))] if prompts.images else [],
        notes=reasons,
    )


def reasons_for_rounding(start: ReplayStart) -> list[str]:
    """Returns sentences that say why the values of the replay may differ by rounding; [] if they may not."""
    other_machine, config = start.other_machine(), read_config(start.folder)
    reasons = [f"The machine of the run differs from this one: {other_machine}."] if other_machine else []
    if jax.default_backend() == "gpu" and not config.deterministic:
        reasons.append("A GPU repeats bit for bit only with config.deterministic = True.")
    environment = flatten(config).get("env.name")
    if environment and owns_loop(resolve(environment, ENVIRONMENTS, "config.env.name")):
        reasons.append("The times at which agents ask decide which programs compute their requests.")
    return reasons


def differences(
    logged: Mapping[str, Any], replayed: Mapping[str, Any], *, exact: bool
) -> dict[str, tuple[float | None, float | None]]:
    """Returns {metric: (logged, replayed)} of the values that are not equal; a missing value is None.

    exact: whether equal means bit for bit; otherwise values are equal within RELATIVE and ABSOLUTE.
    """
    pairs = {name: (logged.get(name), replayed.get(name)) for name in compared_names(logged, replayed)}
    is_equal = operator.eq if exact else is_close
    return {name: pair for name, pair in pairs.items() if not is_equal(*pair)}


def is_close(one: float | None, other: float | None) -> bool:
    """Returns whether two values are equal but for the rounding of another machine. None: the value is missing."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def compared_names(logged: Mapping[str, Any], replayed: Mapping[str, Any]) -> list[str]:
    """Returns the metrics of a logged and a replayed step that must be equal."""
    return [name for name in {**logged, **replayed} if name != "step" and not name.startswith(NOT_COMPARED)]


def plain(value: Any) -> Any:
    """Returns a value of a data row as a value of JSON, with shortened texts."""
    if isinstance(value, dict):
        return {str(name): plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
