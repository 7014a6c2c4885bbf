"""Learners and scorers: forward passes, objectives, optimizer steps and their batches."""
