"""Rewards: plain Python functions with TRL's signature, `fn(prompts, completions, **columns)`.

A function sees one entry for each completion: the prompt (chat or text, as in the data), the completion (for a chat,
a list with one assistant message), every other column of the row, and `completion_ids`. It returns as many numbers
(a list, an array, a generator), with None where it has no opinion. It may be `async def`.
docs/rewards.md says where functions run, and what `math.accuracy` accepts.
"""
