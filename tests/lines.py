"""Records which lines of the package each test runs, for tests/mutants.py. It needs Python 3.12 or newer.

    LINES_FOLDER=FOLDER PYTHONPATH=tests pytest -p lines

FOLDER gets a file for each test, with its name, its seconds and the lines that its process ran. Each process that the
test started has a file beside it, and writes line by line, because many of them are killed.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any

FOLDER = Path(os.environ["LINES_FOLDER"])
TOOL, EVENTS = sys.monitoring.COVERAGE_ID, sys.monitoring.events
tests, seen, outputs = os.getpid(), set[str](), dict[int, int]()


def on_start(code: CodeType, offset: int) -> Any:
    if "/jaxrl_llm/" in code.co_filename and "site-packages" not in code.co_filename:
        sys.monitoring.set_local_events(TOOL, code, EVENTS.LINE)
    return sys.monitoring.DISABLE


def on_line(code: CodeType, line: int) -> None:
    place = f"jaxrl_llm/{code.co_filename.rpartition('/jaxrl_llm/')[2]}:{line}"
    if place not in seen:
        seen.add(place)
        if os.getpid() != tests:
            if os.getpid() not in outputs:
                path = FOLDER / f"{os.environ['LINES_OF']}.{os.getpid()}"
                outputs[os.getpid()] = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.write(outputs[os.getpid()], f"{place}\n".encode())


def start() -> None:
    sys.monitoring.use_tool_id(TOOL, "lines")
    sys.monitoring.register_callback(TOOL, EVENTS.PY_START, on_start)
    sys.monitoring.register_callback(TOOL, EVENTS.LINE, on_line)
    sys.monitoring.set_events(TOOL, EVENTS.PY_START)
    atexit.register(sys.monitoring.set_events, TOOL, 0)


if "LINES_OF" in os.environ:  # in a process that a test has started
    tests = 0
    start()
else:
    import pytest

    number = count()

    def pytest_configure() -> None:
        site = FOLDER / "site"  # every Python that a test starts imports sitecustomize
        site.mkdir(parents=True, exist_ok=True)
        (site / "sitecustomize.py").write_text(Path(__file__).read_text())
        os.environ["PYTHONPATH"] = f"{site}:{os.environ['PYTHONPATH']}"
        start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
        seen.clear()
        name, began = f"{os.getpid()}-{next(number)}", time.perf_counter()
        os.environ["LINES_OF"] = name
        result = yield
        del os.environ["LINES_OF"]
        record = {"test": item.nodeid, "seconds": time.perf_counter() - began, "lines": sorted(seen)}
        (FOLDER / f"{name}.json").write_text(json.dumps(record))
        return result
