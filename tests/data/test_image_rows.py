"""Images in rows: the columns of three trainers, broken rows, and the batches of a run."""

from __future__ import annotations

import base64
import io
import json
import re
import string
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from PIL import Image, ImageFile
from transformers import Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from jaxrl_llm import recipe as recipes
from jaxrl_llm import sft
from jaxrl_llm.config.load import load
from jaxrl_llm.data import order
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.formats import Columns
from jaxrl_llm.data.image_columns import chat_text, printable_value
from jaxrl_llm.data.image_format import read_format
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf, new_model
from jaxrl_llm.rollout import grading, reward_calls, scores
from jaxrl_llm.structs import Rewards
from jaxrl_llm.tools.report import samples

START, PAD, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}" + START + PAD + END + "{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def write_folder(folder: Path, template: str = TEMPLATE) -> Path:
    """Writes the config, the tokenizer and the preprocessor of a tiny Qwen2.5-VL, without weights."""
    texts = [{"prompt": string.printable + "äé"}]
    new_model.write_folder(folder, SIZES | {"intermediate_size": 8}, texts, "completion")
    tokenizer = hf.load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, PAD, END, VIDEO]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen2_5_vl"}
    config["vision_config"] = {"patch_size": 14, "spatial_merge_size": 2, "window_size": 56}
    config |= {"image_token_id": tokenizer.convert_tokens_to_ids(PAD), "vocab_size": len(tokenizer)}
    config["video_token_id"] = tokenizer.convert_tokens_to_ids(VIDEO)
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 400, "patch_size": 14, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return hf.load_tokenizer(folder)


@pytest.fixture(scope="module")
def form(folder):
    form = read_format(folder)
    assert form
    return form


def pillow(width: int = 56, height: int = 84, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def encoded(image: Image.Image | None = None, kind: str = "PNG") -> bytes:
    (image or pillow()).save(file := io.BytesIO(), kind)
    return file.getvalue()


def read(rows: list[dict[str, Any]], tokenizer, form, monkeypatch, **more: Any) -> data.Dataset:
    """Reads rows of a function of the user's."""
    module = type(sys)("mine")
    module.rows = lambda: rows  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "mine", module)
    columns = Columns(images=form, **more.pop("columns", {}))
    limits = {"max_prompt_tokens": 999, "overlong": "error"} | more
    return data.read("mine.rows", tokenizer, columns=columns, **limits)


def text_of(dataset: data.Dataset, tokenizer, i: int = 0) -> str:
    """The text of a prompt, with one placeholder for each image."""
    assert dataset.images
    ids = tiny.collapsed(dataset.ids[i], dataset.images.grids(i), dataset.images.form.image_token)
    return tokenizer.decode(ids)


ONE = START + PAD + END
ASKED = [{"role": "user", "content": "Which?"}]
PART = {"type": "image"}


ROWS = [  # a row, whose numbers are images; columns; and the prompt
    ({"problem": "Is <image> or <image>?", "images": [0, 1]}, {}, f"Is {ONE} or {ONE}?"),
    ({"problem": "<image>Which?", "images": [0]}, {"format_prompt": "Q: {{ content }} Why?"}, f"Q: {ONE}Which? Why?"),
    ({"problem": "Which?", "images": []}, {}, "Which?"),
    ({"problem": "Which?", "images": None}, {}, "Which?"),
    ({"question": "<image>", "photos": [0]}, {"prompt_column": "question", "image_column": "photos"}, ONE),
    ({"prompt": [{"role": "user", "content": "<image><image>?"}], "images": [0, 1]}, {}, f"{ONE}{ONE}?"),
    ({"prompt": ASKED, "image": 0}, {}, f"{ONE}Which?"),
    ({"prompt": ASKED, "images": [0, 1]}, {}, f"{ONE}{ONE}Which?"),
    ({"prompt": ASKED, "photo": 0}, {"image_column": "photo"}, f"{ONE}Which?"),
    ({"prompt": [{"role": "user", "content": [{"text": "A"}, PART, "B"]}], "images": [0]}, {}, f"A{ONE}B"),
    ({"prompt": [{"role": "user", "content": [PART | {"image": 0, "text": None}]}]}, {}, ONE),
    ({"prompt": ASKED, "image": None, "images": [0]}, {}, f"{ONE}Which?"),
    ({"prompt": [{"role": "user", "content": "an <image> tag"}]}, {}, "an <image> tag"),
]


