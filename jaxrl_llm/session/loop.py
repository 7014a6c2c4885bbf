"""The training loop, which `train` and `sft` share: steps, evaluations, records, checkpoints and rollbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from jaxrl_llm.session.record import Record
from jaxrl_llm.session.session import Session


def run(
    session: Session, one_step: Callable[[Any, int], tuple[Any, Record]], test: Callable[[], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Runs from the current step to the last one, and yields the records of metrics.jsonl, one step late.

    one_step(argument, step) -> (argument of the next step, record of this step). test: self-test of a new run, which
    is called before its first step.
    Raises: UserError, for an error that the user can fix, or if a health rule stops the run.
    """
    with closing(session.profile()) as profile:
        step_argument = session.start(test)
        while session.run_state.step < session.plan.steps and not session.stagnates():
            session.stop.check()
            with profile.step(session.run_state.step + 1):
                step_argument, record = one_step(step_argument, session.run_state.step + 1)
            profile.end(record.step, session.run_state.states)
            record.evaluation = session.evaluate(record.step)
            # Rules always judge the previous step, not the newest record that is ready, because timing must not decide
            # when a rule stops a run.
            previous_records = session.log.finish()
            if session.judge(previous_records) or session.write(record):  # a health rule rolls the run back
                step_argument = session.start(test)
            yield from previous_records
    last_records = session.log.finish()
    session.judge(last_records)
    yield from last_records
    session.finish()
