"""Reinforcement learning for language models on JAX: see README.md."""

__version__ = "0.1.0"
