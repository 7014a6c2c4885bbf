"""What a figure is made of: curves, healthy bands, and marks of findings.

A trace has no color. It has its run and its role in `meta`, and the page's script paints it, light or dark.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from jaxrl_llm.health.bands import Band
from jaxrl_llm.health.history import RECENT_STEPS
from jaxrl_llm.health.judge import FindingSpan
from jaxrl_llm.tools.report.axis import Axis
from jaxrl_llm.tools.report.runs import ReportedRun
from jaxrl_llm.tools.report.thinning import thin


class Curve(NamedTuple):
    """The curve of a metric of a run."""

    run: int  # index of the run on the page
    letter: str  # letter of the run
    metric: str
    x: np.ndarray  # steps
    y: np.ndarray  # values; NaN if a value was not finite

    def mean(self) -> np.ndarray:
        """Returns at each step the mean of the last RECENT values, as in the health rules, without NaN."""
        # Differences of cumulative sums need one pass for any window. A NaN adds 0 to both sums.
        ends = np.arange(1, len(self.y) + 1)
        starts = np.maximum(ends - RECENT_STEPS, 0)
        cumulative_sum = np.concatenate([[0.0], np.cumsum(np.nan_to_num(self.y))])
        cumulative_count = np.concatenate([[0], np.cumsum(~np.isnan(self.y))])
        sums = cumulative_sum[ends] - cumulative_sum[starts]
        counts = cumulative_count[ends] - cumulative_count[starts]
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def lines(curve: Curve, form: str, dash: str, axis: Axis) -> list[go.Scatter]:
    """Returns the thin line of the values, and the line of their means, which the rules compare.

    form: d3 format of the values; dash: dash style of a metric in a plot of several metrics, of which only the means
    are drawn; "" if the plot has one metric.
    """
    scatters = []
    for role, values in (("raw", curve.y), ("mean", curve.mean())):
        # The values are filtered before they are thinned, because each part keeps its lowest value, which a logarithmic
        # axis must be able to show.
        x, y = thin(curve.x, np.where(values > 0, values, np.nan) if axis.log else values)
        style = dict(x=x, y=y, mode="lines" if len(x) > 1 else "markers", meta=_meta(curve.run, role))
        if role == "raw":
            scatters.append(go.Scatter(**style, line=dict(width=1), hoverinfo="skip"))
        else:
            scatters.append(go.Scatter(**style, line=dict(width=2, dash=dash or "solid"), **_hover(curve, form)))
    return scatters[1:] if dash else scatters


def points(curve: Curve, form: str, dash: str) -> list[go.Scatter]:
    """Returns the values of a curve as points, without means."""
    x, y = thin(curve.x, curve.y)
    mode = "lines+markers" if len(x) < 60 else "lines"
    style = dict(x=x, y=y, mode=mode, marker=dict(size=4), line=dict(width=2, dash=dash or "solid"))
    return [go.Scatter(**style, meta=_meta(curve.run, "mean"), **_hover(curve, form))]


def _hover(curve: Curve, form: str) -> dict[str, str]:
    """Returns Plotly's settings of the text that appears when a reader points at a curve."""
    return dict(name=f"{curve.letter} {curve.metric}", hovertemplate=f"%{{y:{form}}}")


def not_finite(curve: Curve, axis: Axis) -> list[go.Scatter]:
    """Returns crosses at the steps whose value is not finite."""
    x = curve.x[np.isnan(curve.y)]
    if not len(x):
        return []
    x, y = thin(x, np.full(len(x), axis.value_at(0.03)), limit=200)
    marker = dict(symbol="x-thin", size=7, line=dict(width=1.5))
    return [go.Scatter(x=x, y=y, meta=_meta(curve.run, "cross"), mode="markers", marker=marker, hoverinfo="skip")]


def band(run_index: int, bands: Sequence[Band], run: ReportedRun, axis: Axis) -> list[go.Scatter]:
    """Returns the area between the highest lower bound and the lowest upper bound, and the edges within the axis."""
    steps = np.array([record["step"] for record in run.records], np.int32)
    # A fixed bound is one number, and a bound that follows the run has a value for each record.
    lows = [np.broadcast_to(band.low, len(steps)) for band in bands if band.low is not None]
    highs = [np.broadcast_to(band.high, len(steps)) for band in bands if band.high is not None]
    # fmax and fmin ignore NaN, which is the value of a bound during the start of a run.
    low = np.fmax.reduce(lows) if lows else np.full(len(steps), np.nan)
    high = np.fmin.reduce(highs) if highs else np.full(len(steps), np.nan)
    scatters = []
    # The lower edge comes first, because "tonexty" fills down to the previous trace.
    for edge, outside, fill in ((low, axis.bottom, "none"), (high, axis.top, "tonexty")):
        x, y = _simplified(steps, np.clip(np.nan_to_num(edge, nan=outside), axis.bottom, axis.top))
        style = dict(mode="lines", line=dict(width=0, shape="hv"), fill=fill, hoverinfo="skip")
        scatters.append(go.Scatter(x=x, y=y, meta=_meta(run_index, "band"), **style))
    for edge in (low, high):
        x, y = _simplified(steps, np.where((edge > axis.bottom) & (edge < axis.top), edge, np.nan))
        style = dict(mode="lines", line=dict(width=1.2, dash="dot", shape="hv"), hoverinfo="skip")
        scatters += [go.Scatter(x=x, y=y, meta=_meta(run_index, "edge"), **style)] if np.isfinite(y).any() else []
    return scatters


def _simplified(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the two ends of a constant curve, or a thinned curve."""
    return (x[[0, -1]], y[[0, -1]]) if (y == y[0]).all() else thin(x, y)


def mark(run_index: int, text: str, span: FindingSpan, end: int, level: tuple[float, float]) -> list[go.Scatter]:
    """Returns the mark of a finding: a line at its first step, and a bar with its id up to its last step.

    end: last step of the plot; level: bottom of the line, and height of the bar.
    """
    bottom, height = level
    vertical_line = dict(x=[span.first] * 2, y=[bottom, height], mode="lines", line=dict(width=1, dash="dash"))
    bar = dict(x=[span.first, span.last], y=[height] * 2, mode="lines+markers+text", line=dict(width=3))
    label = dict(
        marker=dict(symbol=["triangle-down", "line-ns"], size=[8, 1]),
        text=[text, ""],
        # Near the right end, the text is to the left of the mark, because it would leave the plot.
        textposition="top left" if span.first > 0.55 * end else "top right",
        textfont=dict(size=11),
        cliponaxis=False,
    )
    return [
        go.Scatter(meta=_meta(run_index, "mark"), hoverinfo="skip", **style) for style in (vertical_line, bar | label)
    ]


def _meta(run: int, role: str) -> dict[str, Any]:
    """Returns what the page's script must know to paint a trace: index of the run, and role of the trace."""
    return {"run": run, "role": role}


def as_json(drawn: Sequence[go.Scatter], layout: dict[str, Any]) -> str:
    """Returns a figure as JSON."""
    return json.dumps(go.Figure(drawn, layout).to_plotly_json(), default=_encode)


def _encode(array: np.ndarray) -> dict[str, str]:
    """Returns an array as the binary data that plotly reads: it is small, and NaN is a gap."""
    # Numbers have 4 bytes, because a browser has no arrays of 64-bit integers, and a plot shows fewer than 7 digits.
    kind, name = (np.int32, "i4") if array.dtype.kind == "i" else (np.float32, "f4")
    return {"dtype": name, "bdata": base64.b64encode(array.astype(kind).tobytes()).decode()}
