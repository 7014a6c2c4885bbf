"""What must hold before the first step: engine, learner and rewards are compared on the run's own prompts."""
