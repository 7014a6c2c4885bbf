"""The command `jaxrl serve`: the in-JAX engine behind an OpenAI-compatible address."""
