"""What the health rules say of runs with unusual data, logs or rewards: `python -m benchmarks.health.kinds`.

Each kind has simulated healthy runs, and the same runs with a policy that forgets from three fifths on, or with the
illness of `ILL`. It prints a table, and writes it into docs/health.md. `--seeds N` runs of each kind: four sizes of a
step, two lengths, two shares of wrong verdicts.
"""

from __future__ import annotations

import argparse
from multiprocessing import get_context
from typing import Any

from benchmarks.health import simulated
from benchmarks.health.judging import BOUNDS, judge, rate
from benchmarks.health.studies import ROOT

DOC = ROOT / "docs" / "health.md"
BEGIN, END = "<!-- written by benchmarks.health.kinds -->", "<!-- end of kinds -->"
KINDS: dict[str, dict[str, Any]] = {
    "our log": {},
    "our log, three stages, each harder": {"order": "stages"},
    "our log, problems sorted by difficulty": {"order": "sorted"},
    "our log, each seventh mean reward missing": {"odd": "gaps"},
    "old TRL (no entropy, no lengths)": {"log": "trl"},
    "old TRL, stages": {"log": "trl", "order": "stages"},
    "old TRL, sorted": {"log": "trl", "order": "sorted"},
    "old TRL, gaps": {"log": "trl", "odd": "gaps"},
    "veRL in bfloat16 (lowest and highest reward)": {"log": "verl"},
    "veRL, one reward of -10 in a step": {"log": "verl", "odd": "outlier"},
    "veRL, stages": {"log": "verl", "order": "stages"},
    "veRL, sorted": {"log": "verl", "order": "sorted"},
    "prime-rl (no deviation, no lag)": {"log": "prime_rl"},
    "prime-rl, stages": {"log": "prime_rl", "order": "stages"},
    "prime-rl's console": {"log": "prime_rl_console"},
    "prime-rl's console, sorted": {"log": "prime_rl_console", "order": "sorted"},
    "our log, a critic that needs 100 steps": {"critic": 100},
    "our log, brief and right": {"shorter": 0.1},
    "our log, stages, while the form is learned": {"order": "stages", "learns": 1.5, "form": 0.3},
    "veRL (no evaluations), brief and right": {"log": "verl", "shorter": 0.1},
}
# Kinds whose ill runs have an illness of their own, from the first step on, and the rule that must find it.
ILL: dict[str, tuple[dict[str, Any], str]] = {
    "our log, a critic that needs 100 steps": ({"critic": 10**9}, "critic_lags"),
    "our log, brief and right": ({"learns": -3.0}, "length_collapse"),
    "our log, stages, while the form is learned": ({"order": "", "learns": -3.0}, "channels_diverge"),
    "veRL (no evaluations), brief and right": ({"learns": 0.0}, "length_collapse"),
}


def judged(kind: str, seed: int) -> tuple[set[str], bool]:
    """Returns which rules call the healthy run ill, and whether one finds that the other run is ill."""
    given = {"sequences": (16, 64, 256, 512)[seed % 4], "steps": (150, 300)[seed // 4 % 2]}
    given |= {"wrong": (0.0, 0.1)[seed // 8 % 2]} | KINDS[kind]
    ruined = given["steps"] * 3 // 5
    healthy = judge(kind, simulated.history(seed, **given), BOUNDS)
    if kind in ILL:
        changes, rule = ILL[kind]
        return {*healthy.alarms}, rule in judge(kind, simulated.history(seed, **given | changes), BOUNDS).alarms
    ill = judge(kind, simulated.history(seed, **given, ruined=ruined), BOUNDS)
    return {*healthy.alarms}, any(step > ruined for step, _ in ill.alarms.values())


def table(seeds: int) -> list[str]:
    """Returns the rows of the table, the last one of all kinds together."""
    rows = ["| runs | healthy, called ill | by | ill, found |", "|---|---|---|---|"]
    whole: list[tuple[set[str], bool]] = []
    with get_context("spawn").Pool() as pool:
        for kind in KINDS:
            runs = pool.starmap(judged, [(kind, seed) for seed in range(seeds)])
            whole += runs
            rules = ", ".join(f"`{rule}`" for rule in sorted({rule for alarms, _ in runs for rule in alarms}))
            cells = f"{sum(bool(alarms) for alarms, _ in runs)} of {seeds} | {rules}"
            rows.append(f"| {kind} | {cells} | {sum(found for _, found in runs)} of {seeds} |")
    called, found = sum(bool(alarms) for alarms, _ in whole), sum(found for _, found in whole)
    return [*rows, f"| **all together** | {rate(called, len(whole))} | | {rate(found, len(whole))} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=32)
    rows = table(parser.parse_args().seeds)
    print("\n".join(rows))
    before, rest = DOC.read_text().split(BEGIN)
    DOC.write_text("\n".join([before + BEGIN, "", *rows, "", END + rest.split(END)[1]]))


if __name__ == "__main__":
    main()
