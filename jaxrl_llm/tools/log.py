"""Sends the log of a run to a tracker, later: `jaxrl log WORKDIR --send wandb --project NAME`.

It sends each record of metrics.jsonl, and the completions in completions.jsonl, to one of the loggers of config.log.to,
such as tensorboard, wandb, trackio or mlflow. The run has the same id there as if it had been logged while it trained,
so a point that is there already is there twice; TensorBoard alone drops the old one. Findings of health rules are not
in these files: `jaxrl doctor --run WORKDIR` prints them.
"""

from __future__ import annotations

from pathlib import Path

from jaxrl_llm import loggers
from jaxrl_llm.config.names import resolve
from jaxrl_llm.errors import Parser, UserError, run_main, summarize_error
from jaxrl_llm.machine import bucket
from jaxrl_llm.session import json_lines
from jaxrl_llm.session.log import samples_of
from jaxrl_llm.session.saved_run import config_of


def main() -> None:
    parser = Parser("jaxrl_llm.tools.log", description=__doc__)
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help="of a run of train or sft")
    parser.add_argument("--send", required=True, metavar="NAME", help="a logger, as config.log.to names it")
    parser.add_argument("--project", default="", help="of the tracker (default: that of the run)")
    parser.add_argument("--name", default="", help="of the run there (default: that of the run, or of its workdir)")
    parser.add_argument("--tags", nargs="+", default=[], help="of the run there (default: those of the run)")
    args = parser.parse_args()
    args.workdir = bucket.fetch_run(args.workdir)
    config = config_of(args.workdir)
    records = json_lines.read(args.workdir / "metrics.jsonl")
    if not records:
        raise UserError(f"{args.workdir} has no record yet: wait for the first step, or give another run")
    log = config["log"]
    project = args.project or log["project"]
    loggers.check_named((args.send,), project)
    run = loggers.LoggedRun(args.workdir, 0, project, config, args.name or log["name"], tuple(args.tags or log["tags"]))
    groups = json_lines.read(args.workdir / "completions.jsonl")
    open_logger = resolve(args.send, loggers, "--send")
    try:
        logger = open_logger(run)
        for record in records:
            logger.write(record["step"], {k: v for k, v in record.items() if k != "step" and v is not None})
        for line in groups if hasattr(logger, "write_samples") else ():
            logger.write_samples(line["step"], samples_of(line))
        logger.close()
    # Whatever a library or a server raises: what it has got is not known.
    except Exception as error:
        raise UserError(f"--send {args.send} failed ({summarize_error(error)}): give the command again") from error
    print(f"{args.send} has {len(records):,} records and {len(groups):,} groups of completions of {run.title()}")


if __name__ == "__main__":
    run_main(main)
