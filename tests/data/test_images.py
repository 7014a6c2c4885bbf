"""Images: their pixels, sizes and places in prompts, against transformers and against restatements."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import tiny
from PIL import Image, ImageOps

from jaxrl_llm.data import image_files, image_format, image_layout
from jaxrl_llm.data.image_format import ImageFormat

PAD, IMAGE, TEXT = 0, 9, 5
QWEN2 = ImageFormat(IMAGE, patch=14, merge=2, min_pixels=56 * 56, max_pixels=28 * 28 * 20)
QWEN2_5 = ImageFormat(IMAGE, patch=14, merge=2, min_pixels=56 * 56, max_pixels=28 * 28 * 60, window=4)
FORMS = (QWEN2, QWEN2_5, ImageFormat(IMAGE, 16, 2, 65536, 2**18))
VISION = {"patch_size": 14, "spatial_merge_size": 2}


def write(folder, config: dict[str, Any], **files: dict[str, Any]):
    folder.mkdir(exist_ok=True)
    for name, content in ({"config": config} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """An image of noise in a mode of Pillow, which no resize hides."""
    rng = np.random.default_rng(width * 1000 + height)
    if mode in ("RGBA", "LA", "RGB", "L"):
        shape = (height, width, len(mode)) if mode != "L" else (height, width)
        return Image.fromarray(rng.integers(0, 256, shape, np.uint8))
    if mode == "P":
        image = noise(width, height).quantize(16)
        image.info["transparency"] = 3
        return image
    return noise(width, height).convert(mode)


def positions_by_groups(tokens: list[int], grids: list[tuple[int, int]]) -> tuple[np.ndarray, int]:
    """Restates the position ids of Qwen2-VL's paper, token by token: [3, T] and the next position."""
    result, p, i, grids = [], 0, 0, list(grids)
    while i < len(tokens):
        if tokens[i] != IMAGE:
            result.append((p, p, p))
            p, i = p + 1, i + 1
            continue
        rows, columns = grids.pop(0)
        result += [(p, p + row, p + column) for row in range(rows) for column in range(columns)]
        p, i = p + max(rows, columns), i + rows * columns
    return np.array(result, np.int32).T.reshape(3, -1), p


