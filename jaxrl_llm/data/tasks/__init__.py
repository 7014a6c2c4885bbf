"""Problems: procedural tasks with `train()` and `held_out()` splits, and `convert(row)` for data sets.

A row is a dict with "prompt" (a chat: a list of messages, or raw text) and whatever
columns the reward asks for.
"""
