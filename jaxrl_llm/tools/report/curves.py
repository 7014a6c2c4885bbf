"""Curves of runs as plotly figures, with the healthy bands of the rules and marks of findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from jaxrl_llm.config.load import flatten
from jaxrl_llm.data.settings import accuracies_of
from jaxrl_llm.health.bands import Band, make_bands
from jaxrl_llm.health.finding import channel_metrics
from jaxrl_llm.tools.report import traces
from jaxrl_llm.tools.report.axis import Axis, fit
from jaxrl_llm.tools.report.runs import ReportedRun
from jaxrl_llm.tools.report.thinning import part
from jaxrl_llm.tools.report.traces import Curve

# Dash styles that distinguish the metrics of a plot with several metrics.
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


class Panel(NamedTuple):
    """Settings of a plot: its metrics, and the health rules that read them."""

    title: str
    metrics: tuple[str, ...]  # () if the runs decide which metrics the plot has
    rules: tuple[str, ...] = ()
    form: str = ".3~g"  # d3 format of its values
    log: bool = False  # whether its axis may be logarithmic
    plain: bool = False  # whether only points are drawn, without a mean over steps


HELD_OUT = "Accuracy on held-out problems"
# The plots of the page in their order. Each has a title, metrics of metrics.jsonl, and rules that read these metrics.
PANELS = (
    Panel(HELD_OUT, (), form=".1%", plain=True),  # its metrics are those of the evaluation sets
    Panel("Reward", ("reward/mean",), ("reward_collapse",)),
    Panel("Reward functions", (), ("channels_diverge",)),  # its metrics are those of the runs
    Panel("Completions without a verdict", ("reward/no_verdict",), ("no_verdict",), ".0%"),
    Panel("Groups without a signal", ("groups/no_signal",), ("no_signal",), ".0%"),
    Panel("Loss", ("loss/sft",)),
    Panel("Reward of the chosen completion minus that of the rejected", ("reward/margin",)),
    Panel("Pairs whose chosen completion has the larger reward", ("reward/accuracy",), form=".1%"),
    Panel("Entropy", ("entropy",), ("entropy_collapse", "entropy_explosion"), log=True),
    Panel("KL to the reference", ("kl/ref",), ("kl_alone",), log=True),
    Panel("KL term in the reward", ("reward/kl",), ("kl_pays",)),
    Panel("Gradient norm", ("grad_norm",), ("gradient_climb", "gradient_spike", "updates_skipped"), log=True),
    Panel("Clipped tokens", ("clip/fraction",), ("gradient_climb",), ".1%"),
    Panel("Clipped tokens in the first optimizer step on a rollout", ("clip/first",), ("phantom_clipping",), ".1%"),
    Panel("Log-probability of a token in good completions", ("logprobs/good",), ("good_fades",)),
    Panel("Tokens that repeat", ("completion/repeated",), ("repeats",), ".0%"),
    Panel("Completion length in tokens", ("completion/length",), ("length_collapse",)),
    Panel("Truncated completions", ("completion/truncated",), ("truncated", "never_stops"), ".0%"),
    Panel("Turns of an episode", ("episode/turns",), ("tools_unused",), ".2f"),
    Panel("Errors of environments in an episode", ("episode/errors",), ("tool_down", "tool_errors"), ".2f"),
    Panel("Seconds that an episode waits for its environment", ("time/environment",), log=True),
    Panel("Importance weight, mean", ("importance/mean",), ("sampler_mismatch", "stale_samples")),
    Panel("Effective sample size", ("importance/ess",), ("sampler_mismatch",), ".1%"),
    Panel("KL(sampler || trainer)", ("importance/kl",), ("sampler_mismatch",), ".1e", log=True),
    Panel(
        "Gap of sampler and trainer",
        ("sampler/gap_mean", "sampler/gap_max"),
        ("engine_drift", "stale_weights"),
        ".1e",
        log=True,
    ),
    Panel("Learning rate", ("learning_rate", "critic/learning_rate"), form=".2~g", plain=True),
    Panel("Explained variance of the critic", ("critic/explained_variance",), ("critic_lags",)),
    Panel("Seconds of a step", ("time/step",), log=True),
)


class Plot(NamedTuple):
    """A figure and its text."""

    title: str
    words: list[str]  # lines below the figure: one for each band of healthy values, and for what is not drawn
    lines: list[tuple[str, str]]  # dash style and name of each metric; [] if the plot has one metric
    figure: str  # figure of plotly as JSON


def plots(runs: Sequence[ReportedRun]) -> list[Plot]:
    """Returns the plots that the runs have values for."""
    bands_of_runs = [make_bands(run.records) for run in runs]
    drawn_plots = []
    for panel in PANELS:
        if not panel.metrics:  # the runs decide which evaluation sets or reward functions the plot shows
            metrics_of = _accuracies if panel.title == HELD_OUT else _channels
            panel = panel._replace(metrics=metrics_of(runs))
        # A run without a value of a metric has no curve of it, and a plot without a curve is left out.
        curves = [_curve(run_index, run, metric) for run_index, run in enumerate(runs) for metric in panel.metrics]
        if drawn_curves := [curve for curve in curves if curve]:
            drawn_plots.append(_plot(panel, drawn_curves, bands_of_runs, runs))
    return drawn_plots


def thinned(runs: Sequence[ReportedRun]) -> int:
    """Returns the number of points of the longest curve that become two points on the page; 1 if all are drawn."""
    return max(part(len(run.records)) for run in runs)


def _channels(runs: Sequence[ReportedRun]) -> tuple[str, ...]:
    """Returns the metrics of the reward functions, if there are two or more."""
    # The last record has all of them, and a long run has many records.
    metrics = channel_metrics({name for run in runs for record in run.records[-1:] for name in record})
    return tuple(metrics) if len(metrics) > 1 else ()


def _accuracies(runs: Sequence[ReportedRun]) -> tuple[str, ...]:
    """Returns the accuracies of all evaluation sets; that of the set that decides comes first."""
    return tuple(dict.fromkeys(name for run in runs for name in accuracies_of(flatten(run.config)).values()))


def _curve(run_index: int, run: ReportedRun, metric: str) -> Curve | None:
    """Returns the curve of a metric, or None for a run without a finite value of it."""
    points = [(record["step"], record[metric]) for record in run.records if metric in record]
    if all(value is None for _, value in points):
        return None
    steps, values = zip(*points, strict=True)
    return Curve(run_index, run.letter, metric, np.array(steps, np.int32), np.array(values, float))


def _plot(panel: Panel, curves: list[Curve], bands_of_runs: list[list[Band]], runs: Sequence[ReportedRun]) -> Plot:
    """Returns the plot of a panel: curves of its metrics, bands of healthy values, and spans of findings.

    bands_of_runs: ranges of healthy values of each run.
    """
    has_several_metrics = len({curve.metric for curve in curves}) > 1
    bands_by_run = {
        # A plot of several metrics has no bands, because no reader could tell to which metric a band belongs.
        curve.run: [
            band for band in bands_of_runs[curve.run] if band.metric == curve.metric and not has_several_metrics
        ]
        for curve in curves
    }
    # Findings of the rules that read these metrics, each with the steps in which it was reported.
    spans = [
        (run_index, span) for run_index, run in enumerate(runs) for span in run.spans if span.finding.id in panel.rules
    ]
    # The axis shows all curves, and the bounds of the bands that are near the curves.
    bounds = [
        edge
        for run_bands in bands_by_run.values()
        for band in run_bands
        for edge in (band.low, band.high)
        if edge is not None
    ]
    values = [y for curve in curves for y in (curve.y, curve.mean())]
    axis = fit(values, bounds, len(spans), log=panel.log)
    # Plotly draws in this order, so that bands lie under the curves, and marks of findings over them.
    drawn: list[go.Scatter] = []
    for run_index, run_bands in bands_by_run.items():
        drawn += traces.band(run_index, run_bands, runs[run_index], axis) if run_bands else []
    for curve in curves:
        dash = DASHES[panel.metrics.index(curve.metric) % len(DASHES)] if has_several_metrics else ""
        drawn += traces.points(curve, panel.form, dash) if panel.plain else traces.lines(curve, panel.form, dash, axis)
        drawn += traces.not_finite(curve, axis)
    last_step = max(run.last for run in runs)
    for number, (run_index, span) in enumerate(spans):
        text = f"{runs[run_index].letter} {span.finding.id}" if len(runs) > 1 else span.finding.id
        drawn += traces.mark(run_index, text, span, last_step, axis.level(number))
    legend = [(DASHES[index % len(DASHES)], name) for index, name in enumerate(panel.metrics)]
    words, figure = _words(curves, bands_by_run, runs, axis), traces.as_json(drawn, _layout(panel, last_step, axis))
    return Plot(panel.title, words, legend if has_several_metrics else [], figure)


def _layout(panel: Panel, last_step: int, axis: Axis) -> dict[str, Any]:
    """Returns Plotly's layout of a panel. last_step: last step of all runs."""
    # The labels of the axis need fewer digits than the values that a reader points at.
    form = panel.form
    if form.endswith("%") and axis.span > 0.05:
        form = ".0%"
    if axis.log:
        form = ".0e" if axis.low < -5 else "~g"
    return dict(
        template="none",
        margin=dict(l=44, r=12, t=8, b=40),
        height=240,
        showlegend=False,
        hovermode="x unified",
        xaxis=dict(range=[-0.01 * last_step, 1.01 * max(last_step, 1)], title=dict(text="step", standoff=6), nticks=6),
        yaxis=dict(range=axis.range, tickformat=form, automargin=True) | _ticks(axis),
    )


