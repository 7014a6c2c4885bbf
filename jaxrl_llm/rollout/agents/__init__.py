"""Agents that own their loop, inside a training run: a server, limits, and traces that become rollouts."""
