"""What a run's own numbers say about its health."""
