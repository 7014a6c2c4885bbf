"""The model card of a run, and pushes that cannot work. tests/programs/test_train.py pushes the folder of a run."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from fake_hub import online  # noqa: F401 (a fixture)
from huggingface_hub import ModelCard

from jaxrl_llm.config.load import load
from jaxrl_llm.errors import UserError
from jaxrl_llm.session import model_card
from jaxrl_llm.tools import hub

ROOT = Path(__file__).parents[2]


def test_a_push_that_cannot_work_is_refused_before_anything_is_done(monkeypatch, online):  # noqa: F811
    def opened(name: str, *words: str) -> None:
        with pytest.raises(UserError) as caught:
            hub.open_repo(name, private=False)
        assert [word for word in words if word not in str(caught.value)] == []

    opened("sums", "ORG/NAME")
    opened("lab/a b", "ORG/NAME")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    opened("lab/sums", "--push-to lab/sums", "http://127.0.0.1:9")
    online(status=401)
    opened("lab/sums", "--push-to lab/sums", "http://127.0.0.1:", "401")
    monkeypatch.setattr(hub, "get_token", lambda: None)
    opened("lab/sums", "--push-to", "HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    opened("lab/sums", "HF_HUB_OFFLINE")


def test_a_card_that_the_hub_refuses_ends_a_push_in_one_line(tmp_path, monkeypatch, online):  # noqa: F811
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("Invalid metadata in README.md.\n- base_model is not valid")

    online()
    (tmp_path / "README.md").write_text("A card.")
    monkeypatch.setattr(hub.HfApi, "upload_folder", refuse)
    with pytest.raises(UserError, match=r"--push-to lab/sums.* Invalid metadata in README.md. - base_model"):
        hub.push(tmp_path, "lab/sums", "message")


def test_a_card_of_many_evaluations_has_a_few_and_the_base_of_a_hub(tmp_path):
    config = load(ROOT / "configs" / "recipes" / "qwen2_5_0_5b_gsm8k.py")
    rows = [{"step": i, "eval/accuracy": i / 500, "reward/mean": None} for i in range(501)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = model_card.card(tmp_path, config.to_dict(), {"model.path": "1", "data.source": "2", "eval.source": "3"})
    steps = [int(line.split("|")[1]) for line in text.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert (len(steps), steps[0], steps[-1]) == (20, 0, 500)
    assert "| step | accuracy |\n" in text  # a reward that is never there has no column
    assert ModelCard(text).data.base_model == "Qwen/Qwen2.5-0.5B-Instruct"
    assert "converted by `gsm8k.convert`, SHA-256 `2`" in text
    for folder in ("~/model", "./model", "/a/model", "a/b/model"):
        with config.unlocked():
            config.model.path = folder
        text = model_card.card(tmp_path, config.to_dict(), {"model.path": "1", "data.source": "2"})
        assert ModelCard(text).data.base_model is None
