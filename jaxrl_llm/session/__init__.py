"""What lasts in a run: its workdir, checkpoints, log, signals and rollbacks."""
