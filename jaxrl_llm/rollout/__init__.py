"""Rollouts: engines sample completions, and the actor passes them to the learner."""
