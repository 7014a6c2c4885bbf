"""Renders the page from the template in `assets/report/`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import jinja2
from plotly.offline import get_plotlyjs

import jaxrl_llm
from jaxrl_llm.session import changes
from jaxrl_llm.session.rollback import Rollbacks
from jaxrl_llm.tools.report import completions, curves, tables
from jaxrl_llm.tools.report.runs import FILES, Reader, ReportedRun, read_all

ASSETS = Path(jaxrl_llm.__file__).parent / "assets" / "report"
PLOTLY = "/plotly.js"  # where the server has it


def render(workdirs: Sequence[Path], *, live: str = "", readers: dict[Path, Reader] | None = None) -> str:
    """Returns the page about runs.

    live: state of the files (`stamp`), for a page that a server gives, else "". readers: readers of the page before.

    A page from a file holds all it needs. A page from the server loads plotly from there, once.
    Raises: UserError, if a folder is no run or has no record yet.
    """
    runs = read_all(workdirs, readers)
    plots = curves.plots(runs)
    text = template("page.html").render(
        runs=runs,
        title=", ".join(run.name for run in runs),
        cards=[card(run) for run in runs],
        plots=plots,
        figures=_script_json("[" + ",".join(plot.figure for plot in plots) + "]"),
        thinned=curves.thinned(runs),
        batch=tables.batch_table(runs),
        difference=tables.config_difference(runs),
        phases=tables.phase_table(runs),
        partings=tables.partings(runs),
        completions=[completions.groups(run) for run in runs],
        # Some MB, which would be sent again with each change; from an address of its own a browser keeps them.
        plotly="" if live else get_plotlyjs(),
        plotly_url=PLOTLY,
        live=live,
        version=jaxrl_llm.__version__,
        made=_time(datetime.now(UTC).timestamp()),
    )
    # Where the locale is not UTF-8, Python reads a folder's name as surrogates, which no page may hold.
    return text.encode(errors="surrogateescape").decode(errors="replace")


def render_waiting(message: str, live: str) -> str:
    """Returns the page that a server gives while there is nothing to show, and says why."""
    return template("waiting.html").render(message=message, live=live)


def stamp(workdirs: Sequence[Path]) -> str:
    """Returns the state of the runs' files, which is another one when they have changed."""
    states = [(file.stat() if file.is_file() else None) for folder in workdirs for file in map(folder.joinpath, FILES)]
    # Time and size: a file system may give two writes within a tick the same time.
    return "-".join("0" if x is None else f"{x.st_mtime_ns:x}.{x.st_size:x}" for x in states)


def card(run: ReportedRun) -> list[tuple[str, str]]:
    """Returns what the header tells of a run besides its verdict."""
    metrics = {"eval/accuracy": "last accuracy", "reward/mean": "last reward", "loss/sft": "last loss"}
    rows = [("last step", f"{run.last:,} of {run.config.num_steps:,}")]
    for metric, label in metrics.items():
        if latest := run.latest(metric):
            step, value = latest
            text = f"{value:.1%}" if metric == "eval/accuracy" else f"{value:.4g}"
            rows.append((label, text if step == run.last else f"{text} (step {step:,})"))
    # Minus the step: of equal accuracies the first one is the best.
    accuracies = [(r["eval/accuracy"], -r["step"]) for r in run.records if r.get("eval/accuracy") is not None]
    if len(accuracies) > 1:
        best, step = max(accuracies)
        rows.append(("best accuracy", f"{best:.1%} (step {-step:,})"))
    for back in Rollbacks(run.workdir).read():
        rows.append((f"step {back.step:,}", f"went back to step {back.to:,}: {back.finding['id']}"))
    rows += [(f"step {change.after_step:,}", f"accepted: {change}") for change in changes.read(run.workdir)]
    return [*rows, ("last record", _time((run.workdir / FILES[1]).stat().st_mtime))]


def template(name: str) -> jinja2.Template:
    """Returns a template of `assets/report/`."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        # Prompts and completions may hold HTML.
        autoescape=True,
        # A wrong name in a template is an error, and not an empty place on the page.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)


def _script_json(text: str) -> str:
    """Escapes JSON for a <script> element."""
    # Text of a policy may hold "</script>", which would end the element.
    return text.replace("<", "\\u003c")


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
