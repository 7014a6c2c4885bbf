"""The page of a replayed step: what it holds, that its numbers add up, and how it behaves in a browser."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, Page, browser

from jaxrl_llm.tools.replay import page
from jaxrl_llm.tools.replay.record import StepRecord, UpdateOutcome, WhatIf

HOSTILE = ["</script>", "<!--<script>", '<img src=x onerror="0">', "&lt;", "\ud83d", "", "\u2028", "{{ x }}"]
TEXTS = [" the", " sum", " of", "\n", *HOSTILE, "<|image|>"]
IMAGE = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"


NUMBERS_OF_TOKENS = """logprobs sampler_logprobs old_logprobs ref_logprobs entropy ratio kl gap loss values returns
weight clipped masked"""


def make_record(prompts: int = 3, group: int = 4, length: int = 24, shortest: int = 12) -> StepRecord:
    """A step of random numbers. Its first prompt has an environment, and its last one a missing verdict."""
    rng = np.random.default_rng(prompts)
    shape, ids = (prompts, group, length), sorted(rng.choice(50_000, len(TEXTS), replace=False).tolist())
    lengths = rng.integers(shortest, length + 1, shape[:2])
    completion_mask = np.arange(length) < lengths[..., None]
    loss_mask = completion_mask.copy()
    loss_mask[0, :, 4:8] = False

    def sizes(*shape: int) -> np.ndarray:
        return np.abs(rng.standard_normal(shape, np.float32))

    columns = {name: np.where(loss_mask, sizes(*shape), 0) for name in NUMBERS_OF_TOKENS.split()}
    columns |= {name: np.where(columns[name] > 2.5, 1, 0).astype(np.float32) for name in ("clipped", "masked")}
    columns["ratio"] = np.where(loss_mask, np.exp(columns["ratio"] / 10), 0)
    rewards = sizes(*shape[:2])
    rewards[-1, 0] = np.nan
    record = StepRecord(
        run="runs/mine",
        step=131,
        config={},
        logged={},
        metrics={},
        differences={},
        exact=True,
        prompts=np.full((prompts, 16), ids[-1], np.int32),
        prompt_mask=np.arange(16) >= rng.integers(0, 3, (prompts, 1)),
        completions=rng.choice(ids[:-1], shape).astype(np.int32),
        completion_mask=completion_mask,
        loss_mask=loss_mask,
        truncated=lengths == length,
        versions=np.full(shape, 129, np.int32),
        advantages=np.where(loss_mask, rng.standard_normal((*shape[:2], 1)), 0),
        rewards=rewards,
        channels={"accuracy": rewards, "format": sizes(*shape[:2])},
        columns=columns,
        gradient={"norm": sizes(*shape[:2]), "cosine": rng.uniform(-0.2, 1, shape[:2]).astype(np.float32)},
        fingerprints={},
        rows=[{"prompt": "x", "answer": f"answer {b}"} for b in range(prompts)],
        token_ids=ids,
        token_texts=TEXTS,
        images=[[IMAGE], *[[]] * (prompts - 1)],
    )
    metrics = page.means(record) | {"grad_norm": 0.25, "reward/std": 0.5}
    return replace(record, metrics=metrics, logged={name: x + 1 for name, x in metrics.items()})


class Elements(HTMLParser):
    """The elements of a page, and the text in its scripts and cells."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []  # text directly after the start of each element
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data

    def text(self, element_id: str) -> str:
        (index,) = (i for i, (_, attributes) in enumerate(self.found) if attributes.get("id") == element_id)
        return self.texts[index]


def unpack(elements: Elements) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The data of the page's script and its arrays, as a browser reads them."""
    data = json.loads(elements.text("data"))
    arrays = {name: zlib.decompress(base64.b64decode(elements.text(f"array-{name}"))) for name in data["types"]}
    return data, {name: np.frombuffer(packed, data["types"][name]) for name, packed in arrays.items()}


@pytest.fixture(scope="module")
def record() -> StepRecord:
    return make_record()


@pytest.fixture(scope="module")
def text(record) -> str:
    return page.render(record)


@pytest.fixture(scope="module")
def elements(text) -> Elements:
    return Elements(text)


def test_the_page_needs_no_network_and_may_load_nothing(text, elements):
    assert "http://" not in text and "https://" not in text
    assert "default-src 'none'" in text and "'self'" not in text
    links = {found.get(name) for _, found in elements.found for name in ("src", "href") if found.get(name)}
    assert {link for link in links if not link.startswith("#")} == {"data:,", IMAGE}


def test_hostile_tokens_stay_text(record, elements):
    tags = [tag for tag, _ in elements.found]
    assert tags.count("img") == 1 and "onerror" not in {name for _, found in elements.found for name in found}
    assert tags.count("article") == record.rewards.size and tags.count("script") == len(record.columns) + 6
    data, _ = unpack(elements)
    assert data["texts"] == record.token_texts


