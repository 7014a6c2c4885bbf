"""How often the health rules are wrong, and how late they are right: `python -m benchmarks.health.alarms --runs DIR`.

It judges the logs in DIR and simulated histories with the rules as they are now, prints every false alarm, and writes
the tables of docs/health.md. `--make-runs` makes the runs that DIR lacks before, one after the other, for `--minutes`
at most: the next call goes on. `--only WORD` makes and judges the runs whose name has this word, and writes no table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

from benchmarks.health import simulated
from benchmarks.health.alarm_runs import HEALTHY, UNSEEN, make, makers
from benchmarks.health.ill_runs import FAULTS, Fault
from benchmarks.health.judging import BOUNDS, FALL, Judged, judge, judged, keep, rate
from benchmarks.health.studies import ROOT, folder_of
from jaxrl_llm.health import rules

DOC = ROOT / "docs" / "health.md"
BEGIN, END = "<!-- written by benchmarks.health.alarms -->", "<!-- end -->"
SIMULATED = 500
LONG = 20, 10_000  # simulated runs, and their steps
# Steps from the begin of a fault to the finding, in both forms, of the rules before they were tests of significance.
BEFORE: dict[str, tuple[int | None, int | None]] = {
    "sampler_mismatch": (1, 1), "stale_weights": (4, 9), "engine_drift": (8, 9), "stale_samples": (6, 4),
    "updates_skipped": (11, 11), "phantom_clipping": (8, 8), "no_signal": (8, 8), "entropy_collapse": (33, None),
    "entropy_explosion": (16, 16), "reward_collapse": (5, 5), "gradient_climb": (26, 25), "gradient_spike": (1, 1),
    "good_fades": (17, 23), "repeats": (13, 20), "kl_alone": (16, 13), "kl_pays": (16, 16), "truncated": (13, 13),
    "never_stops": (8, 8), "length_collapse": (32, 24), "channels_diverge": (19, 18), "critic_lags": (16, 16),
    "tools_unused": (8, 8), "tool_errors": (8, 8),
}  # fmt: skip


def simulated_run(seed: int) -> Judged:
    """Judges a simulated healthy history, of a size, length, share of wrong verdicts, engine and kind by its seed."""
    sequences, steps = (16, 32, 64, 512, 4096)[seed % 5], (60, 100, 150, 250)[seed // 5 % 4]
    given = {
        "sequences": sequences, "group_size": 4 if sequences == 16 else 8, "steps": steps,
        "wrong": (0.0, 0.1, 0.2)[seed // 20 % 3], "lag": seed // 60 % 2, "rounding": (2.0**-8, 2.0**-23)[seed % 2],
        "critic": 3 * (seed % 3 == 0), "tools": seed % 4 == 0,
    }  # fmt: skip
    return judge(f"simulated {seed} {given}", simulated.history(seed, **given), BOUNDS)


def long_run(seed: int) -> Judged:
    """Judges a simulated healthy history of many steps."""
    given = {"sequences": (16, 32, 64, 512)[seed % 4], "group_size": 8, "steps": LONG[1], "wrong": 0.1}
    return judge(f"long {seed} {given}", simulated.history(10_000 + seed, **given), BOUNDS)


def simulated_runs(count: int) -> tuple[list[Judged], list[Judged]]:
    """Judges `count` simulated histories, and the long ones, on all cores."""
    with get_context("spawn").Pool() as pool:
        return pool.map(simulated_run, range(count), chunksize=10), pool.map(long_run, range(LONG[0]), chunksize=1)


def false_alarms(real: list[Judged], made: list[Judged]) -> list[str]:
    """Returns the table of false alarms: for each rule the runs that it could judge, and those that it called ill."""
    rows = ["| rule | healthy runs | simulated histories |", "|---|---|---|"]
    for rule in (rule.__name__ for rule in rules.RULES):
        cells = [[rule in run.alarms for run in runs if rule in run.looked] for runs in (real, made)]
        rows.append(f"| `{rule}` | " + " | ".join(rate(sum(cell), len(cell)) for cell in cells) + " |")
    total = " | ".join(rate(sum(bool(run.alarms) for run in runs), len(runs)) for runs in (real, made))
    return [*rows, f"| **all together** | {total} |"]


def healthy_table(real: list[Judged], ruined: list[Judged]) -> list[str]:
    """Returns the table of the healthy runs by their sizes, and what was called ill."""
    kinds = dict[str, list[Judged]]()
    for run in real:
        size, word, _ = shown(run).partition("-sequences")
        kinds.setdefault(f"{size} sequences a step" if word else "other algorithms and engines", []).append(run)
    rows = ["| runs | number | steps | accuracy of samples | called ill |", "|---|---|---|---|---|"]
    for kind in sorted(kinds, key=lambda kind: (len(kind), kind)):
        runs = kinds[kind]
        steps = ", ".join(f"{x:,}" for x in sorted({run.steps for run in runs}))
        ends = " to ".join(f"{mean(run.tenths[at] for run in runs if run.tenths):.2f}" for at in (0, -1))
        rows.append(f"| {kind} | {len(runs)} | {steps} | {ends} | {sum(bool(run.alarms) for run in runs)} |")
    called = "; ".join(f"`{shown(run)}` ({rules_of(run)})" for run in real if run.alarms)
    rows += ["", f"Called ill: {called or 'none'}."]
    if ruined:
        named = "; ".join(f"`{shown(run)}` ({rules_of(run) or 'silent'})" for run in ruined)
        rows += ["", f"Not counted, because the accuracy of their samples fell by {FALL:.0%} or more: {named}."]
    return rows


def shown(run: Judged) -> str:
    return run.name.removeprefix("healthy-")


def rules_of(run: Judged) -> str:
    return ", ".join(f"`{rule}` at step {step:,}" for rule, (step, _) in run.alarms.items())


def delay(run: Judged, rule: str, fault: Fault) -> int | None:
    """Returns the steps from the begin of a fault to the finding of its rule; None: not found, or before it began."""
    took = run.alarms[rule][0] - fault.begins + 1 if rule in run.alarms else 0
    return took if took > 0 else None


FORMS = ("first", "second", "unseen")


def faults_table(runs: dict[str, Judged]) -> list[str]:
    """Returns the table of faults: delays of the rule in both forms and on the unseen set, and what else was found."""
    rows = [
        "| rule | fault | may take | took | second form | other strength and seed | found as well |",
        "|---|---|---|---|---|---|---|",
    ]
    in_time, late = dict[str, list[bool]](), 0
    for rule, fault in FAULTS.items():
        cells, others = [], set[str]()
        for form, before in zip(FORMS, (*BEFORE.get(rule, (None, None)), None), strict=True):
            of, run = UNSEEN[rule] if form == "unseen" else fault, runs.get(folder_of(f"{form} {rule}"))
            if run is None:
                cells.append("not made")
                continue
            took = delay(run, rule, of)
            others |= run.alarms.keys() - {rule}
            in_time.setdefault(form, []).append(took is not None and took <= of.within)
            late += before is not None and (took is None or took > 2 * before)
            old = "" if before in (None, took) else f" (before: {before})"
            cells.append(("not found" if took is None else f"{took}") + old)
        also = ", ".join(sorted(others))
        rows.append(f"| `{rule}` | {fault.story} | {fault.within} | {' | '.join(cells)} | {also} |")
    words: dict[str, str] = dict(
        zip(FORMS, ("of the faults", "in their second form", "in the set of other strengths and seeds"), strict=True)
    )
    told = ", ".join(f"{rate(sum(found), len(found))} {words[form]}" for form, found in in_time.items())
    return [*rows, "", f"Found in time: {told}. More than twice as late as before: {late}."]


def long_line(runs: list[Judged]) -> str:
    """Says how often long runs are stopped or sent back, if every rule may do so."""
    ended = sum(bool(run.alarms) for run in runs)
    named = "that a rule would end or send back if all were in `health.stop`"
    return f"Simulated healthy runs of {LONG[1]:,} steps {named}: {ended} of {len(runs)}."


def tell(runs: Iterable[Judged]) -> None:
    """Prints what was said of each run."""
    for run in runs:
        for step, finding in run.alarms.values():
            print(f"{run.name}, step {step:,}: {finding.line()}", flush=True)


def make_missing(folder: Path, only: str, minutes: float) -> None:
    """Makes the runs that the folder lacks. Starts none after `minutes`."""
    last = time.monotonic() + 60 * minutes
    for name in makers():
        if only in name and not (folder / name).exists() and time.monotonic() < last:
            began = time.monotonic()
            make(name, folder)
            print(f"{name}: made in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "alarms")
    parser.add_argument("--make-runs", action="store_true")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--simulated", type=int, default=SIMULATED)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path, help="write the logs of --only, small, into this file, and no table")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    if args.make_runs:
        make_missing(args.runs, args.only, args.minutes)
    made, long = ([], []) if args.only or args.keep else simulated_runs(args.simulated)
    runs = {name: judged(args.runs / name) for name in makers() if args.only in name and (args.runs / name).exists()}
    learned = [runs[name] for name in (folder_of(f"healthy {name}") for name in HEALTHY) if name in runs]
    real, ruined = ([run for run in learned if run.healthy is ok] for ok in (True, False))
    tell([*made, *long, *real])
    if args.keep:
        keep(args.keep, [args.runs / name for name in runs])
    if args.only or args.keep:
        return
    lines = [*false_alarms(real, made), "", *healthy_table(real, ruined), "", long_line(long), "", *faults_table(runs)]
    print("\n".join(lines))
    before, rest = DOC.read_text().split(BEGIN)
    DOC.write_text("\n".join([before + BEGIN, "", *lines, "", END + rest.split(END)[1]]))


if __name__ == "__main__":
    main()
