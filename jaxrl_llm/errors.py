"""The one exception for what a person can put right; everything else is a bug."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """Wrong config, data, checkpoint or reward: one line that names it and the remedy."""


def run_main(main: Callable[[], None]) -> NoReturn:
    """Runs an entry point; a `UserError` becomes one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
