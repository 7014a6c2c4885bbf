"""Language models as pure functions of their parameters; nothing here knows of RL."""
