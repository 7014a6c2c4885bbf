"""The mathematics of the algorithms, as pure functions. Only `credit` uses the config and the mesh."""
