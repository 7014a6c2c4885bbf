"""The mathematics of RL algorithms, as pure functions. Only `credit` uses the config and the mesh."""
