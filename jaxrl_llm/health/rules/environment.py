"""Health rules on environments: whether the policy uses its tools, and whether the tools work."""

from __future__ import annotations

from ..finding import Finding, LogRecord
from ..history import History
from .bounds import CALLS_WHEN_DOWN, ONE_TURN, TOOL_ERRORS


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
    """Rule F36: in the last steps, every call of a tool fails or finds nothing."""
    last_records = [
        record
        for record in history.last_records
        if record.get("episode/errors") is not None and record.get("episode/turns")
    ][-3:]
    call_counts = [max(_calls_or_turns(record), CALLS_WHEN_DOWN) for record in last_records]
    empty_counts = [record.get("episode/empty") or 0.0 for record in last_records]
    failure_counts = [record["episode/errors"] for record in last_records]
    # The factor below 1 allows for rounding, because the two sides are means of different counts.
    if not last_records or any(
        failures + empties < 0.999999 * calls
        for failures, empties, calls in zip(failure_counts, empty_counts, call_counts, strict=True)
    ):
        return None
    # If calls both fail and find nothing, the more frequent problem is reported.
    if sum(empty_counts) > sum(failure_counts):
        return Finding(
            "warning",
            evidence=f"all searches find nothing ({empty_counts[-1]:.2g} searches per episode)",
            cause="the index of the search server is empty or the wrong one, or the server does not understand the "
            "queries",
            fix="send a query to the server by hand (docs/retriever.md), read the queries in completions.jsonl, and "
            "correct config.env",
            reference="docs/failures.md F36",
        )
    return Finding(
        "error",
        evidence=f"all tool calls fail ({last_records[-1]['episode/errors']:.2g} calls per episode)",
        cause="the tool or its server does not answer",
        fix="read the tool's error in completions.jsonl, restart the tool, or correct its address in config.env",
        reference="docs/failures.md F36",
    )


def _calls_or_turns(record: LogRecord) -> float:
    """Returns the mean number of tool calls of an episode, or of its turns if the environment does not count calls."""

    def count(name: str) -> float:
        return record.get(f"episode/{name}") or 0.0

    # Invalid calls are subtracted, because they reach no tool.
    calls = count("calls") - count("invalid") if count("calls") else 0.0
    return calls + count("searches") + count("programs") or record["episode/turns"]


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