def _ticks(axis: Axis) -> dict[str, Any]:
    """Returns the ticks of an axis. On a logarithmic one they are at powers of 10, or at 1, 2 and 5 of each."""
    if not axis.log:
        return dict(nticks=5)
    return dict(type="log", dtick=max(1, round(axis.span / 5)) if axis.span > 2 else "D2")


def _words(
    curves: list[Curve], bands_by_run: dict[int, list[Band]], runs: Sequence[ReportedRun], axis: Axis
) -> list[str]:
    """Returns the lines of text below a plot."""
    letters: dict[str, list[str]] = {}  # {description of a band: letters of the runs that have it}
    for run_index, run_bands in bands_by_run.items():
        for band in run_bands:
            letters.setdefault(f"{band.description} ({band.rule})", []).append(runs[run_index].letter)
    # The letters of the runs are named only if a band does not belong to all of them.
    words = []
    for description, run_letters in letters.items():
        whose = "" if len(run_letters) == len(bands_by_run) else f" for {', '.join(run_letters)}"
        words.append(f"Healthy{whose}: {description}")
    for curve in curves:
        if nan_count := int(np.isnan(curve.y).sum()):
            first_step = int(curve.x[np.isnan(curve.y)][0])
            words.append(
                f"{curve.letter}: {nan_count:,} values of {curve.metric} are not finite (×), from step {first_step:,}"
            )
    if axis.log and any((curve.y <= 0).any() for curve in curves):
        words.append("Logarithmic: values of 0 or less are not drawn")
    return words