def test_the_packed_arrays_are_those_of_the_record(record, elements):
    data, arrays = unpack(elements)
    starts = np.cumsum([0, *data["sizes"]])
    assert data["starts"] == starts[:-1].tolist() and sorted(map(tuple, data["places"])) == [
        *np.ndindex(record.rewards.shape)
    ]
    for (b, g), start, end in zip(data["places"], starts[:-1], starts[1:], strict=True):
        mask, trained = record.completion_mask[b, g], record.loss_mask[b, g][record.completion_mask[b, g]]
        tokens = arrays["token"][start:end]
        assert [data["ids"][token] for token in tokens] == record.completions[b, g][mask].tolist()
        assert (arrays["trained"][start:end] == trained).all()
        for name, column in (record.columns | {"advantage": record.advantages}).items():
            packed = np.exp(arrays[name].astype(float)) if name == "ratio" else arrays[name]
            np.testing.assert_allclose(packed[start:end][trained], column[b, g][mask][trained], rtol=6e-4, atol=6e-8)


def test_a_number_beyond_half_precision_is_kept(record):
    values = record.columns["values"] * 1e6
    data, arrays = unpack(Elements(page.render(replace(record, columns=record.columns | {"values": values}))))
    assert data["types"]["values"] == "float32" and arrays["values"].max() == values.max()


def test_each_metric_is_shown_as_logged_as_replayed_and_as_a_mean_of_the_page(record, text):
    means = page.means(record)
    expected = {*page.METRICS.values(), "reward/mean", "reward/accuracy", "reward/format"}
    assert means.keys() == expected | {"completion/length", "completion/truncated"}
    assert means["reward/mean"] == pytest.approx(np.nanmean(record.rewards))
    # Columns are 0 on the tokens of the environment, which are not trained on.
    assert means["entropy"] == pytest.approx(record.columns["entropy"].sum() / record.loss_mask.sum())
    for metric, value in means.items():
        (row, *_) = re.findall(rf'<tr data-metric="{metric}">(.*?)</tr>', text, re.DOTALL)
        shown = [float(cell) for cell in re.findall("<td>(.*?)</td>", row)]
        assert shown == pytest.approx([record.logged[metric], record.metrics[metric], value], rel=1e-6, abs=1e-9)


def test_prompts_and_completions_with_the_largest_gradients_come_first(record, elements):
    norm = record.gradient["norm"]
    order = [(b, g) for b in np.argsort(-norm.sum(axis=1)) for g in np.argsort(-norm[b])]
    assert [found["id"] for tag, found in elements.found if tag == "article"] == [f"c{b + 1}-{g + 1}" for b, g in order]
    shares = page.update_shares(record.gradient)
    assert shares.sum() == pytest.approx(1)
    top = np.dstack(np.unravel_index(np.argsort(-shares, axis=None)[: page.TOP_COMPLETIONS], shares.shape))[0] + 1
    links = [found["href"] for tag, found in elements.found if tag == "a"]
    assert links[: page.TOP_COMPLETIONS] == [f"#c{b}-{g}" for b, g in top]


def test_without_gradients_the_largest_advantages_come_first(record):
    elements = Elements(page.render(replace(record, gradient={})))
    sizes = np.abs(record.advantages).sum(axis=(1, 2))
    groups = [found["id"] for _, found in elements.found if found.get("class") == "group"]
    assert groups == [f"p{b + 1}" for b in np.argsort(-sizes)]
    assert "ol" not in {tag for tag, _ in elements.found}


def test_what_differs_is_marked_and_a_step_without_a_record_is_no_success(record, text):
    assert 'class="verdict healthy"' in text and "bit for bit" in text
    assert "bit for bit" not in page.render(replace(record, exact=False))
    assert 'class="verdict early"' in page.render(replace(record, logged={}))
    logged = record.metrics | {"entropy": 0.5, "reward/std": None}
    differences = {name: (logged[name], record.metrics[name]) for name in ("entropy", "reward/std")}
    other = page.render(replace(record, logged=logged, differences=differences))
    assert 'class="verdict warning"' in other
    marked = re.findall(r'<tr data-metric="([^"]*)" class="warning">', other)
    assert marked == ["entropy", "reward/std"] * 2 and "not finite" in other


