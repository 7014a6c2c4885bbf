"""Smaller sizes for the prompts of a data set, so that one long prompt does not make every other one as long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.structs import SmallerSizes

# Shares of the prompts that smaller sizes hold. 99 % is for data with few long prompts: then many batches have none.
SHARES = (0.99, 0.9, 0.5)
# Each size compiles the whole model again. So a smaller size has at most this share of the tokens and patches of the
# next larger one, at least this many fewer, and there are few of them.
SMALLER, LEAST_SAVED, MOST_SIZES = 0.75, 32, 2


def smaller_sizes(tokens: Sequence[int], patches: Sequence[int]) -> SmallerSizes:
    """Returns sizes (P, N) that hold 99, 90 or 50 % of the prompts, if each is clearly smaller than the last.

    tokens, patches: numbers of each prompt.
    """
    last_size, sizes = (max(tokens), max(patches)), []
    for share in SHARES:
        size = tuple(int(np.quantile(x, share, method="inverted_cdf")) for x in (tokens, patches))
        # Tokens and patches are added up, because a patch costs about as much as a token.
        if sum(size) <= min(SMALLER * sum(last_size), sum(last_size) - LEAST_SAVED) and len(sizes) < MOST_SIZES:
            last_size = size
            sizes.append(size)
    return tuple(sizes)
