"""The machine that a run is on: its disk, its signals, its processes, and the user's cache folder."""
