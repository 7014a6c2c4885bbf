"""Health rules on environments: whether the policy uses its tools, and whether the tools work."""

from __future__ import annotations

from collections.abc import Sequence

from ..finding import Finding, LogRecord
from ..history import History
from .bounds import CALLS_WHEN_DOWN, ONE_TURN, TOOL_ERRORS

EPISODE = "episode/"  # start of the names of the metrics of episodes


def tools_unused(history: History) -> Finding | None:
    """Rule F22: nearly every episode ends at its first turn, so the policy does not use its tools.

    In a healthy run some episodes have more turns.
    """
    turns = history.recent_mean("episode/turns")
    if not turns < ONE_TURN or history.is_solved or history.strength_above("episode/turns", ONE_TURN) >= -1:
        return None
    return Finding(
        "warning",
        evidence=f"an episode has {turns:.2f} turns on average, so nearly no episode calls a tool",
        cause="the policy does not know the tools, or earns the same reward without them",
        fix="start from a model that calls the tools (jaxrl sft), describe the tools in the prompt, or check the "
        "reward",
        reference="docs/failures.md F22",
    )


def tool_down(history: History) -> Finding | None:
    """Rule F36: in the last steps, every call of a tool fails or finds nothing.

    Each of several environments is judged by its own metrics. A mean over all of them would hide a tool that fails, and
    would compare the errors of one environment with the calls of another.
    """
    for name in _environment_names(history.last_records) or [""]:
        prefix, whose, section = EPISODE, "", "config.env"
        if name:
            prefix, whose = f"{EPISODE}{name}/", f" in environment {name!r}"
            section = f"config.environments.{name}.env"
        failure_counts, empty_counts = _counts_when_down(history.last_records, prefix)
        # If calls both fail and find nothing, the more frequent problem is reported.
        if sum(empty_counts) > sum(failure_counts):
            return Finding(
                "warning",
                evidence=f"all searches{whose} find nothing ({empty_counts[-1]:.2g} searches per episode)",
                cause="the index of the search server is empty or the wrong one, or the server does not understand the "
                "queries",
                fix="send a query to the server by hand (docs/retriever.md), read the queries in completions.jsonl, "
                f"and correct {section}",
                reference="docs/failures.md F36",
            )
        if failure_counts:
            return Finding(
                "error",
                evidence=f"all tool calls{whose} fail ({failure_counts[-1]:.2g} calls per episode)",
                cause="the tool or its server does not answer",
                fix="read the tool's error in completions.jsonl, restart the tool, or correct its address in "
                f"{section}",
                reference="docs/failures.md F36",
            )
    return None


def _environment_names(records: Sequence[LogRecord]) -> list[str]:
    """Returns the names of a run's several environments, sorted; [] if the run does not name its environments."""
    counters = {name for record in records for name in record if name.startswith(EPISODE) and name.endswith("/turns")}
    return sorted(name[len(EPISODE) : -len("/turns")] for name in counters - {f"{EPISODE}turns"})


def _counts_when_down(records: Sequence[LogRecord], prefix: str) -> tuple[list[float], list[float]]:
    """Returns the failures and the empty searches of an episode in the last steps; two empty lists if a call succeeded.

    prefix: start of the names of the environment's metrics.
    """
    last_records = [
        record for record in records if record.get(f"{prefix}errors") is not None and record.get(f"{prefix}turns")
    ][-3:]
    call_counts = [max(_calls_or_turns(record, prefix), CALLS_WHEN_DOWN) for record in last_records]
    empty_counts = [record.get(f"{prefix}empty") or 0.0 for record in last_records]
    failure_counts = [record[f"{prefix}errors"] for record in last_records]
    # The factor below 1 allows for rounding, because the two sides are means of different counts.
    has_success = any(
        failures + empties < 0.999999 * calls
        for failures, empties, calls in zip(failure_counts, empty_counts, call_counts, strict=True)
    )
    return ([], []) if has_success else (failure_counts, empty_counts)


def _calls_or_turns(record: LogRecord, prefix: str) -> float:
    """Returns the mean number of tool calls of an episode, or of its turns if the environment does not count calls.

    prefix: start of the names of the environment's metrics.
    """

    def count(name: str) -> float:
        return record.get(prefix + name) or 0.0

    # Invalid calls are subtracted, because they reach no tool.
    calls = count("calls") - count("invalid") if count("calls") else 0.0
    return calls + count("searches") + count("programs") or record[f"{prefix}turns"]


def tool_errors(history: History) -> Finding | None:
    """Rule F22: many turns end with an error of the environment.

    In a healthy run such errors are rare. Mistakes of the policy (`episode/own_errors`) do not count as errors.
    """
    errors, turns = history.recent_mean("episode/errors"), history.recent_mean("episode/turns")
    # A strength above 1 means that noise alone does not explain the excess.
    is_excess_certain = history.strength_above(_excess_errors, 0.0) > 1
    if not (errors > TOOL_ERRORS * turns and is_excess_certain):
        return None
    return Finding(
        "warning",
        evidence=f"{errors / turns:.0%} of the turns end in an error of the environment",
        cause="a tool fails, is too slow, or does not understand the policy's calls",
        fix="read the errors in completions.jsonl and in the tool's own log; if the tool is too slow, raise "
        "env.timeout, env.retries or turns.timeout",
        reference="docs/failures.md F22",
    )


def _excess_errors(record: LogRecord) -> float | None:
    """Returns the errors per turn of a step minus TOOL_ERRORS; None if the record lacks them."""
    errors, turns = record.get("episode/errors"), record.get("episode/turns")
    return None if errors is None or not turns else errors / turns - TOOL_ERRORS