def test_rewards_have_their_channels_reasons_and_missing_verdicts(record):
    rows = [
        row | {"reasons": {"accuracy": [f"reason {b}-{g} <b>" for g in range(4)]}} for b, row in enumerate(record.rows)
    ]
    changed = page.render(replace(record, rows=rows))
    article = unescape(changed[changed.index('id="c3-1"') :].split("</article>")[0])
    assert "reason 2-0 <b>" in article and article.count("no verdict") == 2
    assert f"<dd>{record.channels['format'][2, 0]:.4g}</dd>" in article
    assert "reasons" not in re.findall("<b>(.*?)</b>", changed) and "answer 2" in changed


def test_many_equal_tokens_of_a_prompt_become_one(record):
    count = int(record.prompt_mask[1].sum())
    assert page.prompt_text(record, 1) == f"<|image|> × {count} "
    mask = record.prompt_mask & (np.arange(16) < 5)
    assert page.prompt_text(replace(record, prompt_mask=mask), 1) == "<|image|>" * int(mask[1].sum())


@pytest.mark.parametrize(
    ("values", "expected"), [([0, 0, 0], 0), ([0] * 500 + [-2], 2), ([1, -3, np.nan], 2.98), ([], 0), ([np.inf], 0)]
)
def test_a_color_is_strongest_near_the_largest_finite_value(values, expected):
    assert page.scale(np.array(values, np.float32)) == pytest.approx(expected)


def test_masked_tokens_have_their_color_without_a_loss_that_clips(record):
    columns = {name: x for name, x in record.columns.items() if name not in ("clipped", "ratio", "kl")}
    elements = Elements(page.render(replace(record, columns=columns)))
    shown = [found["data-quantity"] for _, found in elements.found if "data-quantity" in found]
    assert shown == ["advantage", "entropy", "gap", "clipped"]


def test_another_setting_is_beside_that_of_the_run(record):
    own = UpdateOutcome(metrics={"grad_norm": 0.5}, kl_after=0.25, gradient=record.gradient)
    other = replace(own, metrics={"grad_norm": 0.75}, gradient={name: x[::-1] for name, x in record.gradient.items()})
    what_if = WhatIf(changes={"loss.clip_high": "0.28"}, own=own, other=other, cosine=0.5)
    text = page.render(replace(record, what_if=what_if))
    assert "loss.clip_high = 0.28" in text and "<td>0.5</td><td>0.75</td>" in text
    assert text.count("<dt>share if changed</dt>") == record.rewards.size


def test_a_step_in_which_nothing_was_trained_is_shown(record):
    nothing = np.zeros_like(record.loss_mask)
    zero = {"norm": np.zeros((3, 4), np.float32), "cosine": np.full((3, 4), np.nan, np.float32)}
    assert "<html" in page.render(replace(record, loss_mask=nothing, gradient=zero))


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Page]:
    if not CHROMIUM:
        pytest.skip("needs the program chromium, a package of the system")
    with browser(tmp_path_factory.mktemp("chromium")) as page_of_browser:
        yield page_of_browser
    assert not page_of_browser.errors


