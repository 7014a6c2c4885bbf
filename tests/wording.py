"""What people read when something is refused or wrong: each text that a test saw, in tests/wording.json.

A test asserts the field that a message names, and hands the whole text to the fixture `wording`, which compares it with
the file. `pytest -n 0 --update-wording` writes the file anew, so that a message is reworded without touching a test:
the diff of the file shows what people will read.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "wording.json"
ROOT = str(FILE.parent.parent)


class Wording:
    """The messages of one test, in the order in which the test hands them over."""

    def __init__(self, test: str, folder: Path, compared: bool) -> None:
        """folder: temporary folder of the test, which the file calls TMP."""
        self.test, self.folder, self.compared = test, folder, compared
        self.texts: list[str] = []

    def __call__(self, text: str) -> None:
        """Compares the next message with the file. Raises AssertionError if they differ."""
        text = text.strip().replace(str(self.folder), "TMP").replace(ROOT, "ROOT")
        # A line of our own code moves whenever something above it changes.
        text = re.sub(r"(jaxrl_llm/[\w/]+\.py):\d+", r"\1:LINE", text)
        self.texts.append(re.sub(r"0x[0-9a-f]{6,}", "0x…", text))
        # Other versions of Python and of its libraries word their own part of a message differently.
        if self.compared and sys.version_info[:2] == (3, 11):
            stored = dict(enumerate(stored_texts().get(self.test, []))).get(len(self.texts) - 1)
            assert self.texts[-1] == stored, "pytest -n 0 --update-wording accepts a new wording"

    def write(self, stored: bool) -> None:
        """Replaces the messages of this test in the file, or removes them if they are not to be stored there."""
        of_tests = stored_texts() | {self.test: self.texts if stored else []}
        texts = {test: texts for test, texts in sorted(of_tests.items()) if texts}
        FILE.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")
        stored_texts.cache_clear()


@cache
def stored_texts() -> dict[str, list[str]]:
    return json.loads(FILE.read_text())
