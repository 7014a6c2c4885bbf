"""Rules on environments: whether the policy uses its tools, and whether they work."""

from __future__ import annotations

from ..finding import Finding, LogRecord
from ..history import History
from .bounds import DOWN, ONE_TURN, TOOL_ERRORS


def tools_unused(history: History) -> Finding | None:
    """F22: the environment answers nothing that the policy uses: each episode ends at its first turn.

    In a healthy run some go on.
    """
    turns = history.now("episode/turns")
    if not turns < ONE_TURN or history.solved or history.above("episode/turns", ONE_TURN) >= -1:
        return None
    return Finding(
        "warning",
        f"{turns:.2f} turns in an episode",
        "the policy does not know the tools, or earns as much without them",
        "begin with a model that uses them (jaxrl sft), describe them in the prompt, or look at the reward",
        "docs/failures.md F22",
    )


def tool_down(history: History) -> Finding | None:
    """F36: every call of a tool fails, or finds nothing, from the first step on."""
    last = [r for r in history.latest if r.get("episode/errors") is not None and r.get("episode/turns")][-3:]
    calls = [max(_calls(r), DOWN) for r in last]
    empty = [r.get("episode/empty") or 0.0 for r in last]
    failed = [r["episode/errors"] for r in last]
    # The two are means of different counts, which round.
    if not last or any(x + none < 0.999999 * n for x, none, n in zip(failed, empty, calls, strict=True)):
        return None
    # Where a server that fails has found nothing once, the failures are the news.
    if sum(empty) > sum(failed):
        return Finding(
            "warning",
            f"all searches find nothing, {empty[-1]:.2g} in an episode",
            "the index is empty or another one, or it does not understand the queries",
            "ask the server by hand (docs/retriever.md), or mend config.env; look at completions.jsonl",
            "docs/failures.md F36",
        )
    return Finding(
        "error",
        f"all calls fail, {last[-1]['episode/errors']:.2g} in an episode",
        "the tool or its server does not answer",
        "start it again, or mend its address in config.env; look at completions.jsonl for its error",
        "docs/failures.md F36",
    )


def _calls(record: LogRecord) -> float:
    """Returns how often an episode asks its tools, if the environment counts that; else its turns."""

    def count(name: str) -> float:
        return record.get(f"episode/{name}") or 0.0

    # An invalid call asks nobody.
    calls = count("calls") and count("calls") - count("invalid")
    return calls + count("searches") + count("programs") or record["episode/turns"]


def tool_errors(history: History) -> Finding | None:
    """F22: the environment often fails.

    In a healthy run a turn fails now and then. What the policy does wrong (`episode/own_errors`) is no failure.
    """
    errors, turns = history.now("episode/errors"), history.now("episode/turns")
    if not (errors > TOOL_ERRORS * turns and history.above(_too_many, 0.0) > 1):
        return None
    return Finding(
        "warning",
        f"{errors / turns:.0%} of the turns end in an error of the environment",
        "a tool fails, is too slow, or does not understand what the policy writes",
        "look at completions.jsonl and at the tool's own log; raise env.timeout, env.retries or turns.timeout",
        "docs/failures.md F22",
    )


def _too_many(record: LogRecord) -> float | None:
    """Returns by how much the errors of a turn are above TOOL_ERRORS."""
    errors, turns = record.get("episode/errors"), record.get("episode/turns")
    return None if errors is None or not turns else errors / turns - TOOL_ERRORS
