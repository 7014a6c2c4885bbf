"""The loop of a run: steps, evaluations, records, checkpoints and rollbacks. It knows no program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from jaxrl_llm.session.record import Record
from jaxrl_llm.session.session import Session


def run(
    session: Session, one_step: Callable[[Any, int], tuple[Any, Record]], test: Callable[[], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Runs from the current step to the end, and yields the records of metrics.jsonl, one step late.

    one_step(what the last step returned, step) -> what the next step gets, and the record. test: self-test of a new
    run, called before its first step.
    Raises: UserError, for an error that the user can fix, or if a health rule stops the run.
    """
    with closing(session.profile()) as profile:
        carried = session.start(test)
        while session.run_state.step < session.plan.steps and not session.stagnates():
            session.stop.check()
            with profile.step(session.run_state.step + 1):
                carried, record = one_step(carried, session.run_state.step + 1)
            profile.end(record.step, session.run_state.states)
            record.evaluation = session.evaluate(record.step)
            # Rules always judge the previous step, not the newest record that is ready, because timing must not decide
            # when a rule stops a run.
            before = session.log.finish()
            if session.judge(before) or session.write(record):  # a rule sends the run back
                carried = session.start(test)
            yield from before
    last = session.log.finish()
    session.judge(last)
    yield from last
    session.finish()
