"""Tables of a page: batch sizes, differences of configs, times of phases, and the step at which runs diverge."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from jaxrl_llm.config.load import flatten
from jaxrl_llm.health.finding import LogRecord
from jaxrl_llm.session.banner import totals_table
from jaxrl_llm.tools.report.runs import ReportedRun

# Fields of a config in the table of batch sizes.
SIZES = ("num_steps", "prompts_per_step", "group_size", "prompts_per_update", "epochs", "microbatch")
MISSING = "–"  # text of a value that a run does not have


class TableRow(NamedTuple):
    """A row of a table: its name, and a text for each run."""

    name: str
    values: list[str]
    shares: Sequence[float] = ()  # length of the bar above each text, from 0 to 1; () for no bars


def batch_table(runs: Sequence[ReportedRun]) -> list[TableRow]:
    """Returns the batch sizes of the configs, and the totals that follow from them."""
    rows = [{name: run.config[name] for name in SIZES if name in run.config} for run in runs]
    for row, run in zip(rows, runs, strict=True):
        row |= dict(totals_table(run.settings.sizes)) if run.settings.sizes else {}
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [TableRow(name, [f"{row[name]:,}" if name in row else MISSING for row in rows]) for name in names]


def config_difference(runs: Sequence[ReportedRun]) -> list[TableRow]:
    """Returns the fields in which the configs differ."""
    configs = [flatten(run.config) for run in runs]  # {field: value} of each run
    names = list(dict.fromkeys(name for fields in configs for name in fields))
    rows = [(name, [repr(fields[name]) if name in fields else MISSING for fields in configs]) for name in names]
    return [TableRow(name, values) for name, values in rows if len(set(values)) > 1]


def phase_table(runs: Sequence[ReportedRun]) -> list[TableRow]:
    """Returns the median seconds of each phase of a step, and the seconds of the first step, which compiles."""
    # Only records with times count, because that of step 0 has none.
    timed_records = [[record for record in run.records if record.get("time/step")] for run in runs]
    all_names = dict.fromkeys(name for records in timed_records for record in records for name in record)
    names = [name for name in all_names if name.startswith("time/")]
    # The first record is left out, because its step compiles. Medians are shown, because a checkpoint makes single
    # steps much longer.
    medians = [{name: _median(name, records[1:] or records) for name in names} for records in timed_records]
    longest = max((value or 0.0 for row in medians for value in row.values()), default=0.0)
    rows = []
    for name in names:
        texts = [_seconds(row[name], row["time/step"]) for row in medians]
        bar_lengths = [(row[name] or 0.0) / longest if longest else 0.0 for row in medians]
        rows.append(TableRow(name.removeprefix("time/"), texts, bar_lengths))
    if rows:
        first = [f"{records[0]['time/step']:.2f} s" if records else MISSING for records in timed_records]
        speeds = [_median("tokens_per_second", records[1:] or records) for records in timed_records]
        speed_texts = [MISSING if speed is None else f"{speed:,.0f}" for speed in speeds]
        rows.append(TableRow("the first step logged", first))
        rows.append(TableRow("completion tokens per second", speed_texts))
    return rows


def _median(name: str, records: Sequence[LogRecord]) -> float | None:
    """Returns the median of a metric over the records that have it, None if no record has it."""
    values = [record[name] for record in records if record.get(name) is not None]
    return median(values) if values else None


def _seconds(value: float | None, step: float | None) -> str:
    """Returns the seconds of a phase as text, with their share of the seconds of the step."""
    if value is None:
        return MISSING
    return f"{value:.2f} s" + (f" ({value / step:.0%})" if step and value != step else "")


class Parting(NamedTuple):
    """Comparison of a run with the first run of the page: the step at which their metrics begin to differ."""

    words: str  # the comparison as a sentence
    rows: list[tuple[str, int, str, str]]  # metric, first step at which it differs, and its two values


def partings(runs: Sequence[ReportedRun]) -> list[Parting]:
    """Compares every other run with the first one."""
    return [parting(runs[0], run) for run in runs[1:]]


def parting(first: ReportedRun, other: ReportedRun) -> Parting:
    """Returns the first step at which the metrics of two runs differ. Times are not compared."""
    names = f"{first.letter} and {other.letter}"
    other_records = {record["step"]: record for record in other.records}
    pairs = [(record, other_records[record["step"]]) for record in first.records if record["step"] in other_records]
    if not pairs:
        return Parting(f"{names} have no step in common.", [])
    first_differences: dict[str, tuple[str, int, str, str]] = {}  # {metric: its row of the table}
    for record, other_record in pairs:
        # Only metrics of both runs are compared, because runs with other configs have other metrics.
        for metric in record.keys() & other_record.keys():
            value, other_value = record[metric], other_record[metric]
            if metric not in first_differences and value != other_value and not _is_time(metric):
                first_differences[metric] = (metric, record["step"], _number(value), _number(other_value))
    rows = sorted(first_differences.values(), key=lambda row: (row[1], row[0]))
    if not rows:
        return Parting(f"{names} have the same numbers at all {len(pairs):,} steps that both logged.", [])
    # The sentence names up to six metrics that differ at the first step, and says how many records are equal before.
    first_step = rows[0][1]
    metrics = [row[0] for row in rows if row[1] == first_step]
    listed = ", ".join(metrics[:6]) + (f" and {len(metrics) - 6} more" if len(metrics) > 6 else "")
    equal_count = sum(record["step"] < first_step for record, _ in pairs)
    verb = "records before are" if equal_count > 1 else "record before is"
    equal_records = f"; the {f'{equal_count:,} ' if equal_count > 1 else ''}{verb} equal" if equal_count else ""
    return Parting(f"{names} part at step {first_step:,}, in {listed}{equal_records}.", rows)


def _is_time(metric: str) -> bool:
    return metric.startswith("time/") or metric == "tokens_per_second"


def _number(value: Any) -> str:
    return "not finite" if value is None else f"{value:.6g}"
