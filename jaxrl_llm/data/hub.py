"""Rows that the package `datasets` reads, from data sets of the hub and from folders of `save_to_disk`."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import MissingHere, UserError

ID = re.compile(r"([\w.-]+/[\w.-]+?)(?::([\w.-]+))?(?:@([\w.-]+))?")  # owner/name:configuration@split
# The ending of a file's name.
FILE = re.compile(r"\.[a-z]\w*$")
SAVED = ("dataset_info.json", "dataset_dict.json")  # one of them is in each folder of `save_to_disk`


def names_one(source: str) -> bool:
    """Returns whether a source is a data set of the hub, such as openai/gsm8k:main@test, or a saved folder."""
    folder, _ = _folder(source)
    if folder.exists():
        return any((folder / name).is_file() for name in SAVED)
    name = ID.fullmatch(source)
    # org/rows.csv is a file that is missing, and no data set.
    return bool(name) and not FILE.search(name[1]) and not source.startswith(".")


def check(field: str, source: str) -> bool:
    """Returns `names_one(source)`.

    Raises: UserError, naming the field, if that needs a package that is missing, or a saved folder has no such split.
    """
    if not names_one(source):
        return False
    if not find_spec("datasets"):
        fetch = ""
        if name := ID.fullmatch(source):
            fetch = f", or fetch its files (hf download {name[1]} --repo-type dataset --local-dir data) and name them"
        raise MissingHere(f"{field} = {source!r} needs the package datasets: pip install 'jaxrl_llm[hub]'{fetch}")
    _check_split(f"{field} = {source!r}", *_folder(source))
    return True


def _check_split(what: str, folder: Path, split: str) -> None:
    """Raises: UserError, naming the splits of a saved folder, if the one that is asked for is not among them."""
    splits: list[str] | None = None
    with suppress(OSError, ValueError, KeyError):
        # No folder, or `load` reports the error.
        splits = list(json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"])
    if splits and (split or "train") not in splits:
        some = " or ".join(f"{folder}@{name}" for name in splits)
        raise UserError(f"{what}: the folder has no split {split or 'train'!r}: give {some}")
    if split and not splits and (folder / "dataset_info.json").is_file():
        raise UserError(f"{what}: the folder has no splits: give {folder}")


def load(source: str) -> list[dict[str, Any]]:
    """Loads the rows of one split; without @split, of "train". Raises: UserError, in one line."""
    import datasets

    folder, split = _folder(source)
    _check_split(f"data set {source}", folder, split)
    try:
        if folder.exists():
            dataset = datasets.load_from_disk(str(folder))
            if isinstance(dataset, datasets.DatasetDict):
                dataset = dataset[split or "train"]
        else:
            name = ID.fullmatch(source)
            assert name
            dataset = datasets.load_dataset(name[1], name[2], split=name[3] or "train")
        return dataset.to_list()
    except Exception as error:
        # The package raises many types of errors, for the network, the hub and files.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "give a folder of save_to_disk, and its split as FOLDER@SPLIT"
        if not folder.exists():
            fix = "check the name (owner/name:configuration@split) and the network, or give a file"
        raise UserError(f"data set {source} cannot be loaded ({reason[:200]}): {fix}") from error


def _folder(source: str) -> tuple[Path, str]:
    """Splits FOLDER@SPLIT."""
    path, _, split = source.rpartition("@") if "@" in source else (source, "", "")
    return Path(path).expanduser(), split
