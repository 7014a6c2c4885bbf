"""A search server: `jaxrl serve-retriever --corpus FILE.jsonl [--port 8000]`.

It answers `POST /retrieve` as Search-R1's server does, with BM25, or with vectors of an encoder (--dense MODEL).
docs/retriever.md has the formats.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_llm.errors import Parser, UserError, run_main
from jaxrl_llm.retriever.index import Index
from jaxrl_llm.rollout.vllm.address import LOOPBACK

if TYPE_CHECKING:  # it imports torch
    from jaxrl_llm.retriever.dense import DenseIndex

# Seconds for which an idle connection stays open: longer than clients keep one, because a request that meets a server
# which is just closing the connection fails.
KEEP_ALIVE_SECONDS = 75
SHUTDOWN_SECONDS = 5  # seconds for running searches when the server stops


def main() -> None:
    """Reads the corpus and its index, and serves searches over HTTP until the process ends."""
    parser = Parser("jaxrl_llm.tools.serve_retriever", description=__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="JSON lines with id and contents, or id, title and text")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine alone)")
    add("--public", action="store_true", help="allow an address that other machines can reach")
    add("--port", type=int, default=8000)
    add("--topk", type=int, default=3, help="documents of a query, if a request does not say (default: %(default)s)")
    add("--most-topk", type=int, default=100, help="most documents of a query (default: %(default)s)")
    add("--most-queries", type=int, default=512, help="most queries of a request (default: %(default)s)")
    add("--most-characters", type=int, default=4096, help="most characters of a query (default: %(default)s)")
    add("--most-waiting", type=int, default=256, help="most requests that wait for a worker (default: %(default)s)")
    add("--workers", type=int, default=2, help="threads that search (default: %(default)s)")
    add("--dense", default="", metavar="MODEL", help="an encoder of transformers, such as intfloat/e5-base-v2")
    add("--pooling", choices=("mean", "cls"), default="mean", help="pooling of the encoder (default: %(default)s)")
    add("--query-prefix", default="query: ", help="text that the encoder expects before a query (default: %(default)r)")
    add("--passage-prefix", default="passage: ", help="text before a document (default: %(default)r)")
    add("--most-tokens", type=int, default=256, help="most tokens of a text for the encoder (default: %(default)s)")
    args = parser.parse_args()
    if args.host not in LOOPBACK and not args.public:
        raise UserError(
            f"--host {args.host} lets every machine that reaches this address read the corpus, without encryption: use "
            "127.0.0.1, or add --public on a private network"
        )
    # Each number must be 1 or more. Types are compared exactly, because isinstance counts the bool --public as an int.
    numbers = {name: value for name, value in vars(args).items() if type(value) is int}
    for name, value in numbers.items():
        if value < 1 or (name == "port" and value > 65535):
            allowed = "between 1 and 65535" if name == "port" else "1 or more"
            raise UserError(f"--{name.replace('_', '-')} {value} must be {allowed}")
    # These packages are imported after the arguments are checked, because they are an extra.
    try:
        import uvicorn

        from jaxrl_llm.retriever.server import Bounds, application
    except ImportError as error:
        raise UserError(f"serve-retriever needs {error.name}: pip install 'jaxrl_llm[retriever]'") from error
    start = time.perf_counter()
    index = open_index(args)
    bounds = Bounds(
        topk=args.topk,
        most_topk=args.most_topk,
        queries=args.most_queries,
        characters=args.most_characters,
        waiting=args.most_waiting,
        workers=args.workers,
    )
    seconds = time.perf_counter() - start
    address = f"http://{args.host}:{args.port}"
    print(f"{len(index):,} documents after {seconds:.1f} s; listening on {address}", flush=True)
    uvicorn.run(
        application(index.search, bounds),
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def open_index(args: argparse.Namespace) -> Index | DenseIndex:
    """Opens the BM25 index, or with --dense the index of embeddings. Raises: UserError."""
    if not args.dense:
        return Index.open(args.corpus)
    try:
        from jaxrl_llm.retriever.dense import DenseIndex, Encoding
    except ImportError as error:
        raise UserError(f"--dense needs {error.name}: pip install 'jaxrl_llm[dense]'") from error
    encoding = Encoding(args.dense, args.pooling, args.query_prefix, args.passage_prefix, args.most_tokens)
    return DenseIndex.open(args.corpus, encoding)


if __name__ == "__main__":
    run_main(main)
