"""What models and data write reaches a terminal, and a pipe or log that a terminal shows later, as text alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import log_of

from jaxrl_llm.config.load import load
from jaxrl_llm.errors import UserError, printable, run_main, summarize_error
from jaxrl_llm.health.doctor import print_findings
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.health.judge import FindingSpan
from jaxrl_llm.session.banner import print_banner

ATTACKS = {
    "\x1b]52;c;cm0gLXJm\x07": r"\x1b]52;c;cm0gLXJm\x07",  # the clipboard
    "\x1b]0;title\x1b\\": r"\x1b]0;title\x1b" + "\\",
    "\x1b[2J": r"\x1b[2J",  # clears the screen
    "\x9b2J\x9d52;c;eA==\x9c": r"\x9b2J\x9d52;c;eA==\x9c",  # the same by C1
    "a\rb\x08c\x7f": r"a\rb\x08c\x7f",
    "\u202egnp.exe\u2066x\u2069": r"\u202egnp.exe\u2066x\u2069",  # another order of the letters
    "\u2028\ud800": r"\u2028\ud800",
}


def test_what_cannot_be_seen_is_an_escape_and_the_rest_stays():
    assert {text: printable(text) for text in ATTACKS} == ATTACKS
    plain = "x² = 四\u3000年\u00a0é\n\tπ 🙂"
    assert printable(plain) == plain


def test_a_line_of_the_console_has_no_blanks_at_its_end(tmp_path, capsys):
    log = log_of(tmp_path, load(Path(__file__).parents[2] / "configs" / "grpo.py"))
    log._start_step, log._start_time = 0, 0.0
    for step in (0, 1):
        log.print_line(log._step_line(step, {"step": step, "eval/accuracy": 0.11}))
    before, after = capsys.readouterr().out.splitlines()
    assert before == "step   0/100  accuracy 11.0%"
    assert after.startswith("step   1/100  accuracy 11.0%  left ")


def spoken(capsys: pytest.CaptureFixture[str], attack: str, tmp_path: Path) -> dict[str, str]:
    """Returns what each way to the terminal prints of a text."""
    log = log_of(tmp_path, load(Path(__file__).parents[2] / "configs" / "grpo.py"))
    log._files["completions"] = (tmp_path / "completions.jsonl").open("w", encoding="utf-8")
    prompts = SimpleNamespace(rows=[{"prompt": f"a{attack}"}], images=None)
    turns = [[{"role": "assistant", "content": f"t{attack}"}]]
    finding = Finding("error", f"f{attack}", "why", "fix", id="x")
    said: dict[str, str] = {}

    def keep(name: str) -> None:
        said[name] = "".join(capsys.readouterr())

    for name, of_turns in (("texts", []), ("turns", [turns])):
        graded = SimpleNamespace(texts=[[f"c{attack}"]], turns=of_turns)
        log._write_sample(1, SimpleNamespace(prompts=prompts, wait_for_grades=lambda g=graded: g), np.ones((1, 1)))  # pyright: ignore[reportArgumentType]
        keep(name)
    log.show_finding(1, finding)
    keep("finding")
    print_findings([FindingSpan(finding, 1, 1, 1)], [{"step": 1}])
    keep("doctor")
    print_banner(f"title{attack}", [(f"name{attack}", f"value{attack}")], lines=[f"line{attack}"])
    keep("banner")
    for error in (UserError(f"row {attack}"), ValueError(f"row {attack}")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(SystemExit):
            run_main(fail)
        keep(type(error).__name__)
    said["briefly"] = summarize_error(ValueError(attack))
    return said


def test_no_way_to_the_terminal_lets_a_completion_a_prompt_or_a_row_control_it(capsys, tmp_path):
    control = {c for attack in ATTACKS for c in attack if not c.isprintable() and c != "\ud800"}
    log_safe = "".join(ATTACKS).replace("\ud800", "")  # no file of UTF-8 holds that one
    for name, text in spoken(capsys, log_safe, tmp_path).items():
        assert "52;c" in text, name
        assert not set(text) & control, (name, text)