@pytest.fixture(scope="module")
def file(text, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("page") / "step.html"
    file.write_text(text)
    return file


DRAWN = "document.querySelector('[data-t]')"
FITS = "document.documentElement.scrollWidth <= innerWidth"
NUMBERS = "document.getElementById('card').hidden ? '' : document.getElementById('card').innerText"


def show(tab: Page, file: Path, width: int, scheme: str = "light") -> None:
    """Opens a page, and scrolls to its first completion."""
    tab.open(file, width, scheme=scheme)
    tab.wait("document.documentElement.dataset.shown")
    tab.run("document.querySelector('article').scrollIntoView()")
    tab.wait(DRAWN)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_a_token_shows_its_numbers_on_hover_click_and_keys(record, tab, file, width, scheme):
    show(tab, file, width, scheme)
    assert tab.run(FITS) and not tab.run("document.getElementById('waiting').checkVisibility()")
    b, g = (int(x) - 1 for x in tab.run("document.querySelector('article').id.slice(1).split('-')"))
    tab.mouse("article [data-t='2']")
    assert f"id {record.completions[b, g, 2]}, [{b}, {g}, 2]" in tab.run(NUMBERS) and tab.run(FITS)
    tab.mouse("article h4")
    assert not tab.run(NUMBERS)
    tab.mouse("article [data-t='2']", click=True)
    tab.mouse("article h4")
    assert f"{record.columns['entropy'][b, g, 2]:.2g}" in tab.run(NUMBERS)
    tab.press("ArrowRight")
    assert f"[{b}, {g}, 3]" in tab.run(NUMBERS)
    tab.press("Escape")
    assert not tab.run(NUMBERS)
    tab.mouse("article [data-t='3']", click=True)
    assert tab.run(NUMBERS)
    tab.mouse("article h4", click=True)
    assert not tab.run(NUMBERS)


@pytest.mark.slow
def test_keys_change_the_color_and_the_completion(record, tab, file):
    show(tab, file, 1280)
    ids = tab.run("[...document.querySelectorAll('article')].map((article) => article.id)")
    b, g = (int(x) - 1 for x in ids[0].removeprefix("c").split("-"))
    levels = "[...document.querySelector('article').querySelectorAll('[data-t]')].map(({style}) => style.cssText)"
    columns = record.columns | {"ratio": np.log(np.where(record.loss_mask, record.columns["ratio"], 1))}
    columns |= {"clipped": np.maximum(record.columns["clipped"], record.columns["masked"])}
    for key, quantity in enumerate(("ratio", "kl", "entropy", "gap", "clipped"), start=2):
        tab.press(str(key))
        tab.wait(f"document.documentElement.dataset.shown === '{quantity}'")
        assert tab.run("document.querySelectorAll('[data-meaning]:not([hidden])').length") == 1
        strongest = 1.0 if quantity == "clipped" else page.scale(columns[quantity][record.loss_mask])
        expected = np.minimum(np.abs(columns[quantity][b, g][record.completion_mask[b, g]]) / strongest, 1)
        shown = [float(style.removeprefix("--level:").strip(" ;")) for style in tab.run(levels)]
        assert shown == pytest.approx(expected.tolist(), abs=0.011)
    for keys, position in (("j", 0), ("j", 1), ("j", 2), ("k", 1)):
        tab.press(keys)
        assert tab.run("location.hash") == f"#{ids[position]}"
    tab.run(f"location.hash = '#{ids[-1]}'")
    tab.wait(f"document.activeElement.id === '{ids[-1]}' && document.activeElement.querySelector('[data-t]')")
    assert tab.run("document.querySelectorAll('.observation').length") >= record.rewards.shape[1]


@pytest.mark.slow
def test_the_search_finds_a_text_across_tokens(record, tab, file):
    show(tab, file, 1280)
    flat = zip(record.completions.reshape(-1, 24), record.completion_mask.reshape(-1, 24), strict=True)
    texts = ["".join(page.texts_of(record, tokens[mask])) for tokens, mask in flat]
    query = next(words[0] for text in texts if (words := re.search(" [a-z]+ [a-z]+", text)))
    tab.press("/")
    tab.wait("document.activeElement.id === 'search'")
    tab.call("Input.insertText", text=query.upper())
    found = sum(query in text for text in texts)
    assert tab.run("document.getElementById('found').innerText").startswith(f"{found} of {len(texts)} ")
    assert tab.run("document.querySelectorAll('article:not([hidden])').length") == found
    visible = "[...document.querySelectorAll('article:not([hidden])')]"
    tab.wait(f"{visible}.every((article) => article.querySelectorAll('.hit').length >= 2)")


@pytest.mark.slow
def test_a_step_of_512_sequences_opens_and_scrolls_quickly(tab, tmp_path):
    file = tmp_path / "large.html"
    file.write_text(page.render(make_record(64, 8, 1024, shortest=1024)))
    assert file.stat().st_size <= 20e6
    for width in (1280, 400):
        tries = [open_and_scroll(tab, file, width) for _ in range(3)]  # a busy machine may delay one of them
        seconds, frame = map(min, zip(*tries, strict=True))
        print(f"{width} pixels: {file.stat().st_size / 1e6:.1f} MB, {seconds:.2f} s, {1000 * frame:.1f} ms a frame")
        # A quiet machine needs a fifth of this; the seconds of a busy one say little about the page.
        assert seconds <= 15 and frame <= 0.05, tries
        assert tab.run(FITS) and tab.run("document.querySelectorAll('[data-t]').length") < 20_000
        tab.run("document.querySelectorAll('ol a')[4].click()")
        tab.wait("document.activeElement.matches('article') && document.activeElement.querySelector('[data-t]')")


def open_and_scroll(tab: Page, file: Path, width: int) -> tuple[float, float]:
    """Returns the seconds until a page has opened, and the seconds of scripts, style and layout per frame of a scroll.

    Painting is left out, because without a GPU it takes several times as long as with one.
    """
    tab.open(file, width)
    tab.wait("document.documentElement.dataset.shown")
    seconds = tab.run("performance.now()") / 1000
    tab.run("document.querySelector('article').scrollIntoView()")
    names, frames = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration"), 100
    work = []
    for script in ("0", SCROLL % frames):
        tab.run(script)
        metrics = {metric["name"]: metric["value"] for metric in tab.call("Performance.getMetrics")["metrics"]}
        work.append(sum(metrics[name] for name in names))
    return seconds, (work[1] - work[0]) / frames


SCROLL = """(async () => {
  for (let k = 0; k < %d; k++) {
    scrollBy(0, innerHeight / 3);
    await new Promise(requestAnimationFrame);
  }
})()"""
