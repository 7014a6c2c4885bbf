"""A BM25 index of documents: in memory, or of a corpus in a file, which is saved and mapped into memory."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from jaxrl_llm.machine import extras, progress, user_cache
from jaxrl_llm.retriever.documents import Document, DocumentFile

Found: TypeAlias = list[tuple[Document, float]]  # documents and scores of a query, the best first
FORMAT = 1  # version of a saved index, which must rise if a change of this file changes scores


def words(texts: Sequence[str]) -> list[list[str]]:
    """Returns the indexed words of each text: in lower case, without English stop words."""
    # The pattern includes words of one letter, which the library's default excludes.
    pattern = r"(?u)\b\w+\b"
    return _bm25s().tokenize(  # pyright: ignore[reportReturnType]
        list(texts), token_pattern=pattern, stopwords="en", return_ids=False, show_progress=False
    )


class Index:
    """Finds documents by Lucene's BM25 (Robertson and Zaragoza, 2009) with k1 = 1.5 and b = 0.75."""

    def __init__(self, scores: Any, documents: Sequence[Document]):
        """scores: bm25s.BM25 of these documents."""
        self._scores, self._documents = scores, documents

    @classmethod
    def of(cls, documents: Sequence[Document]) -> Index:
        """Makes an index in memory."""
        return cls(_indexed(documents), documents)

    @classmethod
    def open(cls, path: Path) -> Index:
        """Opens the index of a corpus. The first call makes the index and saves it in the user's cache folder.

        Raises: UserError, if the corpus cannot be read.
        """
        folder = user_cache.home() / "retriever" / fingerprint(path)
        if not folder.is_dir():
            _save(path, folder)
        documents = DocumentFile(path, np.load(folder / "places.npy", mmap_mode="r"))
        return cls(_bm25s().BM25.load(folder, mmap=True, show_progress=False), documents)

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        """Returns the best documents of each query, at most `topk`, without documents that have no word of the query.

        Of documents with equal scores, the earlier one comes first.
        """
        return [self._search(query, topk) for query in words(queries)]

    def _search(self, query: list[str], topk: int) -> Found:
        """Returns the best documents of the words of a query."""
        known_words = [word for word in query if word in self._scores.vocab_dict]
        if not known_words:
            return []
        scores = self._scores.get_scores(known_words)
        count = min(topk, len(scores))
        # The scores are partitioned, because sorting millions of scores for a few documents would be slow.
        lowest_score = np.partition(scores, len(scores) - count)[len(scores) - count]
        # All documents with the lowest score are candidates, and the order of documents decides between them.
        candidates = np.flatnonzero((scores >= lowest_score) & (scores > 0))
        best = candidates[np.lexsort((candidates, -scores[candidates]))][:count]
        return [(self._documents[i], float(scores[i])) for i in best.tolist()]


def _indexed(documents: Sequence[Document]) -> Any:
    """Returns the bm25s.BM25 of documents."""
    scores = _bm25s().BM25(k1=1.5, b=0.75, method="lucene")
    with progress.task(f"indexing {len(documents):,} documents"):
        scores.index(words([document.contents for document in documents]), show_progress=False)
    return scores


@cache
def _bm25s() -> ModuleType:
    """Imports bm25s, which only an index needs. Raises: UserError, if it is not installed."""
    extras.require("bm25s", "retriever", "an index of documents")
    bm25s = import_module("bm25s")
    # The import sets the level DEBUG, at which bm25s would print messages.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def fingerprint(path: Path) -> str:
    """Returns a hash of the file of a corpus."""
    digest = hashlib.sha256(str(FORMAT).encode())
    # An error is suppressed, because `DocumentFile` reports it.
    with suppress(OSError), path.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _save(path: Path, folder: Path) -> None:
    """Makes the index of a corpus. The folder gets its final name after all files are written."""
    documents = DocumentFile(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, suffix=".partial"))
    try:
        _indexed(documents).save(partial, show_progress=False)
        np.save(partial / "places.npy", documents.places)
        with suppress(OSError):  # the folder exists if another process was faster
            os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