@pytest.mark.parametrize("how", ["bytes", "dict", "struct", "path", "image", "url", "pillow", "array"])
def test_rows_of_three_trainers_become_prompts(how, tokenizer, form, tmp_path, monkeypatch):
    def image(i: int) -> Any:
        drawn = pillow(seed=i)
        content = encoded(drawn)
        (tmp_path / f"{i}.png").write_bytes(content)
        return {
            "bytes": content,
            "dict": {"bytes": content},
            "struct": {"bytes": content, "path": None},
            "path": f"{i}.png",
            "image": {"type": "image", "image": str(tmp_path / f"{i}.png")},
            "url": f"data:image/png;base64,{base64.b64encode(content).decode()}",
            "pillow": drawn,
            "array": {"bytes": content},
        }[how]

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(x) for key, x in value.items()}
        if isinstance(value, list):
            return [filled(x) for x in value]
        return image(value) if isinstance(value, int) else value

    for shape, columns, expected in ROWS:
        row, count = filled(shape), expected.count(PAD)
        if how == "array" and isinstance(row.get("images"), list):
            cells = np.empty(len(row["images"]), object)
            cells[:] = row["images"]
            row["images"] = cells
        dataset = read([row], tokenizer, form, monkeypatch, columns=columns | {"image_folder": str(tmp_path)})
        assert text_of(dataset, tokenizer) == f"<|user|>{expected}<|assistant|>"
        prompts = data.make_prompts(dataset, [0], tokenizer.pad_token_id)
        assert dataset.images and dataset.images.count == count
        assert (prompts.tokens == form.image_token).sum() == 6 * count
        assert (prompts.images is None) == (count == 0)
        if prompts.images:
            assert prompts.images.patches.shape == (1, count * 4 * 4 * 2, 588)
        for number in range(count):
            real = prompts.images.patches[0, prompts.images.segments[0] == number + 1]
            pixels = np.asarray(pillow(seed=number))
            assert {patch.tobytes() for patch in real} == {
                pixels[r : r + 14, c : c + 14].transpose(2, 0, 1).tobytes()
                for r in range(0, 84, 14)
                for c in range(0, 56, 14)
            }


