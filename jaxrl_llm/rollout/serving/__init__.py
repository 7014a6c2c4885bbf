"""The in-JAX engine behind an OpenAI-compatible address, for `jaxrl serve` and for the agents of a run."""
