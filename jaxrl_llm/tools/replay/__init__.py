"""Replay: makes a step of a run again, compares it with the run's record, and shows what is in it."""

from jaxrl_llm.tools.replay.record import StepRecord
from jaxrl_llm.tools.replay.steps import step

__all__ = ["StepRecord", "step"]
