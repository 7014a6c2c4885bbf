"""Sends the log of a run to a tracker later: `jaxrl log WORKDIR --send wandb --project NAME`.

It sends each record of metrics.jsonl, and the completions in completions.jsonl, to one of the loggers of config.log.to,
such as tensorboard, wandb, trackio or mlflow. The run has the same id in the tracker as if it had been logged during
training, so that points which the tracker already has appear twice; only TensorBoard drops the older ones. Findings of
health rules are not in these files; `jaxrl doctor --run WORKDIR` prints them.
"""

from __future__ import annotations

from pathlib import Path

from jaxrl_llm import loggers
from jaxrl_llm.config.names import resolve
from jaxrl_llm.errors import Parser, UserError, run_main, summarize_error
from jaxrl_llm.health import json_lines
from jaxrl_llm.machine import bucket
from jaxrl_llm.session.log import samples_of
from jaxrl_llm.session.saved_run import config_of


def main() -> None:
    """Sends the records and completions of a run to a tracker."""
    parser = Parser("jaxrl_llm.tools.log", description=__doc__)
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help="work directory of a run of train or sft")
    parser.add_argument("--send", required=True, metavar="NAME", help="name of a logger, as in config.log.to")
    parser.add_argument("--project", default="", help="project of the tracker (default: config.log.project)")
    parser.add_argument(
        "--name", default="", help="name of the run in the tracker (default: config.log.name, or that of WORKDIR)"
    )
    parser.add_argument("--tags", nargs="+", default=[], help="tags of the run there (default: config.log.tags)")
    args = parser.parse_args()
    args.workdir = bucket.fetch_run(args.workdir)
    config = config_of(args.workdir)
    records = json_lines.read(args.workdir / "metrics.jsonl")
    if not records:
        raise UserError(f"{args.workdir} has no records yet: wait for its first step, or name another run")
    log = config["log"]
    project = args.project or log["project"]
    loggers.check_named((args.send,), project)
    run = loggers.LoggedRun(
        workdir=args.workdir,
        step=0,
        project=project,
        config=config,
        name=args.name or log["name"],
        tags=tuple(args.tags or log["tags"]),
    )
    groups = json_lines.read(args.workdir / "completions.jsonl")
    open_logger = resolve(args.send, loggers, "--send")
    try:
        logger = open_logger(run)
        for record in records:
            logger.write(record["step"], {k: v for k, v in record.items() if k != "step" and v is not None})
        for line in groups if hasattr(logger, "write_samples") else ():
            logger.write_samples(line["step"], samples_of(line))
        logger.close()
    # A library or a server may raise any error, after which it is unknown what it has received.
    except Exception as error:
        raise UserError(f"--send {args.send} failed ({summarize_error(error)}): run the command again") from error
    print(f"sent {len(records):,} records and {len(groups):,} groups of completions of {run.title()} to {args.send}")


if __name__ == "__main__":
    run_main(main)
