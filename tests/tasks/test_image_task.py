"""The embedded task and model of images: rows, runs, and what a config of it may ask for."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from ml_collections import ConfigDict
from PIL import Image
from safetensors.numpy import load_file
from test_steps import written

from jaxrl_llm import evaluate, sft, train
from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import load as configs
from jaxrl_llm.data import image_format
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.formats import Columns
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.structs import Prompt
from jaxrl_llm.tasks import digits_in_pictures as task
from jaxrl_llm.tools.report import page

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "jaxrl_llm" / "assets" / "pictures"
SOURCES = ("train", "held_out", "demonstrations")


@pytest.fixture(scope="module", autouse=True)
def few_problems():
    """Makes a hundred problems to learn from and 200 demonstrations, not thousands of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "TRAIN", 100)
        patch.setattr(task, "DEMONSTRATIONS", 200)
        yield


def question_of(row: dict[str, Any]) -> str:
    return row["prompt"][0]["content"].rpartition(">")[2]


def read(cell: np.ndarray) -> int:
    """The digit whose dots are those of a cell [28, 28, 3], wherever they are."""
    gray = cell.astype(float).mean(axis=2)
    dark = gray < (gray.min() + gray.max()) / 2
    top, left = (int(np.flatnonzero(dark.any(axis=axis))[0]) for axis in (1, 0))
    bottom, right = (int(np.flatnonzero(dark.any(axis=axis))[-1]) for axis in (1, 0))
    dots = dark[top + 1 : bottom + 1 : 3, left + 1 : right + 1 : 3]
    known = []
    for digit in range(10):
        glyph = np.array([[dot == "#" for dot in line[6 * digit : 6 * digit + 5]] for line in task.FONT])
        glyph = glyph[:, glyph.any(axis=0)]
        if glyph.shape == dots.shape and (glyph == dots).all():
            known.append(digit)
    (digit,) = known
    return digit


def digits_of(row: dict[str, Any]) -> list[int]:
    digits = []
    for image in row["images"]:
        pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
        for top in range(0, len(pixels), 28):
            digits += [read(pixels[top : top + 28, left : left + 28]) for left in range(0, pixels.shape[1], 28)]
    return digits


@cache
def rows_of(name: str) -> list[dict[str, Any]]:
    return getattr(task, name)()


def test_rows_are_the_same_in_each_call_and_process():
    program = (
        "import hashlib, pickle; from jaxrl_llm.tasks import digits_in_pictures as task; task.TRAIN = 100; "
        "print(hashlib.sha256(pickle.dumps(task.train())).hexdigest())"
    )
    environment = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    rows = task.train()
    assert rows == rows_of("train")
    assert other.stdout.strip() == hashlib.sha256(pickle.dumps(rows)).hexdigest()


def test_answers_are_those_of_the_digits_that_the_images_show():
    rows = [row for name in SOURCES for row in rows_of(name)[:60]]
    for row in rows:
        digits = digits_of(row)
        assert digits == row["digits"] and 3 <= len(digits) <= 6
        assert row["answer"] == str({"max": max, "min": min}[question_of(row)](digits))
        assert digits.count(int(row["answer"])) == 1
        assert row["prompt"][0]["content"].count("<image>") == len(row["images"])
    assert {len(row["images"]) for row in rows} == {1, 2}


def test_a_demonstration_thinks_or_says_the_first_digit():
    rows = rows_of("demonstrations")
    thought = [row for row in rows if row["completion"].startswith("<")]
    assert len(thought) == 0.3 * len(rows)
    assert all(row["completion"] == f"<{','.join(map(str, row['digits']))}>{row['answer']}" for row in thought)
    quick = [row for row in rows if not row["completion"].startswith("<")]
    assert all(row["completion"] == str(row["digits"][0]) for row in quick)
    scores = task.accuracy([row["completion"] for row in thought], [row["answer"] for row in thought])
    assert scores == [1.0] * len(thought)


def test_no_image_is_in_two_sources():
    files = [image for name in SOURCES for row in rows_of(name) for image in row["images"]]
    assert len(set(files)) == len(files)


def test_the_question_and_the_images_both_decide():
    rows = rows_of("held_out")
    for row in rows:
        other = {"max": min, "min": max}[question_of(row)](row["digits"])
        assert str(other) != row["answer"]
    rights = [row["answer"] for row in rows]
    # What needs no image, or one digit alone.
    best = max(np.mean([x == str(guess) and question_of(row) == which for x, row in zip(rights, rows, strict=True)])
               for guess in range(10) for which in ("max", "min"))  # fmt: skip
    assert 2 * best < 0.2
    assert np.mean([x == str(row["digits"][0]) for x, row in zip(rights, rows, strict=True)]) < 0.3


