"""The self-test of a new run, which compares engine, learner and rewards on the run's own prompts."""
