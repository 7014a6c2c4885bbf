"""Updates that were skipped, for a gradient that is not finite or without a trained token: too many end the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Array, TrainState

IN_A_ROW = "updates/skipped_in_a_row"


def skipped(state: TrainState) -> dict[str, Array]:
    """Metrics, still on the device: updates skipped so far, and in a row. They outlive the state, which is donated."""
    return {"updates/skipped": state.opt_state.total_notfinite + 0, IN_A_ROW: state.opt_state.notfinite_count + 0}


def check_skipped(step: int, record: dict[str, Any], *, most: int, latest: Callable[[], Path | None]) -> None:
    """Raises: UserError, if a step's record says that `most` updates in a row were skipped (0: any number may be).

    latest() -> the newest checkpoint, if there is one.
    """
    count = max(int(x) for name, x in record.items() if name.endswith(IN_A_ROW))
    if not most or count < most:
        return
    names = sorted(name for name, x in record.items() if not math.isfinite(x) and not name.endswith(("_min", "_max")))
    last = f"the last checkpoint is {folder}" if (folder := latest()) else "there is no checkpoint"
    why = f"their gradients are not finite ({', '.join(names[:5])})" if names else "no token in them is trained"
    lower = "a lower optim.learning_rate or with model.dtype = 'float32'"
    longer = "other limits: config.mask and rollout.max_completion_tokens decide which tokens are trained"
    raise UserError(
        f"step {step}: {count} updates in a row were skipped, because {why}, and the model stands still; {last}: begin "
        f"a new run with {lower if names else longer}, or raise config.health.max_skipped (0: never stop)"
    )
