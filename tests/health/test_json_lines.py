"""The logs of a run are read and cut back, whatever a lost host has left in them."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from jaxrl_llm.health.json_lines import read, remove_after


def test_a_log_larger_than_the_memory_can_be_cut_back(tmp_path):
    line = json.dumps({"step": 1, "text": "x" * 1000}) + "\n"
    (tmp_path / "log").write_text(line * 20_000 + line.replace("1", "9", 1))
    tracemalloc.start()
    try:
        remove_after(tmp_path / "log", 3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "log").stat().st_size == len(line) * 20_000
    assert peak < 2**20


@pytest.mark.parametrize(
    "rest", [b"\0\0\0\0\n", b'{"step": 2, "te\n', b"7\n", b'{"text": 2}\n', b'{"step": null}\n', b"\xff\n"]
)
def test_a_line_that_cannot_be_read_is_left_out_and_counted(tmp_path, rest, capsys, wording):
    # A line ends at a newline alone.
    steps = [{"step": 0, "text": "a\u2028b\x85c"}, {"step": 1}]
    log, whole = tmp_path / "log", "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in steps).encode()
    log.write_bytes(whole + rest + b'{"step": 3}\n{"step": 7}\n')
    assert read(log) == [*steps, {"step": 3}, {"step": 7}]
    wording(capsys.readouterr().err)
    assert "line 3 " in remove_after(log, 5)
    assert log.read_bytes() == whole + b'{"step": 3}\n'  # a resumed run writes the later step again
    assert [*tmp_path.iterdir()] == [log]
    assert remove_after(log, 5) == remove_after(log, 0) == "" == remove_after(tmp_path / "none", 5)
    log.write_bytes(whole + rest.strip(b"\n"))  # a process that was killed in a line leaves this
    assert read(log) == steps
    assert remove_after(log, 5) == capsys.readouterr().err == "" and log.read_bytes() == whole
