"""Rollouts: engines sample completions, and the actor hands them to the learner."""
