"""Makes a page about runs: `jaxrl report WORKDIR [WORKDIR ...] [--to FILE.html | --serve [PORT]]`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.errors import Parser, UserError, printable, run_main
from jaxrl_llm.health import json_lines
from jaxrl_llm.machine import bucket, disk, extras
from jaxrl_llm.tools.report.runs import Reader, read_config

DESCRIPTION = (
    "Makes one HTML page about one or several runs, which may still be running: findings of the health rules, curves, "
    "batch sizes, differences, times and completions. The page needs no network."
)


def main() -> None:
    """Writes or serves the page about one run or several."""
    parser = Parser("jaxrl_llm.tools.report", description=DESCRIPTION)
    parser.add_argument("workdirs", type=Path, nargs="+", metavar="WORKDIR", help="work directories of the runs")
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="file of the page (default: report.html in the first WORKDIR)"
    )
    parser.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=0,
        metavar="PORT",
        help="instead of a file, serve a page on this machine alone, which follows the runs (default: a free port)",
    )
    args = parser.parse_args()
    extras.require("plotly", "report", "the page")
    disk.check_output("--to", args.to)
    bucket_addresses = [address for path in args.workdirs if (address := bucket.address(path))]
    if bucket_addresses and not args.to:
        raise UserError(
            f"{bucket_addresses[0]} is in a bucket: a page can neither be written to a bucket nor, with --serve, "
            "follow a run there: use --to FILE, with a file on this machine, and no --serve"
        )
    args.workdirs = [*map(bucket.fetch_run, args.workdirs)]
    if args.serve is None:
        write(args.workdirs, args.to or args.workdirs[0] / "report.html")
    elif args.to:
        raise UserError("--serve writes no file: use either --to or --serve")
    else:
        serve(args.workdirs, args.serve)


def write(workdirs: Sequence[Path], file: Path) -> None:
    """Writes the page to a file. Raises: UserError, if a run cannot be read or the file cannot be written."""
    from jaxrl_llm.tools.report import page  # it imports plotly

    read_config(workdirs[0])  # refuses a folder without a run before the page is written into it
    disk.check_output("--to", file)
    readers = dict[Path, Reader]()
    text = page.render(workdirs, readers=readers)
    for workdir, reader in readers.items():
        for name, count in (+reader.damaged).items():
            print(printable(json_lines.left_out(str(workdir / name), count)))
    with disk.writing_output("--to", file):
        file.write_text(text, encoding="utf-8")
    print(f"{file} ({len(text.encode()) / 1e6:.1f} MB)")


def serve(workdirs: Sequence[Path], port: int) -> None:
    """Serves the page until Ctrl-C. Raises: UserError, if a folder is no run or the port cannot be used."""
    from jaxrl_llm.tools.report.serve import PageServer  # it imports plotly

    for workdir in workdirs:
        read_config(workdir)
    with PageServer(workdirs, port) as server:
        try:
            # Ctrl-C ends other programs at once, but a server must close its port first.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            print(f"http://{server.address} (Ctrl-C ends it)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended by Ctrl-C")


if __name__ == "__main__":
    run_main(main)
