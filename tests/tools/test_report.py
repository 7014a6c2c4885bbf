"""`jaxrl report`: the page about runs, and the server that follows them."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
import urllib.request
from functools import partial
from html import unescape
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError

import numpy as np
import pytest
from test_health import FAULTS, ids, run

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load
from jaxrl_llm.errors import UserError
from jaxrl_llm.health import rules
from jaxrl_llm.health.bands import Band, make_bands
from jaxrl_llm.health.json_lines import remove_after
from jaxrl_llm.tools.report import __main__ as report
from jaxrl_llm.tools.report import axis, curves, page, tables, thinning, traces
from jaxrl_llm.tools.report.runs import read_all
from jaxrl_llm.tools.report.serve import PageServer

ROOT = Path(__file__).parents[2]
SICK = run(**FAULTS["entropy_explosion"])
TIMES = {"time/rollout": 1.0, "time/update": 3.0, "time/step": 4.0, "tokens_per_second": 100.0}
GROUP = {"step": 5, "prompt": [{"role": "user", "content": "1+1"}], "completions": ["2", "3"], "rewards": [1.0, 0.0]}


def write(folder: Path, records: list[dict], completions: list[dict] | None = None, **fields: object) -> Path:
    """Writes a workdir as a run does."""
    folder.mkdir(exist_ok=True)
    config = load(ROOT / "configs" / "grpo.py")
    config.update_from_flattened_dict({"num_steps": 40} | {k.replace("__", "."): x for k, x in fields.items()})
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "completions.jsonl").write_text("".join(json.dumps(x) + "\n" for x in completions or [GROUP]))
    return folder


def figures(text: str) -> dict[str, dict]:
    """The figures of a page by their titles."""
    titles = re.findall(r"<figure>\s*<h3>(.*?)</h3>", text)
    (drawn,) = re.findall(r'id="figures">(.*?)</script>', text)
    return dict(zip(map(unescape, titles), json.loads(drawn), strict=True))


def roles(figure: dict, role: str, run: int = 0) -> list[dict]:
    return [trace for trace in figure["data"] if trace["meta"] == {"run": run, "role": role}]


def numbers(array: dict) -> list[float]:
    return np.frombuffer(base64.b64decode(array["bdata"]), array["dtype"]).tolist()


@pytest.fixture(scope="module")
def sick_page(tmp_path_factory) -> str:
    """The page of a run with a finding, which went back."""
    workdir = write(tmp_path_factory.mktemp("sick") / "run", SICK)
    (workdir / "rollbacks").mkdir()
    decision = {"step": 27, "to": 10, "finding": {"id": "entropy_explosion"}}
    (workdir / "rollbacks" / "1.json").write_text(json.dumps(decision))
    return page.render([workdir])


@pytest.fixture(scope="module")
def healthy_page(tmp_path_factory) -> str:
    return page.render([write(tmp_path_factory.mktemp("healthy") / "run", run())])


def test_a_page_holds_all_it_needs_and_a_browser_may_load_nothing(sick_page):
    (plotly,) = re.findall(r'<script id="plotly">(.*?)</script>', sick_page, re.DOTALL)
    assert "Plotly" in plotly
    ours = sick_page.replace(plotly, "")
    assert "http://" not in ours and "https://" not in ours
    assert set(re.findall(r'\b(?:src|href)="([^#"]*)"', ours)) <= {"data:,", ""}
    assert "default-src 'none'" in ours and "'self'" not in ours


def test_a_finding_is_told_and_marked_at_its_steps_as_is_a_rollback(sick_page, wording):
    card = sick_page[sick_page.index('<article class="card error">') :].split("</article>")[0]
    assert "entropy_explosion" in card
    assert re.search(r"<code>jaxrl replay --run \S+ --step 27 ", sick_page)
    wording(re.search(r"<dt>step 27</dt>\s*<dd>([^<]*)", sick_page)[1])
    marked = {title: roles(figure, "mark") for title, figure in figures(sick_page).items()}
    down, bar = marked.pop("Entropy")
    assert down["x"] == [27, 27] and bar["x"] == [27, 40] and bar["text"] == ["entropy_explosion", ""]
    assert not any(marked.values())


def test_a_healthy_run_is_called_healthy_only_after_the_first_steps(healthy_page, tmp_path):
    assert '<article class="card healthy">' in healthy_page and " 40 records" in healthy_page
    assert not any(roles(figure, "mark") for figure in figures(healthy_page).values())
    assert "card healthy" not in page.render([write(tmp_path, run()[:12])])


def test_what_the_settings_say_and_what_only_the_run_itself_found_is_told(tmp_path):
    folder = write(tmp_path, run(), optim__learning_rate=3e-3)
    (folder / "health.jsonl").write_text('{"step": 3, "id": "an_old_rule"}\n{"step": 4, "id": "to')
    text = page.render([folder])
    assert "optim.learning_rate = 0.003 is 0.0004 or more" in text
    assert "health.jsonl also has an_old_rule, which" in text


def test_a_run_with_another_name_or_without_its_reward_functions_is_shown(tmp_path):
    folder = write(tmp_path / "r\udcc3\udcbcn", run(), reward__functions=("lab.x",), reward__weights=(1.0,))
    assert "<title>rün" in page.render([folder])
    (read,) = read_all([folder])
    assert read.settings.sizes is None and "'lab.x'" in read.settings.problem and len(read.settings.problem) < 260


def test_runs_are_compared_in_one_page(tmp_path):
    one = write(tmp_path / "one", [r | TIMES for r in run()])
    other = write(tmp_path / "other", [r | TIMES for r in SICK], optim__learning_rate=3e-3)
    runs = read_all([one, other])
    assert tables.config_difference(runs) == [("optim.learning_rate", ["0.0001", "0.003"], ())]
    (parting,) = tables.partings(runs)
    assert parting.words == "A and B part at step 2, in entropy; the record before is equal."
    again = tables.parting(runs[0], runs[0])
    assert again.words == "A and A have the same numbers at all 40 steps that both logged."
    sizes = recipes.read(runs[0].config).sizes
    batch = {row.name: row.values for row in tables.batch_table(runs)}
    assert batch["sequences per step"] == [f"{sizes.sequences_per_step}"] * 2 and batch["group_size"] == ["8", "8"]
    phases = {row.name: row for row in tables.phase_table(runs)}
    assert phases["update"].values == ["3.00 s (75%)"] * 2 and phases["update"].shares == [0.75] * 2
    text = page.render([one, other])
    assert all(len(roles(figure, "mean", at)) >= 1 for figure in figures(text).values() for at in (0, 1))
    assert roles(figures(text)["Entropy"], "mark", 1)[1]["text"][0] == "B entropy_explosion"
    assert not roles(figures(text)["Entropy"], "mark", 0)


def test_the_best_and_the_worst_completion_of_three_steps_are_there_and_escaped(tmp_path):
    evil = "</pre></script><script>alert(1)</script>"
    groups = [GROUP | {"step": step, "completions": [f"good {step}", f"bad {step} {evil}"]} for step in range(5, 30, 5)]
    text = page.render([write(tmp_path, run(), groups)])
    assert evil not in text and unescape(text).count(evil) == 3
    shown = [f"good {step}" in text and f"bad {step} " in text for step in range(5, 30, 5)]
    assert shown == [True, False, True, False, True]


def test_completions_without_a_verdict_are_left_out_of_best_worst_and_mean(tmp_path):
    graded = {5: [0.25, None, 0.75], 10: [None] * 3, 15: [0.5] * 3}
    texts = ["low", "unjudged", "high"], ["a"] * 3, ["b"] * 3
    groups = [
        GROUP | {"step": step, "completions": said, "rewards": rewards}
        for (step, rewards), said in zip(graded.items(), texts, strict=True)
    ]
    text = page.render([write(tmp_path, run(), groups)])
    assert "mean reward 0.5 of 3 completions, 1 without a verdict" in text
    assert "best, reward 0.75" in text and "worst, reward 0.25" in text and "unjudged" not in text
    assert "3 completions, 3 without a verdict" in text and "one of them: no verdict" in text
    assert "one of them: all have reward 0.5" in text


def test_a_run_that_goes_on_is_shown_and_values_that_are_not_finite_are_crosses(tmp_path):
    records = [r | {"grad_norm": None if 20 <= r["step"] < 23 else r["grad_norm"]} for r in run()[:30]]
    folder = write(tmp_path, records)
    for name in ("metrics", "completions", "health"):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 31, "rew')  # a line that is being written
    text = page.render([folder])
    assert "30 of 40" in text
    (cross,) = roles(figures(text)["Gradient norm"], "cross")
    assert numbers(cross["x"]) == [20, 21, 22]
    (raw,) = roles(figures(text)["Gradient norm"], "raw")
    assert [step for step, y in zip(numbers(raw["x"]), numbers(raw["y"]), strict=True) if np.isnan(y)] == [20, 21, 22]
    assert "3 values of grad_norm are not finite" in text


def test_a_run_with_only_its_first_evaluation_is_shown(tmp_path):
    text = page.render([write(tmp_path, [{"step": 0, "eval/accuracy": 0.11}])])
    assert list(figures(text)) == ["Accuracy on held-out problems"] and "11.0%" in text


@pytest.mark.parametrize(("values", "low"), [([0.0, 0.0], -0.05), ([3.0, 3.0], None), ([-1.0, -1.0], None)])
def test_the_axis_of_a_share_that_is_always_0_begins_at_0(values, low):
    made = axis.fit([np.array(values)], [], 0, log=False)
    assert made.low < values[0] < made.high
    assert low is None or made.low == pytest.approx(low)


def test_a_thinned_curve_keeps_its_peaks_and_its_ends():
    x, y = np.arange(10_001), np.sin(np.arange(10_001) / 500)
    y[[1234, 9876]] = 50.0, -50.0
    y[4000:4020] = np.nan
    few_x, few_y = thinning.thin(x, y)
    assert len(few_x) <= 2000 and {1234, 9876} <= set(few_x.tolist()) and np.isnan(few_y).any()
    assert (np.diff(few_x) > 0).all() and few_x[0] < 11 and few_x[-1] > 9989
    assert (few_y[~np.isnan(few_y)] == y[few_x][~np.isnan(few_y)]).all()


def test_a_long_run_says_that_its_curves_are_thinned(healthy_page, tmp_path, monkeypatch):
    folder = write(tmp_path, run())
    assert "thinned" not in healthy_page
    monkeypatch.setattr(curves, "part", partial(thinning.part, limit=28))  # as many records as 40 / 14 make two points
    monkeypatch.setattr(traces, "thin", lambda x, y, limit=28: thinning.thin(x, y, min(limit, 28)))
    text = page.render([folder])
    assert "of every 3 values" in text
    (raw,) = roles(figures(text)["Entropy"], "raw")
    assert len(numbers(raw["x"])) <= 28


BANDS = [
    (band.metric, band.rule, side)
    for band in make_bands(run())
    for side in ("low", "high")
    if getattr(band, side) is not None
]


def moved(metric: str, rule: str, side: str, share: float) -> tuple[bool, Band]:
    """Whether a rule fires if the last 8 values are just inside (share < 0) or outside of a band, and the band."""
    name = metric.replace("/", "__")
    starts = {
        "reward/mean": 0.9,
        "completion/length": 40.0,
        "critic/explained_variance": -0.05,
    }  # a critic gets no better
    start = starts.get(metric, run()[0][metric])
    faults = FAULTS.get(rule, {}) | {"reward__std": FAULTS.get(rule, {}).get("reward__std", 0.3)}
    records = run(**faults | {name: start})
    (band,) = (
        band
        for band in make_bands(records)
        if (band.metric, band.rule) == (metric, rule) and getattr(band, side) is not None
    )
    bound = float(np.atleast_1d(getattr(band, side))[-1])
    far = share * (abs(bound) or 1.0) * (1 if side == "high" else -1)
    last = [record | {metric: bound + far} for record in records[-8:]]
    return rule in ids(*records[:-8], *last), band


@pytest.mark.parametrize(("metric", "rule", "side"), BANDS)
def test_a_band_ends_where_its_rule_fires(metric, rule, side):
    assert not moved(metric, rule, side, -0.01)[0]
    assert moved(metric, rule, side, 0.01)[0]


def test_every_band_is_of_a_plot_and_is_drawn_with_its_words(healthy_page):
    text = unescape(healthy_page)
    for band in make_bands(run()):
        assert text.count(f"Healthy: {band.description} ({band.rule})") == 1
    _, high = roles(figures(healthy_page)["Groups without a signal"], "band")
    assert numbers(high["y"]) == pytest.approx([0.8, 0.8]) and high["fill"] == "tonexty"


def get(server: PageServer, path: str, host: str = "") -> str:
    request = urllib.request.Request(f"http://{server.address}{path}", headers={"Host": host or server.address})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


def test_the_server_shows_new_steps_and_answers_only_this_machine(tmp_path):
    folder = write(tmp_path, [])
    with PageServer([folder]) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert "has no record yet" in get(server, "/")
        write(folder, run()[:20])
        first = get(server, "/")
        assert "20 of 40" in first and f'const stamp = "{get(server, "/stamp")}"' in first
        write(folder, run())
        assert get(server, "/stamp") not in first and "40 of 40" in get(server, "/")
        assert "Plotly" in get(server, "/plotly.js") and 'src="/plotly.js"' in first
        for path, host, code in (("/config.json", "", 404), ("/", "other.example:80", 403)):
            with pytest.raises(HTTPError, match=str(code)):
                get(server, path, host)
        assert server.socket.getsockname()[0] == "127.0.0.1"
        with pytest.raises(UserError, match="the port cannot be used"):
            PageServer([folder], server.server_port)
        server.shutdown()


def test_lines_that_cannot_be_read_are_left_out_and_counted(tmp_path, monkeypatch, capsys, wording):
    folder = write(tmp_path, run())
    groups = [json.dumps(GROUP | {"step": step, "completions": [f"text {step}", "x"]}) for step in range(1, 6)]
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    for name, lines in {"metrics": metrics, "completions": groups[:-1]}.items():
        (folder / f"{name}.jsonl").write_text("\n".join([*lines[:2], "\0{]", *lines[2:], "{]", ""]))
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    report.main()
    *told, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"{folder / 'report.html'} (")
    text = (folder / "report.html").read_text()
    assert "40 of 40" in text and "text 1" in text and "text 4" in text
    assert "2 damaged lines of metrics.jsonl" in text and "2 damaged lines of completions.jsonl" in text
    wording("\n".join(told))


def test_a_served_page_judges_each_record_once_and_a_run_that_goes_back_anew(tmp_path, monkeypatch):
    judged = []
    findings = rules.findings
    monkeypatch.setattr(rules, "findings", lambda *of: judged.append(1) or findings(*of))
    records, groups = SICK, [GROUP | {"step": step, "completions": [f"text {step}", "x"]} for step in range(1, 40)]
    folder, readers = write(tmp_path, []), {}
    for count in (10, 25, len(records)):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records[len(judged) : count]) + '{"torn')
        (folder / "completions.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups[:count]))
        text = page.render([folder], readers=readers)
        assert len(judged) == count
        lines = (folder / "metrics.jsonl").read_text().removesuffix('{"torn')
        os.truncate(folder / "metrics.jsonl", len(lines))
    made = lambda text: re.sub(r"UTC|\d\d:\d\d:\d\d", "", text)  # noqa: E731
    assert made(text) == made(page.render([folder]))
    judged.clear()
    remove_after(folder / "metrics.jsonl", 15)
    remove_after(folder / "completions.jsonl", 5)
    assert "15 of 40" in (text := page.render([folder], readers=readers)) and len(judged) == 15
    assert "text 3" in text and "text 20" not in text
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no record yet"):
        page.render([folder], readers=readers)


def test_a_page_that_cannot_be_made_is_one_line_and_the_server_lives_on(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path, run())
    with PageServer([folder]) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        (folder / "completions.jsonl").write_text('{"step": 1}\n')
        assert "the page cannot be made: KeyError" in unescape(get(server, "/"))
        (folder / "completions.jsonl").write_text(json.dumps(GROUP) + "\n")
        assert "40 of 40" in get(server, "/")
        monkeypatch.setattr(PageServer, "stamp", lambda self: 1 / 0)
        with pytest.raises((HTTPException, OSError)):
            get(server, "/stamp")
        server.shutdown()
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 2 and "KeyError" in said and "ZeroDivisionError" in said


def test_ctrl_c_ends_the_server_in_a_line(tmp_path, monkeypatch, capsys):
    def interrupt(server: PageServer) -> None:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PageServer, "serve_forever", interrupt)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # as the package leaves it
    monkeypatch.setattr(sys, "argv", ["report", str(write(tmp_path, [])), "--serve"])
    report.main()
    signal.signal(signal.SIGINT, before)
    address, *end = capsys.readouterr().out.splitlines()
    assert re.match(r"http://127\.0\.0\.1:\d+ ", address) and end == ["", "ended by Ctrl-C"]


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("nowhere", ["{tmp}/nowhere"]),
        ("nowhere", ["{tmp}/nowhere", "--serve"]),
        ("empty", ["{tmp}/empty"]),
        ("metrics.jsonl", ["{tmp}/broken"]),
        ("page.html", ["{tmp}/good", "--to", "{tmp}/no/page.html"]),
        ("--serve 70000", ["{tmp}/good", "--serve", "70000"]),
        ("--to", ["{tmp}/good", "--to", "x", "--serve"]),
    ],
)
def test_what_it_cannot_show_is_an_error_in_a_line(named, arguments, tmp_path, monkeypatch, refused):
    write(tmp_path / "good", run())
    write(tmp_path / "empty", [])
    (write(tmp_path / "broken", run()) / "metrics.jsonl").write_text("{]\n")
    monkeypatch.setattr(sys, "argv", ["report", *(x.format(tmp=tmp_path) for x in arguments)])
    with refused(named):
        report.main()
    assert not [*tmp_path.rglob("*.html")]
