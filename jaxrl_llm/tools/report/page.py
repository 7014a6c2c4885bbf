"""Renders the page about runs from the templates in `assets/report/`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from plotly.offline import get_plotlyjs

import jaxrl_llm
from jaxrl_llm.session import changes
from jaxrl_llm.session.rollback import Rollbacks
from jaxrl_llm.tools.report import completions, curves, tables
from jaxrl_llm.tools.report.runs import FILES, Reader, ReportedRun, read_all
from jaxrl_llm.tools.report.templates import script_json, template

PLOTLY = "/plotly.js"  # path of plotly on the server


def render(workdirs: Sequence[Path], *, live: str = "", readers: dict[Path, Reader] | None = None) -> str:
    """Returns the page about runs.

    live: state of the runs' files (`stamp`) for a page of the server, "" for a page in a file; readers: readers of the
    last page, None for the first one. A page in a file contains plotly. A page of the server loads plotly once.
    Raises: UserError, if a folder is no run or has no record yet.
    """
    runs = read_all(workdirs, readers)
    plots = curves.plots(runs)
    text = template("page.html").render(
        runs=runs,
        title=", ".join(run.name for run in runs),
        cards=[card(run) for run in runs],
        plots=plots,
        figures=script_json("[" + ",".join(plot.figure for plot in plots) + "]"),
        thinned=curves.thinned(runs),
        batch=tables.batch_table(runs),
        difference=tables.config_difference(runs),
        phases=tables.phase_table(runs),
        partings=tables.partings(runs),
        completions=[completions.groups(run) for run in runs],
        # The server gives plotly an address of its own, so that a browser caches these megabytes.
        plotly="" if live else get_plotlyjs(),
        plotly_url=PLOTLY,
        live=live,
        version=jaxrl_llm.__version__,
        made=_time(datetime.now(UTC).timestamp()),
    )
    # Surrogates are replaced, because Python uses them for names of folders that are not in the locale's encoding.
    return text.encode(errors="surrogateescape").decode(errors="replace")


def render_waiting(message: str, live: str) -> str:
    """Returns the page of the server while no run can be shown. message: the reason."""
    return template("waiting.html").render(message=message, live=live)


def stamp(workdirs: Sequence[Path]) -> str:
    """Returns a text that changes with the runs' files."""
    files = [folder / name for folder in workdirs for name in FILES]
    states = [file.stat() if file.is_file() else None for file in files]
    # The size counts too, because two writes within a tick of the file system have the same time.
    texts = ["0" if state is None else f"{state.st_mtime_ns:x}.{state.st_size:x}" for state in states]
    return "-".join(texts)


def card(run: ReportedRun) -> list[tuple[str, str]]:
    """Returns the rows (label, text) about a run in the header of the page."""
    metrics = {"eval/accuracy": "last accuracy", "reward/mean": "last reward", "loss/sft": "last loss"}
    rows = [("last step", f"{run.last:,} of {run.config.num_steps:,}")]
    for metric, label in metrics.items():
        if latest := run.latest(metric):
            step, value = latest
            text = f"{value:.1%}" if metric == "eval/accuracy" else f"{value:.4g}"
            rows.append((label, text if step == run.last else f"{text} (step {step:,})"))
    # Steps are negative, so that the first of equal accuracies is the best.
    accuracies = [(r["eval/accuracy"], -r["step"]) for r in run.records if r.get("eval/accuracy") is not None]
    if len(accuracies) > 1:
        best, step = max(accuracies)
        rows.append(("best accuracy", f"{best:.1%} (step {-step:,})"))
    for rollback in Rollbacks(run.workdir).read():
        rows.append((f"step {rollback.step:,}", f"rolled back to step {rollback.to:,}: {rollback.finding['id']}"))
    rows += [(f"step {change.after_step:,}", f"accepted: {change}") for change in changes.read(run.workdir)]
    rows += [("left out", f"{count:,} damaged lines of {name}") for name, count in run.damaged.items()]
    return [*rows, ("last record", _time((run.workdir / FILES[1]).stat().st_mtime))]


def _time(seconds: float) -> str:
    """Returns a time, in seconds since 1970, as text."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
