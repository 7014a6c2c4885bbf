"""The health rules: pure functions from the records of a run to findings."""
