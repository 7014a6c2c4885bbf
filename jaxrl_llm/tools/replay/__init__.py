"""Replay: makes a step of a run again, compares it with the run's record, and shows what is in it."""
