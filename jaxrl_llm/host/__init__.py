"""The host of a run: disk, signals, helper processes, and the user's cache folder."""