def config_of(name: str = "pictures", **changes: Any):
    config = configs.load(ROOT / "configs" / f"{name}.py")
    short = {
        "num_steps": 2, "optim.warmup_steps": 0, "prompts_per_step": 4, "checkpoint.every": 1, "checkpoint.keep": 9,
        "log.to": (), "eval": None, "mesh.fsdp": 1,
    }  # fmt: skip
    if name == "pictures":
        short |= {"prompts_per_update": 4, "group_size": 4, "health.self_test": False, "log.completions_every": 1}
    for field, value in (short | changes).items():
        configs.override(config, field, str(value))
    return config.lock()


def run(workdir: Path, **changes: Any) -> Path:
    for _ in train.steps(config_of(**changes), workdir):
        pass
    return workdir


def changed(workdir: Path) -> tuple[bool, bool]:
    """Whether the export has other tensors of the tower, and of the text model, than the embedded model."""
    before, after = (load_file(folder / "model.safetensors") for folder in (FOLDER, workdir / "hf"))
    assert before.keys() == after.keys()
    same = {name: (before[name] == after[name]).all() for name in before}
    tower = [x for name, x in same.items() if "visual." in name]
    assert 0 < len(tower) < len(same)
    text = [x for name, x in same.items() if "visual." not in name]
    assert all(tower) or not any(tower)
    return not all(tower), not all(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing interrupts."""
    return run(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
def test_tower_and_text_learn_and_samples_name_their_images(whole):
    assert changed(whole) == (True, True)
    first = written(whole)[0]
    assert first["sampler/gap_max"] < 1e-4 and first["kl/ref"] < 1e-6
    sample = (whole / "completions.jsonl").read_text().splitlines()[0]
    assert re.search(r"digits_in_pictures\.train row \d+: image 1, \d+ x \d+", sample)
    # And the report shows the images that the model saw.
    row = task.train()[int(re.search(r"row (\d+)", sample)[1]) - 1]
    urls, text = json.loads(sample)["pictures"], page.render([whole])
    for url, image in zip(urls, row["images"], strict=True):
        assert f'<img src="{url}" alt="digits_in_pictures.train row' in text
        seen, source = (Image.open(io.BytesIO(x)) for x in (base64.b64decode(url.partition("base64,")[2]), image))
        difference = np.abs(np.subtract(np.asarray(seen), np.asarray(source.convert("RGB")), dtype=np.float32))
        assert seen.size == source.size and difference.mean() < 10


@pytest.mark.slow
def test_a_frozen_tower_stays_as_it_is(tmp_path):
    config = configs.load(ROOT / "configs" / "sft.py")
    fields = {"model.path": str(FOLDER), "model.vision": "frozen", "data.source": "test_image_task.few"}
    sizes = {"num_steps": 1, "prompts_per_step": 4, "rollout.max_completion_tokens": 16, "optim.warmup_steps": 0}
    config.update_from_flattened_dict(fields | sizes | {"eval": None, "log.to": (), "mesh.fsdp": 1})
    list(sft.steps(config, tmp_path / "run"))
    assert changed(tmp_path / "run") == (False, True)


def with_adapters(**changes: Any):
    config = config_of(**changes).copy_and_resolve_references().unlock()
    config.adapters = ConfigDict(dict(name="lora", rank=2, alpha=4.0, rs=False, targets="_proj"))
    return config.lock()


@pytest.mark.slow
def test_adapters_learn_beside_a_frozen_tower_and_not_one_that_learns(tmp_path, refused):
    for _ in train.steps(with_adapters(**{"model.vision": "frozen", "num_steps": 1}), tmp_path / "run"):
        pass
    assert changed(tmp_path / "run") == (False, True)
    with refused("config.model.vision"):
        next(train.steps(with_adapters(), tmp_path / "other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_the_embedded_model_has_the_accuracy_of_its_banner(monkeypatch, capsys):
    words = ["evaluate", "--model", str(FOLDER), "--task", "digits_in_pictures", "--max-completion-tokens", "16"]
    monkeypatch.setattr(sys, "argv", [*words, "--json", "--problems", "1000"])
    evaluate.main()
    accuracy = json.loads(capsys.readouterr().out)["accuracy"]
    for name in ("pictures", "pictures_sft"):
        text = (ROOT / "configs" / f"{name}.py").read_text()
        (banner,) = re.findall(r"([\d.]+) % (?:before|at the end)", text)
        assert float(banner) / 100 == pytest.approx(accuracy, abs=0.002) and float(banner) < 40


def few() -> list[dict[str, Any]]:
    """Some demonstrations."""
    return rows_of("demonstrations")[:64]


NEW = {
    "data.source": "test_image_task.few",
    "model.hidden_size": 32, "model.num_hidden_layers": 1, "model.intermediate_size": 32,
    "model.vision_config.hidden_size": 16, "model.vision_config.intermediate_size": 16, "mesh.fsdp": 1,
}  # fmt: skip


@pytest.mark.slow
def test_a_new_model_reads_images_and_learns_them(tmp_path):
    steps = list(sft.steps(config_of("pictures_sft", **NEW), tmp_path / "run"))
    assert [record["step"] for record in steps] == [1, 2]
    folder = tmp_path / "run" / "hf"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    vision = hf.load_model(folder).cfg.vision
    assert vision and (vision.depth, vision.width, vision.window, vision.full_layers) == (2, 16, 2, (1,))
    form = image_format.read_format(folder)
    assert form and form.grid(28, 28) == (1, 1) and form.grid(168, 56) == (2, 6)
    # Its checkpoint knows the model that it began with.
    list(sft.steps(config_of("pictures_sft", **NEW), tmp_path / "run"))


WRONG = [
    ("pictures_sft", {"model.vision_config.hidden_size": 20}, "config.model.vision_config.hidden_size"),
    ("pictures_sft", {"model.vision_config.depth": 0}, "config.model.vision_config.depth"),
    ("pictures_sft", {"model.path": "somewhere"}, "config.model."),
    ("pictures_sft", {"model.vision_config": None}, "row 1"),
    ("pictures_sft", {"data.source": "test_image_task.texts"}, "config.model.vision_config"),
    ("pictures", {"data.max_prompt_tokens": 4}, "digits_in_pictures.train"),
    ("pictures", {"model.path": str(ROOT / "jaxrl_llm" / "assets" / "arithmetic")}, "row 1"),
]


def texts() -> list[dict[str, Any]]:
    """A demonstration without images."""
    return [{"prompt": [{"role": "user", "content": "1+1"}], "completion": "2", "answer": "2"}] * 8


@pytest.mark.parametrize(("name", "changes", "word"), WRONG, ids=[next(iter(changes)) for _, changes, _ in WRONG])
def test_what_does_not_fit_is_refused(name, changes, word, tmp_path, refused):
    program = sft if name.endswith("sft") else train
    with refused(word):
        next(program.steps(config_of(name, **changes), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_equal_limits_of_pixels_are_refused(tmp_path):
    # The line has the name of a temporary folder.
    with pytest.raises(UserError, match=r"config\.data\.min_pixels"):
        next(sft.steps(config_of("pictures_sft", **{"data.max_pixels": 784}), tmp_path / "run"))


def test_a_tower_is_refused_next_to_a_folder(refused):
    config = configs.load(ROOT / "configs" / "sft.py")
    config.model.path = "somewhere"
    config.model.vision_config = {"depth": 2, "hidden_size": 16, "num_heads": 4, "intermediate_size": 16}
    with refused("config.model.vision_config.depth"):
        recipes.read_sft(config)


def prompts_of(folder: Path, count: int) -> data.Prompts:
    tokenizer, columns = hf.load_tokenizer(folder), Columns(images=image_format.read_format(folder))
    limits = dict(max_prompt_tokens=16, overlong="error")
    dataset = data.read("digits_in_pictures.held_out", tokenizer, columns=columns, problems=count, **limits)
    return data.make_prompts(dataset, range(count), tokenizer.pad_token_id)


@pytest.mark.parity
@pytest.mark.needs("torch")
def test_transformers_loads_the_embedded_model_and_computes_the_same(tmp_path):
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    theirs, loading = AutoModelForImageTextToText.from_pretrained(FOLDER, output_loading_info=True)
    assert not (loading["missing_keys"] or loading["unexpected_keys"])
    processor = Qwen2VLImageProcessorPil.from_pretrained(FOLDER)
    model = hf.load_model(FOLDER)
    params = hf.load_params(FOLDER, model, tiny.mesh_of((1, 1, 1)))
    prompts, rows = prompts_of(FOLDER, 16), rows_of("held_out")[:16]
    hidden, _ = model.prefill(params, Prompt(prompts.tokens, prompts.mask, prompts.images))
    logits = np.asarray(model.logits(params, hidden))
    for i, row in enumerate(rows):
        row_images = [Image.open(io.BytesIO(image)).convert("RGB") for image in row["images"]]
        inputs = processor(row_images, return_tensors="pt")
        tokens = torch.tensor(prompts.tokens[i][prompts.mask[i]][None])
        kinds = (tokens == theirs.config.image_token_id).int()
        with torch.no_grad():
            expected = theirs(input_ids=tokens, mm_token_type_ids=kinds, **inputs).logits[0].numpy()
        ours, allowed = logits[i, -1], np.isfinite(logits[i, -1])
        assert allowed.sum() == len(allowed) - 2
        np.testing.assert_allclose(ours[allowed], expected[-1][allowed], atol=2e-4)
