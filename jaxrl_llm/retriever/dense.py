"""An index of embeddings: vectors of an encoder such as E5, searched by faiss."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import faiss  # pyright: ignore[reportMissingImports]
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from rich.progress import track

from jaxrl_llm.errors import UserError, describe
from jaxrl_llm.machine import user_cache
from jaxrl_llm.retriever.documents import DocumentFile
from jaxrl_llm.retriever.index import Found, fingerprint

FORMAT = 1  # version of a saved index, which must rise if a change of this file changes scores
BATCH = 64  # documents that are encoded at once


@dataclass(frozen=True)
class Encoding:
    """Settings by which texts become vectors. The defaults are those of E5 (arXiv 2212.03533)."""

    model: str  # folder or hub id of the encoder
    pooling: str = "mean"  # "mean" over the tokens, or "cls" for the first token
    query: str = "query: "  # text before a query
    passage: str = "passage: "  # text before a document
    tokens: int = 256  # limit of a text, beyond which it is cut


class Encoder:
    """Encodes texts as vectors of length 1."""

    def __init__(self, encoding: Encoding):
        """Raises: UserError, if the model cannot be loaded."""
        from transformers import AutoModel, AutoTokenizer

        self._encoding, self._lock = encoding, Lock()
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(encoding.model)
            self._model = AutoModel.from_pretrained(encoding.model).to(self._device).eval()
        except Exception as error:  # transformers raises many kinds of errors
            raise UserError(
                f"--dense {encoding.model} must be the folder or the hub id of an encoder: {describe(error)}"
            ) from error

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Returns vectors [N, D] of queries. Threads take turns, because a tokenizer is not thread-safe."""
        with self._lock:
            return self._encode([self._encoding.query + text for text in texts])

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Returns vectors [N, D] of documents."""
        return self._encode([self._encoding.passage + text for text in texts])

    @torch.inference_mode()
    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        options = dict(padding=True, truncation=True, max_length=self._encoding.tokens, return_tensors="pt")
        tokens = self._tokenizer(list(texts), **options).to(self._device)
        states, mask = self._model(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
        pooled = states[:, 0] if self._encoding.pooling == "cls" else (states * mask).sum(1) / mask.sum(1)
        # The vectors get unit length, so that the inner product is the cosine.
        return torch.nn.functional.normalize(pooled.float(), dim=-1).cpu().numpy()


class DenseIndex:
    """Finds documents by the exact inner product of vectors."""

    def __init__(self, vectors: Any, documents: DocumentFile, encoder: Encoder):
        """vectors: faiss index of all documents."""
        self._vectors, self._documents, self._encoder = vectors, documents, encoder

    @classmethod
    def open(cls, path: Path, encoding: Encoding) -> DenseIndex:
        """Opens the index of a corpus. The first call makes the index and saves it in the user's cache folder.

        Raises: UserError, if the corpus or the model cannot be read.
        """
        encoder, documents = Encoder(encoding), DocumentFile(path)
        settings = repr((FORMAT, encoding, _model_files(Path(encoding.model)))).encode()
        name = fingerprint(path) + "-" + hashlib.sha256(settings).hexdigest()[:16]
        file = user_cache.home() / "retriever" / f"{name}.faiss"
        if not file.is_file():
            _save(documents, encoder, file)
        # The index is mapped, because it may be larger than the memory, and processes share its pages.
        return cls(faiss.read_index(str(file), faiss.IO_FLAG_MMAP), documents, encoder)

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        """Returns the best documents of each query, at most `topk`."""
        scores, numbers = self._vectors.search(self._encoder.queries(queries), min(topk, len(self)))
        rows = zip(scores.tolist(), numbers.tolist(), strict=True)
        return [[(self._documents[i], score) for score, i in zip(*row, strict=True)] for row in rows]


def _model_files(folder: Path) -> list[tuple[str, int, int]]:
    """Returns names, sizes and times of the files in a model's folder; [] for a hub id."""
    if not folder.is_dir():
        return []
    return sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())


def _save(documents: DocumentFile, encoder: Encoder, file: Path) -> None:
    """Encodes a corpus, and saves the vectors. The file gets its final name after it is complete."""
    vectors: Any = None
    for indices in track(list(_batches(len(documents))), description="vectors of the documents", transient=True):
        batch_vectors = encoder.passages([documents[i].contents for i in indices])
        if vectors is None:
            vectors = faiss.IndexFlatIP(batch_vectors.shape[1])
        vectors.add(batch_vectors)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    faiss.write_index(vectors, str(partial))
    # The file is renamed at the end, so that another process sees it complete or not at all.
    partial.rename(file)


def _batches(count: int) -> Iterator[range]:
    """Yields the indices of the documents of each batch."""
    for start in range(0, count, BATCH):
        yield range(start, min(start + BATCH, count))