def bomb() -> bytes:
    """A PNG that says that it has 10^10 pixels."""
    content = bytearray(encoded())
    content[16:24] = struct.pack(">II", 100_000, 100_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


GOOD = encoded()


def chat(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def asked(*images: Any) -> dict[str, Any]:
    return {"prompt": ASKED, "images": list(images)}


BROKEN = {  # a row, and what the line names beside it
    "missing file": (asked("gone.png"), "gone.png"),
    "out of the folder": (asked("../x.png"), "data.image_folder"),
    "absolute path": (asked("/etc/x.png"), "data.image_folder"),
    "zero byte in a path": (asked("a\0b"), ""),
    "broken bytes": (asked(b"\x89PNG broken"), "image 1"),
    "cut short, PNG": (asked(GOOD[:-300]), "image 1"),
    "empty dict": (asked({"bytes": None, "path": None}), "image 1"),
    "no RGB": (asked(Image.new("La", (40, 40))), "mode La"),
    "16 bits": (asked(encoded(Image.fromarray(np.full((40, 40), 2**12, np.uint16)))), "8 bits"),
    "floats": (asked(Image.new("F", (40, 40))), "8 bits"),
    "too narrow": (asked(encoded(pillow(2, 500))), "2 x 500 pixels"),
    "no size in the limits": (asked(encoded(pillow(5, 600))), "data.max_pixels"),
    "zero-size": (asked(Image.new("RGB", (0, 9))), "0 x 9 pixels"),
    "decompression bomb": (asked(bomb()), "image 1"),
    "address": (asked("https://a.example/b.png"), "image 1"),
    "broken base64": (asked("data:image/png;base64,A"), "base64"),
    "other letters in base64": (asked("data:;base64,#" + base64.b64encode(GOOD).decode()), "base64"),
    "no base64": (asked("data:image/png,xyz"), "base64"),
    "one mark, two images": ({"problem": "<image>", "images": [GOOD, GOOD]}, "2 and 1"),
    "two marks, one image": ({"prompt": chat("<image><image>"), "images": [GOOD]}, "1 and 2"),
    "a mark, no image": ({"problem": "<image>", "images": []}, "0 and 1"),
    "images, no mark": ({"problem": "x", "images": [GOOD]}, "'problem'"),
    "a part, no image": ({"prompt": chat([PART])}, ""),
    "in both places": ({"prompt": chat([PART | {"image": GOOD}]), "images": [GOOD]}, "column"),
    "placeholder in the text": ({"prompt": chat(f"a {PAD} b"), "images": [GOOD]}, "2 times"),
    "placeholder in a text row": ({"prompt": f"a {PAD} b"}, "1 times"),
    "video placeholder": ({"prompt": chat(f"a {VIDEO}")}, VIDEO),
    "assistant": ({"prompt": [*ASKED, *chat([PART], "assistant")], "images": [GOOD]}, "assistant"),
    "no user": ({"prompt": chat("x", "system"), "images": [GOOD]}, "user"),
    "text prompt": ({"prompt": "Which?", "images": [GOOD]}, "data.format_prompt"),
    "images no list": ({"prompt": ASKED, "images": GOOD}, "'images'"),
    "images a text": ({"prompt": ASKED, "images": "a.png"}, "'images'"),
    "own limits": (asked({"image": "x", "max_pixels": 9}), "max_pixels"),
    "None among them": (asked(GOOD, None), "image 2"),
    "a number": (asked(GOOD, 7), "image 2"),
    "an array": ({"prompt": ASKED, "image": np.zeros((9, 9, 3), np.uint8)}, "image 1"),
    "video": ({"prompt": ASKED, "videos": ["a.mp4"]}, "videos"),
    "video dict": (asked({"type": "video", "path": "a.mp4"}), "'video'"),
    "part with other keys": ({"prompt": chat([PART | {"image": b"x", "detail": "low"}])}, "detail"),
    "audio part": ({"prompt": chat([{"type": "audio"}])}, "audio"),
    "content is a number": ({"prompt": chat(7), "images": [GOOD]}, "7"),
    "two columns": ({"prompt": ASKED, "images": [GOOD], "image": GOOD}, "'image'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_refused_by_its_number(name, tokenizer, form, tmp_path, monkeypatch, refused):
    row, word = BROKEN[name]
    if name == "no size in the limits":
        form = replace(form, max_pixels=28 * 28 * 3)
    good = {"prompt": ASKED, "image": None, "images": None}
    with refused("mine.rows row 2", word) as caught:
        read([good, row], tokenizer, form, monkeypatch, columns={"image_folder": str(tmp_path)})
    line = str(caught.value)
    assert "\\x89" not in line and len(line) < 400


@pytest.mark.parametrize("kind", ["JPEG", "BMP"])
def test_an_image_that_is_cut_short_is_refused(kind, tokenizer, form, monkeypatch):
    # How many bytes are missing depends on the version of Pillow.
    with pytest.raises(UserError, match=r"^mine.rows row 1: image 1 .*truncated"):
        read([asked(encoded(kind=kind)[:-300])], tokenizer, form, monkeypatch)


def test_a_text_model_refuses_images_and_reads_other_images(tokenizer, monkeypatch, refused):
    for row in ({"images": [GOOD]}, {"image": GOOD}, {"image": {"bytes": GOOD}}, {"images": ["a.png"]}):
        with refused("mine.rows row 1 has images"):
            read([{"prompt": ASKED} | row], tokenizer, None, monkeypatch)
    with refused("mine.rows row 1"):
        read([{"prompt": chat([PART])}], tokenizer, None, monkeypatch)
    row = {"prompt": chat("an <image>"), "image": "ubuntu:24.04", "images": []}
    dataset = read([row], tokenizer, None, monkeypatch)
    assert (dataset.rows, dataset.images) == ([row], None)


def test_a_template_that_writes_no_images_is_refused(tmp_path, form, monkeypatch, refused):
    tokenizer = hf.load_tokenizer(write_folder(tmp_path, TEMPLATE.replace(PAD, "")))
    with refused("row 1", PAD):
        read([{"prompt": ASKED, "image": GOOD}], tokenizer, form, monkeypatch)


def rows_of_files(folder: Path, sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows with no, one or two images of these sizes, in files below a folder."""
    for i, size in enumerate(sizes):
        (folder / f"{i}.png").write_bytes(encoded(pillow(*size, seed=i)))
    rows = [{"prompt": ASKED, "images": [f"{i}.png"], "answer": str(i)} for i in range(len(sizes))]
    return [*rows, {"prompt": ASKED, "images": ["0.png", "1.png"]}, {"prompt": ASKED, "images": []}, {"prompt": "text"}]


SIDES = [(56, 84), (140, 28), (28, 28)]


@pytest.fixture
def dataset(tokenizer, form, tmp_path, monkeypatch):
    columns = {"image_folder": str(tmp_path)}
    return read(rows_of_files(tmp_path, SIDES), tokenizer, form, monkeypatch, columns=columns)


def test_a_batch_is_its_rows_whatever_is_beside_them(dataset, tokenizer, form):
    pad = tokenizer.pad_token_id
    whole = data.make_prompts(dataset, range(6), pad)
    assert whole.images
    # One window of 2 x 2 tokens has 16 patches.
    assert whole.images.patches.shape == (6, dataset.images.patches, 588) == (6, (2 + 3) * 16, 588)
    for order_of_rows in ([5, 0], [3, 3, 1], [4], [2, 3, 4, 5, 0, 1]):
        batch = data.make_prompts(dataset, order_of_rows, pad)
        assert batch.images
        for name in ("patches", "places", "segments", "columns", "positions", "end"):
            assert (getattr(batch.images, name) == getattr(whole.images, name)[order_of_rows]).all(), name
    assert whole.images.segments.max(axis=1).tolist() == [1, 1, 1, 2, 0, 0]
    lengths = whole.mask.sum(axis=1)
    # Rows of text have the positions of text.
    for b in (4, 5):
        assert whole.images.end[b] == lengths[b]
        assert (whole.images.positions[b][:, whole.mask[b]] == np.arange(lengths[b])).all()
        assert (whole.images.columns[b] == dataset.width).all()
    assert (whole.take([3, 0]).images.patches == whole.images.patches[[3, 0]]).all()


def test_two_processes_make_the_halves_of_a_batch(dataset, tokenizer, monkeypatch):
    pad = tokenizer.pad_token_id
    batch = next(order.iterate(6, 4, 0, lambda rows: data.make_prompts(dataset, rows, pad)))
    opened = []
    real = type(dataset.images).batch
    counted = lambda self, rows, *x: opened.append(len(rows)) or real(self, rows, *x)  # noqa: E731
    monkeypatch.setattr(type(dataset.images), "batch", counted)
    for index in range(2):
        half_of = lambda size, i=index: slice(i * size // 2, (i + 1) * size // 2)  # noqa: E731
        monkeypatch.setattr(order.distributed, "part", half_of)
        half = next(order.iterate(6, 4, 0, lambda rows: data.make_prompts(dataset, rows, pad)))
        assert (half.images.patches == batch.images.patches[2 * index : 2 * index + 2]).all()
        assert (half.numbers == batch.numbers[2 * index : 2 * index + 2]).all()
    assert set(opened) == {2}


@pytest.mark.parametrize("change", ["gone", "smaller", "broken", "cut"])
def test_a_file_that_changes_in_a_run_ends_it(change, dataset, tokenizer, tmp_path, refused):
    contents = {"smaller": encoded(pillow(28, 84)), "broken": b"nothing", "cut": encoded(pillow(56, 84))[:-500]}
    file, pad = tmp_path / "0.png", tokenizer.pad_token_id
    if change in contents:
        file.write_bytes(contents[change])
    else:
        file.unlink()
    data.make_prompts(dataset, [1, 2, 4], pad)
    with refused("mine.rows row 1: image 1 (0.png)"):
        data.make_prompts(dataset, [0], pad)
    # Through the threads that make batches ahead.
    with pytest.raises(UserError, match=r"image 1 \(0.png\)"):
        next(order.iterate(6, 6, 0, lambda rows: data.make_prompts(dataset, rows, pad)))


def test_an_overlong_prompt_is_dropped_and_never_cut(tokenizer, form, tmp_path, monkeypatch, refused):
    rows = rows_of_files(tmp_path, [*SIDES, (560, 560)])
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    columns = {"image_folder": str(tmp_path)}
    dataset = read(rows, tokenizer, form, monkeypatch, columns=columns, max_prompt_tokens=40, overlong="drop")
    assert (dataset.dropped, dataset.numbers, dataset.images.count) == (1, [1, 2, 3, 5, 6, 7], 5)
    frame = len(read([{"prompt": ASKED}], tokenizer, form, monkeypatch).ids[0]) + 2
    assert [len(ids) for ids in dataset.ids[:4]] == [frame + 6, frame + 5, frame + 1, frame + 2 + 6 + 5]
    with refused("mine.rows row 4", str(frame + 400)):
        read(rows, tokenizer, form, monkeypatch, columns=columns, max_prompt_tokens=40)


def test_the_fingerprint_knows_the_images_and_no_process(tokenizer, form, monkeypatch):
    def fingerprints(image: Any) -> tuple[str, str]:
        dataset = read([{"prompt": ASKED, "image": image}], tokenizer, form, monkeypatch)
        return dataset.fingerprint(), dataset.prompt_fingerprint()

    other = encoded(pillow(seed=1))
    for kind in (lambda x: x, lambda x: {"bytes": x, "path": None}, lambda x: Image.open(io.BytesIO(x))):
        assert fingerprints(kind(GOOD)) == fingerprints(kind(bytes(bytearray(GOOD))))
        assert all(a != b for a, b in zip(fingerprints(kind(GOOD)), fingerprints(kind(other)), strict=True))
    # Also in a column that no model sees.
    sketches = [read([{"prompt": ASKED, "sketch": pillow(seed=i)}], tokenizer, None, monkeypatch) for i in (0, 1, 0)]
    first, second, again = (dataset.fingerprint() for dataset in sketches)
    assert first == again != second
    palette = pillow().quantize(8)
    swapped = palette.copy()
    swapped.putpalette(bytes(reversed(palette.getpalette() or ())))
    assert fingerprints(palette) != fingerprints(swapped)


def test_a_question_about_another_image_is_no_repeated_prompt(tokenizer, form, monkeypatch):
    rows = [{"prompt": ASKED, "image": encoded(pillow(seed=i))} for i in (0, 1, 0)]
    assert read(rows, tokenizer, form, monkeypatch).repeated() == (1, 3, 1)


def test_sources_with_and_without_images_are_joined(tokenizer, form, dataset, monkeypatch):
    texts = read([{"prompt": "text", "answer": "x"}] * 2, tokenizer, form, monkeypatch)
    assert texts.images and data.make_prompts(texts, [0, 1], tokenizer.pad_token_id).images is None
    joined = data.join({"texts": texts, "pictures": dataset})
    assert joined.images.patches == dataset.images.patches
    batch = data.make_prompts(joined, [1, 5], tokenizer.pad_token_id)
    alone = data.make_prompts(dataset, [3], tokenizer.pad_token_id)
    assert batch.images.segments.max(axis=1).tolist() == [0, 2]
    assert (batch.images.patches[1] == alone.images.patches[0]).all()
    assert batch.sources == ["texts", "pictures"]


def test_the_banner_says_how_many_images_there_are(dataset, wording):
    wording(dataset.images.line(dataset.width))


def test_fields_of_images_are_refused_where_they_do_nothing(tokenizer, form, monkeypatch, refused):
    read([{"prompt": ASKED}], tokenizer, form, monkeypatch)
    for name, value in {"image_column": "x", "image_folder": "/data", "min_pixels": 1, "max_pixels": 99}.items():
        config = load("grpo")
        config.data.update({"source": "mine.rows", name: value})
        for images in (None, form):
            with refused(f"config.data.{name} = {value!r}"):
                data.load(recipes.read(config).data, tokenizer, images=images)


@pytest.mark.needs("datasets")
def test_rows_of_parquet_and_of_a_saved_folder_keep_their_bytes(tokenizer, form, tmp_path, monkeypatch):
    import datasets
    from pyarrow import parquet

    features = datasets.Features({"problem": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = {"problem": ["<image>Which?", "None."], "images": [[{"bytes": GOOD, "path": None}], []]}
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.save_to_disk(str(tmp_path / "saved"))
    parquet.write_table(saved.data.table, tmp_path / "rows.parquet")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    for source in ("saved", "rows.parquet"):
        limits = {"max_prompt_tokens": 99, "overlong": "error"}
        dataset = data.read(str(tmp_path / source), tokenizer, columns=Columns(images=form), **limits)
        prompts = [f"<|user|>{content}<|assistant|>" for content in (f"{ONE}Which?", "None.")]
        assert [text_of(dataset, tokenizer, i) for i in range(2)] == prompts
        assert dataset.rows[0]["images"] == [{"bytes": GOOD, "path": None}]


def test_what_is_printed_of_a_row_has_no_bytes():
    url = "data:image/png;base64," + base64.b64encode(GOOD).decode()
    row = {"images": [GOOD, {"bytes": GOOD, "path": None}, pillow(), url], "answer": "data: 3", "n": 2}
    size, characters = f"<{len(GOOD):,} bytes>", f"<data URL of {len(url):,} characters>"
    images = [size, {"bytes": size, "path": None}, "<image of 56 x 84>", characters]
    assert printable_value(row) == {"images": images, "answer": "data: 3", "n": 2}


def test_prompts_name_their_images(dataset, tokenizer, form, monkeypatch):
    assert chat_text(dataset.rows[3]["prompt"]) == "[0.png, 56 x 84][1.png, 140 x 28]Which?"
    unnamed = read([{"prompt": ASKED, "image": GOOD}], tokenizer, form, monkeypatch)
    assert chat_text(unnamed.rows[0]["prompt"]) == "[mine.rows row 1: image 1, 56 x 84]Which?"


def test_a_reward_that_fails_shows_no_bytes():
    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise ValueError("no")

    with pytest.raises(UserError, match=r"'images': \['<[\d,]+ bytes>'\]") as caught:
        reward_calls.call_reward("broken", broken, [{"prompt": ASKED, "images": [GOOD]}], ["x"], [[1]])
    assert "PNG" not in str(caught.value)


def test_without_pillow_the_line_says_what_to_install(tokenizer, form, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with refused("row 1: image 1", "jaxrl_llm[vision]"):
        read([{"prompt": ASKED, "image": GOOD}], tokenizer, form, monkeypatch)
    assert len(read([{"prompt": ASKED, "image": None}], tokenizer, form, monkeypatch).rows) == 1


def test_a_completion_with_a_placeholder_is_refused(tokenizer, form, monkeypatch, refused):
    rows = [{"prompt": ASKED, "image": GOOD, "completion": text} for text in ("1", f"a{VIDEO}")]
    dataset = read(rows, tokenizer, form, monkeypatch)
    settings = recipes.read_sft(load("sft")).data
    with refused("row 2", VIDEO):
        sft.tokenize_answers(dataset, tokenizer, replace(settings, source="mine.rows"), 9, ())
    answers = sft.tokenize_answers(replace(dataset, rows=dataset.rows[:1], numbers=[1]), tokenizer, settings, 9, ())
    batch = sft.make_batch(dataset, answers, [0], kept_rows=[0], length=9, pad_id=tokenizer.pad_token_id)
    assert (batch.images.patches == data.make_prompts(dataset, [0], 0).images.patches).all()


def test_the_page_of_an_evaluation_shows_the_images_of_each_problem(tokenizer, form, monkeypatch):
    rows = [{"problem": "<image>a", "images": [pillow(600, 56)]}, {"problem": "b", "images": []}]
    rows += [{"problem": "<image><image>c", "images": [encoded(), pillow()]}]
    dataset = read(rows, tokenizer, form, monkeypatch)
    rewards = Rewards(np.ones((3, 1), np.float32), {"right": np.ones((3, 1), np.float32)})
    graded = grading.GradedCompletions([["x"]] * 3, rewards, [], {})
    page = samples.render("t", scores.measure_all(graded, dataset.rows, None, ""), graded, dataset)
    shown = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" alt="([^"]+)"', page)
    assert [name for _, name in shown] == [image.name for of_row in dataset.images.rows for image in of_row]
    sizes = [Image.open(io.BytesIO(base64.b64decode(content))).size for content, _ in shown]
    assert sizes == [(256, 24), (56, 84), (56, 84)]


# ---- images that are written as text


def gemma(folder: Path) -> tuple[Any, Any]:
    """A tokenizer that joins lines, with a template as Gemma 3 has it, and how its model reads images."""
    template = TEMPLATE.replace(START + PAD + END, START).replace("{{ '<|' + m.role", "{{ '\\n<|' + m.role")
    write_folder(folder, template)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = hf.load_tokenizer(folder)
    tokenizer.add_tokens(["\n\n", "\n\n\n", "\n\n\n\n"])
    begin, token, end = (tokenizer.convert_tokens_to_ids(x) for x in (START, PAD, END))
    config |= {"model_type": "gemma3", "image_token_index": token, "boi_token_index": begin, "eoi_token_index": end}
    config |= {"vision_config": {"image_size": 24, "patch_size": 4}, "mm_tokens_per_image": 9}
    del config["image_token_id"], config["video_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    return tokenizer, read_format(folder)


def test_an_image_of_gemma_is_lines_of_text_as_in_its_processor(tmp_path, monkeypatch, refused):
    tokenizer, form = gemma(tmp_path / "model")
    contents = ["<image>\nWhich?", "A\n<image>\n\n<image>\nB", "No image.\n\n\n", "<image><image>"]
    rows = [{"prompt": [{"role": "user", "content": x}], "images": [pillow()] * x.count("<image>")} for x in contents]
    dataset = read(rows, tokenizer, form, monkeypatch)
    for name, mark in (("boi_token", START), ("image_token", PAD), ("eoi_token", END)):
        vars(tokenizer).update({name: mark, f"{name}_id": tokenizer.convert_tokens_to_ids(mark)})
    squares = Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    processor: Any = Gemma3Processor(squares, tokenizer, image_seq_length=9)
    for ids, row, content in zip(dataset.ids, rows, contents, strict=True):
        text = f"\n<|user|>{content.replace('<image>', START)}<|assistant|>"
        images = [row["images"]] if row["images"] else None
        theirs = processor(text=[text], images=images, add_special_tokens=False)
        assert ids.tolist() == theirs["input_ids"][0]
    joined = tokenizer.convert_tokens_to_ids("\n\n\n")
    assert [int((ids == joined).sum()) for ids in dataset.ids] == [1, 2, 1, 0]
    batch = data.make_prompts(dataset, range(4), 0)
    assert batch.images is not None and [int(x.max()) for x in batch.images.segments] == [1, 2, 0, 2]
    np.testing.assert_array_equal(batch.images.end, batch.mask.sum(axis=1))
    np.testing.assert_array_equal(np.diff(batch.images.positions, axis=2).max(axis=(1, 2)), 1)
    for text in (START, PAD):
        with refused("mine.rows row 1", "1 times"):
            read([{"prompt": chat(text)}], tokenizer, form, monkeypatch)