def blank(form: ImageFormat, *grids: tuple[int, int]) -> list[np.ndarray]:
    return [np.zeros((h * form.factor, w * form.factor, 3), np.uint8) for h, w in grids]


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        *(("RGB", size) for size in [(300, 40), (28, 28), (1, 70), (517, 283)]),
        *((mode, (61, 90)) for mode in ["RGB", "L", "RGBA", "LA", "P", "CMYK", "1"]),
    ],
)
def test_pixels_are_those_of_transformers(mode: str, size: tuple[int, int], tmp_path):
    from transformers import AutoImageProcessor

    settings = {"min_pixels": QWEN2.min_pixels, "max_pixels": QWEN2.max_pixels, "patch_size": 14, "merge_size": 2}
    settings |= {"image_processor_type": "Qwen2VLImageProcessorFast", "temporal_patch_size": 2}
    folder = write(tmp_path, {"model_type": "qwen2_vl"}, preprocessor_config=settings)
    theirs = cast(Any, AutoImageProcessor.from_pretrained(folder))
    assert type(theirs).__name__ == "Qwen2VLImageProcessorPil"
    image = noise(*size, mode)
    reference = theirs(image, return_tensors="np")
    ours = image_layout.patches(image_files.pixels(image, QWEN2), QWEN2)
    frames = reference["pixel_values"].reshape(len(ours), 3, 2, 196)
    mean, std = (np.array(x).reshape(3, 1, 1) for x in (theirs.image_mean, theirs.image_std))
    assert (np.rint(255 * (frames * std + mean)) == ours.reshape(-1, 3, 1, 196)).all()
    rows, columns = QWEN2.grid(*image.size)
    assert reference["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]


def test_pixels_of_a_fixed_size_are_those_of_transformers():
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    form = ImageFormat(IMAGE, 14, 4, 0, 0, side=112, planes=False, resample=2)
    theirs: Any = Gemma3ImageProcessorPil(size={"height": 112, "width": 112}, do_normalize=False, do_rescale=False)
    for size in [(300, 41), (112, 112), (7, 90)]:
        image = noise(*size)
        expected = np.asarray(theirs(image, return_tensors="np")["pixel_values"][0])
        ours = image_files.pixels(image, form)
        assert (ours.transpose(2, 0, 1) == expected).all()
        tokens = image_layout.expand(np.array([TEXT, IMAGE, TEXT]), [form.grid(*size)], form)
        layout = image_layout.lay_out(tokens, [form.grid(*size)], form)
        assert (layout.positions == np.arange(6)).all() and layout.end == 6
        for place, patch in zip(layout.places, image_layout.patches(ours, form), strict=True):
            row, column = 14 * place
            assert (patch.reshape(3, 14, 14) == expected[:, row : row + 14, column : column + 14]).all()


def test_a_second_resize_changes_nothing():
    rng, refused = random.Random(0), 0
    for _ in range(1000):
        form = rng.choice(FORMS)
        width, height = (int(2 ** rng.uniform(0, 12)) for _ in range(2))
        try:
            first = form.resized(width, height)
        except ValueError:
            narrow = max(width, height) > 200 * min(width, height)
            assert narrow or form.max_pixels < 200 * form.factor**2
            refused += 1
            continue
        assert form.resized(*first) == first
        assert first[0] % form.factor == first[1] % form.factor == 0
        assert form.min_pixels <= first[0] * first[1] <= form.max_pixels
    assert 0 < refused < 333
    once = image_files.pixels(noise(301, 200), QWEN2)
    assert (image_files.pixels(Image.fromarray(once), QWEN2) == once).all()


PROMPTS = {
    "text": ([TEXT] * 4, []),
    "one": ([TEXT, IMAGE, TEXT], [(2, 3)]),
    "first": ([IMAGE, TEXT, TEXT], [(3, 2)]),
    "last": ([TEXT, TEXT, IMAGE], [(1, 5)]),
    "adjacent": ([TEXT, IMAGE, IMAGE, TEXT], [(2, 2), (4, 1)]),
    "apart": ([IMAGE, TEXT, IMAGE, TEXT], [(5, 6), (2, 3)]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("left", [True, False])
def test_position_ids_are_those_of_the_paper_for_any_padding(left, form):
    width, names = 48, list(PROMPTS)
    tokens, mask = np.full((len(names), width), PAD), np.zeros((len(names), width), bool)
    for b, (short, grids) in enumerate(PROMPTS.values()):
        row = image_layout.expand(np.array(short), grids, form)
        at = slice(width - len(row), None) if left else slice(len(row))
        tokens[b, at], mask[b, at] = row, True
        assert tiny.collapsed(row, grids, form.image_token) == short
    count = max(image_layout.patch_count(grids, form) for _, grids in PROMPTS.values())
    sizes = image_layout.image_sizes(count, form)
    batch = image_layout.stack(tokens, mask, [blank(form, *grids) for _, grids in PROMPTS.values()], form, sizes)
    for b, (_, grids) in enumerate(PROMPTS.values()):
        expected, end = positions_by_groups(tokens[b, mask[b]].tolist(), grids)
        assert (batch.positions[b][:, mask[b]] == expected).all(), names[b]
        assert batch.end[b] == end
        used = batch.columns[b] < width
        # Every token of an image has one merged token, and no other column has any.
        assert sorted(batch.columns[b, used]) == np.flatnonzero(tokens[b] == IMAGE).tolist()
        assert batch.segments[b].max(initial=0) == len(grids)
        assert (np.repeat(used, form.merge**2) == (batch.segments[b] > 0)).all()
        # A merged token stands where its patches are: their place and its column say the same position.
        for m in np.flatnonzero(used):
            own = slice(m * form.merge**2, (m + 1) * form.merge**2)
            number = batch.segments[b, own]
            place = batch.places[b, own]
            assert len(set(number)) == 1 and (place[-1] - place[0] == 1).all()
            first = np.flatnonzero(tokens[b] == IMAGE)[sum(h * w for h, w in grids[: number[0] - 1])]
            at = batch.positions[b, 1:, batch.columns[b, m]] - batch.positions[b, 1:, first]
            assert (at == place[0] // form.merge).all()


def test_patches_are_where_their_places_say_and_windows_hold_each_once():
    form = QWEN2_5
    for grid in [(1, 1), (4, 4), (5, 9), (3, 13), (8, 2)]:
        height, width = (side * form.factor for side in grid)
        image = np.zeros((height, width, 3), np.uint8)
        # Each patch holds its row and column in two of its channels.
        image[..., 0] = 1 + np.arange(height)[:, None] // form.patch
        image[..., 1] = 1 + np.arange(width)[None] // form.patch
        tokens = image_layout.expand(np.array([IMAGE]), [grid], form)
        layout, rows = image_layout.lay_out(tokens, [grid], form), image_layout.patches(image, form)
        real = layout.segments > 0
        assert (rows.reshape(-1, 3, 196)[real, :2, 0] == layout.places[real] + 1).all()
        assert not rows[~real].any() and not layout.places[~real].any()
        assert len({tuple(place) for place in layout.places[real]}) == real.sum() == 4 * grid[0] * grid[1]
        size = 4 * form.window**2
        assert len(real) == image_layout.patch_count([grid], form) == -(-grid[0] // 4) * -(-grid[1] // 4) * size
        for places, inside in zip(layout.places.reshape(-1, size, 2), real.reshape(-1, size), strict=True):
            assert len(np.unique(places[inside] // (2 * form.window), axis=0)) == 1
            assert inside[: inside.sum()].all()  # padding is last


@pytest.mark.parametrize("grids", [[], [(1, 2)], [(1, 1), (1, 1), (2, 2)]])
def test_a_prompt_that_does_not_fit_its_images_is_refused(grids, refused):
    with refused(f"{len(grids)} images", error=ValueError):
        image_layout.expand(np.array([TEXT, IMAGE, IMAGE]), grids, QWEN2)
    with refused(error=ValueError):
        image_layout.lay_out(np.array([TEXT, IMAGE, IMAGE, IMAGE]), grids, QWEN2)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_a_photograph_is_turned_as_its_exif_says_and_so_is_its_size(kind):
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[image_files.ORIENTATION] = orientation
        noise(70, 112).save(file := io.BytesIO(), kind, exif=exif)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
        with image_files.opened(file.getvalue()) as image:
            assert image_files.size_of(image) == upright.size
            assert (image_files.pixels(image, QWEN2) == image_files.pixels(upright, QWEN2)).all()


def test_only_the_header_is_read_for_the_size(monkeypatch):
    noise(70, 112).save(file := io.BytesIO(), "PNG")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with image_files.opened(file.getvalue()) as image:
        assert QWEN2.grid(*image_files.size_of(image)) == (4, 2)


def test_formats_are_read_from_the_folders_of_both_versions(tmp_path, refused):
    limits = {"min_pixels": 3136, "max_pixels": 12845056}
    nested = {"image_processor": {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}}
    config = {"model_type": "qwen2_5_vl", "image_token_id": 7, "video_token_id": 8, "text_config": {"hidden_size": 8}}
    config |= {"vision_config": VISION | {"window_size": 112}}
    expected = ImageFormat(7, 14, 2, 3136, 12845056, window=4, others=(8,))
    old = write(tmp_path / "old", config, preprocessor_config=limits)
    new = write(tmp_path / "new", config, processor_config=nested, preprocessor_config={"min_pixels": 5})
    assert image_format.read_format(old) == image_format.read_format(new) == expected
    assert image_format.read_format(old, max_pixels=50176) == ImageFormat(7, 14, 2, 3136, 50176, window=4, others=(8,))
    third = config | {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
    third = write(tmp_path / "third", third, preprocessor_config=nested["image_processor"] | {"patch_size": 16})
    assert image_format.read_format(third) == ImageFormat(7, 16, 2, 3136, 12845056, others=(8,))
    gemma = {"model_type": "gemma3", "image_token_index": 6, "mm_tokens_per_image": 256}
    gemma |= {"vision_config": {"patch_size": 14, "image_size": 896}}
    squares = ImageFormat(6, 14, 4, 0, 0, side=896, planes=False, resample=2, around=(255_999, 256_000))
    for settings in ({"resample": 2}, {"size": {"height": 896, "width": 896}, "do_pan_and_scan": None}):
        assert image_format.read_format(write(tmp_path / "gemma", gemma, preprocessor_config=settings)) == squares
    around = gemma | {"boi_token_index": 4, "eoi_token_index": 5}
    read = image_format.read_format(write(tmp_path / "gemma", around, preprocessor_config={}))
    assert read == replace(squares, around=(4, 5))
    assert squares.grid(20, 700) == (16, 16)
    with refused("max_pixels"):
        image_format.read_format(write(tmp_path / "gemma", gemma, preprocessor_config={}), max_pixels=50176)
    wrong = write(tmp_path / "wrong", gemma, preprocessor_config={"size": {"height": 224, "width": 224}})
    with refused("size", "224", "896 x 896"):
        image_format.read_format(wrong)
    assert image_format.read_format(write(tmp_path / "text", {"model_type": "qwen2"})) is None
    wrong = {"do_resize": False, "do_convert_rgb": False, "patch_size": 16, "merge_size": 1, "do_pan_and_scan": True}
    for key, value in (wrong | {"min_pixels": 9**9}).items():
        with refused(key):
            image_format.read_format(write(tmp_path / "wrong", config, preprocessor_config=limits | {key: value}))
    without_size = write(tmp_path / "wrong", config, preprocessor_config=limits | {"size": None})
    with refused("max_pixels"):
        image_format.read_format(without_size, max_pixels=100, min_pixels=10)
    with refused("preprocessor_config.json"):
        image_format.read_format(write(tmp_path / "none", config))
