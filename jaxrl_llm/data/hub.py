"""Reads rows with the package `datasets`: data sets of the hub, and folders written by `save_to_disk`."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxrl_llm.config.names import is_call
from jaxrl_llm.errors import MissingHere, UserError

ID = re.compile(r"([\w.-]+/[\w.-]+?)(?::([\w.-]+))?(?:@([\w.-]+))?")  # owner/name:configuration@split
FILE_ENDING = re.compile(r"\.[a-z]\w*$")
SAVED = ("dataset_info.json", "dataset_dict.json")  # each folder of `save_to_disk` has one of these files


def is_hub_source(source: str) -> bool:
    """Returns whether a source is a data set of the hub, such as openai/gsm8k:main@test, or a saved folder."""
    if is_call(source):  # its text may be too long for a path
        return False
    folder, _ = _split_source(source)
    if folder.exists():
        return any((folder / name).is_file() for name in SAVED)
    hub_id = ID.fullmatch(source)
    # A source such as org/rows.csv is a missing file, and no data set.
    return bool(hub_id) and not FILE_ENDING.search(hub_id[1]) and not source.startswith(".")


def check(field: str, source: str) -> bool:
    """Checks a source that is a data set of the hub or a saved folder, and returns whether it is one.

    Raises: UserError, naming the field, if the package `datasets` is missing, or a saved folder has no such split.
    """
    if not is_hub_source(source):
        return False
    if not find_spec("datasets"):
        download = ""
        if hub_id := ID.fullmatch(source):
            command = f"hf download {hub_id[1]} --repo-type dataset --local-dir data"
            download = f", or download its files ({command}) and name a file"
        raise MissingHere(f"{field} = {source!r} needs the package datasets: pip install 'jaxrl_llm[hub]'{download}")
    _check_split(f"{field} = {source!r}", *_split_source(source))
    return True


def _check_split(subject: str, folder: Path, split: str) -> None:
    """Raises: UserError, naming the splits of a saved folder, if it does not have `split` ("" = train).

    subject: field and source, for the error.
    """
    splits: list[str] | None = None
    # `load` reports errors of a folder that cannot be read.
    with suppress(OSError, ValueError, KeyError):
        splits = list(json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"])
    if splits and (split or "train") not in splits:
        choices = " or ".join(f"{folder}@{name}" for name in splits)
        raise UserError(f"{subject}: the folder has no split {split or 'train'!r}; use {choices}")
    if split and not splits and (folder / "dataset_info.json").is_file():
        raise UserError(f"{subject}: the folder has no splits, but the source names @{split}: use {folder}")


def load(source: str) -> list[dict[str, Any]]:
    """Loads the rows of one split, which is "train" for a source without @split. Raises: UserError, in one line."""
    import datasets

    folder, split = _split_source(source)
    _check_split(f"data set {source}", folder, split)
    try:
        if folder.exists():
            dataset = datasets.load_from_disk(str(folder))
            if isinstance(dataset, datasets.DatasetDict):
                dataset = dataset[split or "train"]
        else:
            hub_id = ID.fullmatch(source)
            assert hub_id
            dataset = datasets.load_dataset(hub_id[1], hub_id[2], split=hub_id[3] or "train")
        return dataset.to_list()
    except Exception as error:
        # The package raises many types of errors, for the network, the hub and files.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "name a folder of save_to_disk, and its split as FOLDER@SPLIT"
        if not folder.exists():
            fix = "check the name (owner/name:configuration@split) and the network, or use a file of rows"
        raise UserError(f"data set {source} cannot be loaded ({reason[:200]}): {fix}") from error


def _split_source(source: str) -> tuple[Path, str]:
    """Returns folder and split of FOLDER@SPLIT; the split is "" if the source has none."""
    path, _, split = source.rpartition("@") if "@" in source else (source, "", "")
    return Path(path).expanduser(), split
