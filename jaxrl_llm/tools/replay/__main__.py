"""Makes a step of a run again: `jaxrl replay --run DIR --step N`.

It restores the newest checkpoint before the step, runs the steps from there in a temporary directory, and compares the
step with the run's own line of metrics.jsonl. The folder of the run stays unchanged. Exit codes: 0: all values are
equal; 1: a value differs; 2: the step cannot be made again.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from jaxrl_llm.errors import Parser, UserError, printable, run_main
from jaxrl_llm.machine import disk
from jaxrl_llm.tools.replay import from_file, step_file
from jaxrl_llm.tools.replay.record import StepRecord, WhatIf
from jaxrl_llm.tools.replay.steps import ABSOLUTE, RELATIVE, compared_names, is_close, step

DIFFERS_EXIT_CODE = 1  # exit code if a value differs
# Metrics of updates that --change compares.
COMPARED = ("grad_norm", "update_norm", "clip/fraction", "importance/mean", "loss/total", "kl/coef", "learning_rate")


def main() -> None:
    """Makes a step again, prints whether it equals the run's record, and writes the files that are asked for."""
    args = parse()
    recomputed: dict[str, tuple[float, float]] = {}
    # The step comes from a file of --export, or is made again from a run.
    if args.source:
        record = step_file.load(args.source)
        if args.model or (record.step == 1 and record.gradient and Path(record.config["model"]["path"]).is_dir()):
            recomputed = from_file.loss_and_gradient(record, args.model)
    else:
        changes = dict(change.split("=", 1) for change in args.change)
        needs_gradient = bool(args.to or args.export)
        record = step(
            args.run, args.step, with_gradient=needs_gradient, changes=changes, other_machine=args.other_machine
        )
    lines = verdict(record) + comparison(record.what_if)
    lines += made_again(record, recomputed, args.model) if args.source else []
    print("\n".join(map(printable, lines)), flush=True)
    if args.export:
        step_file.save(record, args.export)
        print(f"wrote {args.export}")
    if args.to:
        page = import_module("jaxrl_llm.tools.replay.page")  # it needs the extra `report`
        with disk.writing_output("--to", args.to):
            args.to.write_text(page.render(record), encoding="utf-8")
        print(f"wrote {args.to}")
    # The dict `recomputed` is empty unless the step comes from a file.
    sys.exit(DIFFERS_EXIT_CODE * (bool(record.differences) or not all(is_close(*pair) for pair in recomputed.values())))


def parse() -> Namespace:
    """Returns the arguments of the command line. Raises: UserError, for arguments that do not fit together."""
    parser = Parser("jaxrl_llm.tools.replay", description=__doc__)
    about_run = "work directory of a run of train, which may be running"
    parser.add_argument("--run", type=Path, metavar="DIR", help=about_run)
    parser.add_argument("--step", type=int, metavar="N", help="step to make again, from 1")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="file of --export, instead of a run")
    about_machine = "make the step although the run had another processor, number of devices, or version of a package"
    parser.add_argument("--other-machine", action="store_true", help=about_machine)
    about_model = "with --from: weights before the step, or its adapters (default for step 1: the config's model)"
    parser.add_argument("--model", default="", metavar="DIR", help=about_model)
    parser.add_argument("--to", type=Path, metavar="FILE.html", help="also write a page about the step")
    parser.add_argument("--export", type=Path, metavar="FILE", help="also write the arrays of the step as safetensors")
    about_change = "also make the updates with this value of a config field, on the same samples, and compare them"
    parser.add_argument("--change", action="append", default=[], metavar="FIELD=VALUE", help=about_change)
    args = parser.parse_args()
    if bool(args.source) == bool(args.run) or bool(args.run) != (args.step is not None):
        raise UserError("use either --run DIR with --step N, or --from FILE alone")
    if args.source and (args.change or args.export or args.other_machine):
        raise UserError("--change, --export and --other-machine are about a run: use them with --run DIR --step N")
    if args.model and not args.source:
        raise UserError(f"--model {args.model} has no effect with --run, which has the weights: remove --model")
    for change in args.change:
        if "=" not in change:
            raise UserError(f"--change {change}: must be FIELD=VALUE, such as loss.clip_high=0.28")
    for flag in ("to", "export"):
        disk.check_output(f"--{flag}", getattr(args, flag))
    return args


def verdict(record: StepRecord) -> list[str]:
    """Returns lines that say whether the replayed step equals the run's record, and which values differ."""
    count, different = len(compared_names(record.logged, record.metrics)), record.differences
    measure = "bit for bit" if record.exact else f"within {RELATIVE:g} of their size, or {ABSOLUTE:g}"
    lines = [f"note: {note}" for note in record.notes]
    if not different:
        return [*lines, f"equal: all {count} values of step {record.step} are those of the run's log, {measure}"]
    width = max(map(len, different))
    lines.append(f"different: {len(different)} of {count} values of step {record.step} are not those of the run's log")
    return lines + [f"  {name:{width}}  logged {logged}, now {now}" for name, (logged, now) in different.items()]


def comparison(what_if: WhatIf | None) -> list[str]:
    """Returns a table of the updates with the run's settings and with other ones; [] without a comparison."""
    if not what_if:
        return []
    own, other = what_if.own.metrics, what_if.other.metrics
    rows = [(name, own[name], other.get(name)) for name in COMPARED if name in own]
    rows.append(("KL of the policy after the updates", what_if.own.kl_after, what_if.other.kl_after))
    changes = ", ".join(f"{name} = {value}" for name, value in what_if.changes.items())
    title = f"the updates on the same samples, whose cosine is {what_if.cosine:.6f}, with {changes}:"
    return [title, *table(("run", "changed"), rows)]


def made_again(record: StepRecord, recomputed: dict[str, tuple[float, float]], model: str) -> list[str]:
    """Returns a table of loss and gradient in a file and with weights.

    recomputed: result of `from_file.loss_and_gradient`.
    """
    if not recomputed:
        return [f"note: use --model DIR, the weights before step {record.step}, to make loss and gradient again"]
    count, weights = len(record.first_update), model or record.config["model"]["path"]
    title = f"the first update of the step, of {count} prompts, made again with the weights of {weights}:"
    rows = [(name if is_close(*pair) else f"{name} (differs)", *pair) for name, pair in recomputed.items()]
    return [title, *table(("in the file", "now"), rows)]


def table(heads: tuple[str, str], rows: Sequence[tuple[str, float, float | None]]) -> list[str]:
    """Returns the lines of a table with two columns of numbers. A number that does not exist is None."""
    texts = [(name, *("–" if x is None else f"{x:.6g}" for x in numbers)) for name, *numbers in rows]
    return [f"  {name:40}{first:>14}{second:>14}" for name, first, second in [("", *heads), *texts]]


if __name__ == "__main__":
    run_main(main)
