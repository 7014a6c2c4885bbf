"""The engine in JAX, on the devices of the trainer."""
