"""Files and folders in a bucket, and their copies in the cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from jaxrl_llm.data.rows import load_rows
from jaxrl_llm.errors import MissingHere, PeerLost, UserError
from jaxrl_llm.machine import bucket, disk
from jaxrl_llm.models import hf

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "1+2", "answer": "3"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, **files: str) -> str:
    """Writes objects, and returns the address of their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return f"gs://bucket/{folder.name}"


@pytest.mark.parametrize(("path", "address"), [
    ("gs://b/x", "gs://b/x"), (Path("gs://b/x/"), "gs://b/x"), ("s3:/b/x", "s3://b/x"),
    ("runs/x", ""), ("/gs/x", ""), ("gsx://b", ""),
])  # fmt: skip
def test_an_address_survives_a_path_of_python(path, address):
    assert bucket.address(path) == address


def test_rows_are_read_from_a_bucket_once_and_again_when_they_change(cloud, bucket_server, cache):
    path = f"{write(cloud, rows__jsonl=json.dumps(ROWS[0]))}/rows.jsonl"
    assert load_rows(path).rows == ROWS[:1]
    (copy,) = cache.rglob("rows.jsonl")
    copy.write_text(json.dumps(ROWS[1]))  # it is not fetched again
    assert load_rows(path).rows == ROWS[1:]
    write(cloud, rows__jsonl=json.dumps(ROWS[1]))
    assert load_rows(path).rows == ROWS[1:]
    assert len([*cache.rglob("rows.jsonl")]) == 2
    assert not [*cache.rglob("*.partial")]


def test_a_pattern_in_a_bucket_is_all_its_files_in_order(cloud):
    path = write(cloud, b__jsonl=json.dumps(ROWS[1]), a__jsonl=json.dumps(ROWS[0]), c__txt="")
    assert load_rows(f"{path}/*.jsonl").rows == ROWS
    with pytest.raises(MissingHere, match=r"config\.data\.source = .*/\*\.csv"):
        load_rows(f"{path}/*.csv")


def test_rows_that_are_not_in_the_bucket_are_refused(cloud):
    with pytest.raises(MissingHere, match=r"config\.data\.source = 'gs://bucket/none/rows\.jsonl'"):
        load_rows("gs://bucket/none/rows.jsonl")


def test_a_model_in_a_bucket_is_a_folder_of_the_cache(cloud):
    path = write(cloud, config__json="{}", tokenizer__json="{}", model__safetensors="w", pytorch_model__bin="p")
    described = hf.find_checkpoint(path, weights=False)
    assert sorted(os.listdir(described)) == ["config.json", "tokenizer.json"]
    assert hf.find_checkpoint(path) == described
    assert sorted(os.listdir(described)) == ["config.json", "model.safetensors", "tokenizer.json"]
    write(cloud, model__safetensors="other")
    assert (hf.find_checkpoint(path) / "model.safetensors").read_text() == "other"
    with pytest.raises(MissingHere, match=r"reference\.path = 'gs://bucket/none'"):
        hf.find_checkpoint("gs://bucket/none", "reference.path")


@pytest.mark.parametrize(("error", "kind"), [
    (ConnectionResetError("gone"), PeerLost), (httpx.ConnectError("refused"), PeerLost),
    (type("HttpError", (Exception,), {"code": 503})(), PeerLost),
    (type("HttpError", (Exception,), {"code": 403})(), UserError), (FileNotFoundError("it"), MissingHere),
])  # fmt: skip
def test_a_bucket_that_does_not_answer_is_tried_again_by_launchers(error, kind):
    with pytest.raises(UserError) as caught, bucket.bucket_errors("--workdir", "gs://b/run"):
        raise error
    assert type(caught.value) is kind
    assert "gs://b/run" in str(caught.value)


def test_a_tool_writes_into_no_bucket(refused):
    with refused("--to"):
        disk.check_output("--to", Path("gs://b/x"))


def test_a_missing_package_for_a_bucket_is_named_with_its_command(refused, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with refused("data.source", "pip install 'jaxrl_llm[bucket]'", error=MissingHere):
        bucket.fetch_files("data.source", "s3://b/rows.jsonl")
