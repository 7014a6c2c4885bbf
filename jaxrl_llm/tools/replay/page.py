"""Renders a replayed step as one HTML file, in which the numbers of each token can be read."""

from __future__ import annotations

import base64
import json
import zlib
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

import jaxrl_llm
from jaxrl_llm.tools.replay.record import StepRecord
from jaxrl_llm.tools.report.completions import cut
from jaxrl_llm.tools.report.templates import script_json, template

# The page begins with a list of the completions with the largest share of the update.
TOP_COMPLETIONS = 5  # number of completions in this list
START_CHARACTERS = 140  # characters of a completion in this list
# More equal tokens in a row of a prompt, such as those of an image, are shown as one token and their number.
MAX_REPEATS = 8
PERCENTILE = 99  # percentile of the absolute values of the trained tokens at which a color is strongest
# Columns of numbers per token -> metrics that are their means over the trained tokens. Each column colors the tokens.
METRICS = {"ratio": "ratio/mean", "kl": "kl/ref", "entropy": "entropy", "gap": "sampler/gap_mean"}
METRICS |= {"clipped": "clip/fraction"}


class Fact(NamedTuple):
    """A number of a completion."""

    label: str
    text: str
    note: str = ""
    bar: float = 0.0  # length of a bar from 0 to 1; negative if the completion pulls against the update


class ShownCompletion(NamedTuple):
    """What the page shows of a completion, besides the numbers of its tokens."""

    place: tuple[int, int]  # indices of the prompt and of the completion in the arrays
    facts: list[Fact]
    start: str  # first characters of the text


class ShownGroup(NamedTuple):
    """What the page shows of a prompt and its completions."""

    number: int  # number of the prompt in the batch, from 1
    note: str  # mean reward of the group, and its share of the update
    prompt: str
    columns: dict[str, str]  # further columns of the row
    completions: list[ShownCompletion]


def render(record: StepRecord) -> str:
    """Returns the page of a step."""
    contribution = contributions(record)  # [B, G]
    # The first entry is of the step, and the second one, if there is one, of the step with other settings.
    gradients = [record.gradient, *([record.what_if.other.gradient] if record.what_if else [])]
    shares = [update_shares(gradient) for gradient in gradients] if record.gradient else []
    # Prompts, and the completions of each prompt, are shown in the order of their contributions, the largest first.
    prompt_order = np.argsort(-contribution.sum(axis=1), kind="stable").tolist()
    groups = [group_of(record, b, np.argsort(-contribution[b], kind="stable"), shares) for b in prompt_order]
    completions = [completion for group in groups for completion in group.completions]
    data, arrays = pack(record, [completion.place for completion in completions])
    text = template("replay.html").render(
        record=record,
        version=jaxrl_llm.__version__,
        means=means(record),
        data=data,
        groups=groups,
        completions=completions,
        # Completions are sorted by share and not by norm, because other gradients may cancel a large one.
        top=sorted(completions, key=lambda completion: -shares[0][completion.place])[:TOP_COMPLETIONS]
        if shares
        else [],
        json=script_json(json.dumps(data, allow_nan=False)),
        arrays=arrays,
    )
    # The text of a token may be half of a surrogate pair, which UTF-8 cannot hold.
    return text.encode(errors="replace").decode()


def contributions(record: StepRecord) -> np.ndarray:
    """Returns how much each completion contributed to the update [B, G]: the norm of its gradient.

    Without gradients, the sum of |advantage| over its trained tokens takes the place of the norm.
    """
    if record.gradient:
        return np.nan_to_num(record.gradient["norm"])
    return np.abs(record.advantages).sum(axis=-1, where=record.loss_mask)


def update_shares(gradient: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the shares of the completions in the step's gradient [B, G], which sum to 1.

    A share is the length of a completion's gradient along the step's gradient, relative to the latter's norm. It is
    negative for a completion that pulls against the update. gradient: a table like `StepRecord.gradient`.
    """
    projections = np.nan_to_num(gradient["norm"].astype(np.float64) * gradient["cosine"])
    return projections / (projections.sum() or 1.0)


def means(record: StepRecord) -> dict[str, float]:
    """Returns the means over the tokens and completions of the page, by the names of the metrics that they equal."""
    arrays = {METRICS[name]: x[record.loss_mask] for name, x in record.columns.items() if name in METRICS}
    rewards = {"mean": record.rewards, **record.channels}
    arrays |= {f"reward/{name}": x[~np.isnan(x)] for name, x in rewards.items()}
    arrays |= {"completion/length": record.completion_mask.sum(axis=-1), "completion/truncated": record.truncated}
    return {metric: float(np.mean(x, dtype=np.float64)) for metric, x in arrays.items() if x.size}


def group_of(record: StepRecord, prompt: int, order: np.ndarray, shares: list[np.ndarray]) -> ShownGroup:
    """Returns what the page shows of a prompt and its completions.

    prompt: index in the batch. order: members of the group, in the order of the page. shares: results of
    `update_shares`.
    """
    rewards, row = record.rewards[prompt], record.rows[prompt]
    judged = rewards[~np.isnan(rewards)]
    note = f"mean reward {judged.mean():.3g}" if len(judged) else "no verdict"
    return ShownGroup(
        number=prompt + 1,
        note=f"{note}, {shares[0][prompt].sum():.1%} of the update" if shares else note,
        prompt=prompt_text(record, prompt),
        columns={name: cut(str(value)) for name, value in row.items() if name not in ("prompt", "reasons")},
        completions=[completion_of(record, prompt, member, shares) for member in order.tolist()],
    )


def completion_of(record: StepRecord, prompt: int, member: int, shares: list[np.ndarray]) -> ShownCompletion:
    """Returns what the page shows of a completion besides its tokens.

    prompt: index in the batch. member: index of the completion in its group. shares: results of `update_shares`.
    """
    place = prompt, member
    mask, trained = record.completion_mask[place], record.loss_mask[place]
    # A row may have the reasons of its rewards: {reward function: a text for each completion}.
    reasons = record.rows[prompt].get("reasons", {})
    facts: list[Fact] = []
    for name, rewards in {"reward": record.rewards, **record.channels}.items():
        score, reason = float(rewards[place]), reasons[name][member] if name in reasons else ""
        facts.append(Fact(name, "no verdict" if np.isnan(score) else f"{score:.4g}", reason))
    facts += [Fact("advantage", f"{record.advantages[place][trained].mean():.3g}")] if trained.any() else []
    environment_tokens = int(mask.sum() - trained.sum())
    environment_note = f"and {environment_tokens:,} of the environment" if environment_tokens else ""
    facts.append(Fact("tokens", f"{trained.sum():,}", environment_note))
    if record.gradient and (norm := float(record.gradient["norm"][place])) > 0:
        facts.append(Fact("gradient norm", f"{norm:.3g}", bar=norm / float(np.nanmax(record.gradient["norm"]))))
        facts.append(Fact("cosine", f"{record.gradient['cosine'][place]:.2f}"))
    facts += [
        Fact(label, f"{share[place]:.1%}", bar=share[place] / (np.abs(share).max() or 1.0))
        for label, share in zip(("share of update", "share if changed"), shares, strict=False)
    ]
    texts = texts_of(record, record.completions[place][mask][:START_CHARACTERS])
    return ShownCompletion(place, facts, "".join(texts)[:START_CHARACTERS])


def texts_of(record: StepRecord, tokens: np.ndarray) -> list[str]:
    """Returns the text of each of these token ids."""
    return [record.token_texts[index] for index in np.searchsorted(record.token_ids, tokens)]


def prompt_text(record: StepRecord, prompt: int) -> str:
    """Returns the text of a prompt. Many equal tokens in a row are shown as one token and their number."""
    token_texts = texts_of(record, record.prompts[prompt][record.prompt_mask[prompt]])
    counted_texts = [(text, len([*equal_texts])) for text, equal_texts in groupby(token_texts)]
    return cut("".join(text * count if count <= MAX_REPEATS else f"{text} × {count} " for text, count in counted_texts))


def pack(record: StepRecord, places: list[tuple[int, int]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the data of the page's script, and by name its arrays over all tokens, compressed.

    places: index of the prompt and of the member for each completion, in the order of the page.
    """
    # The tokens of all completions are joined in one array [all tokens], in the order of the page, without padding.
    prompts, members = np.transpose(places)
    mask = record.completion_mask[prompts, members]
    trained = record.loss_mask[prompts, members][mask]
    columns = {"advantage": record.advantages, **record.columns, "lag": record.step - 1 - record.versions}
    if "masked" in columns:
        columns.setdefault("clipped", np.zeros_like(columns["masked"]))
    arrays = {
        # Untrained tokens get the neutral value, which has no color on the page.
        name: np.where(trained, column[prompts, members][mask], 1.0 if name == "ratio" else 0.0)
        for name, column in columns.items()
    }
    # Half precision holds three digits. A ratio is stored as its logarithm, because most ratios are nearly 1.
    arrays |= {"ratio": np.log(arrays["ratio"])} if "ratio" in arrays else {}
    for name, x in arrays.items():
        fits_half = np.nanmax(np.abs(x), initial=0) < np.finfo(np.float16).max
        arrays[name] = x.astype(np.float16 if fits_half else np.float32)
    scales = {name: scale(arrays[name][trained]) for name in ("advantage", *METRICS) if name in arrays}
    tokens = np.searchsorted(record.token_ids, record.completions[prompts, members][mask])
    arrays |= {"token": tokens.astype(np.uint32), "trained": trained.astype(np.uint8)}
    lengths = mask.sum(axis=-1)
    data = {
        "step": record.step,
        "places": places,
        "starts": (lengths.cumsum() - lengths).tolist(),
        "sizes": lengths.tolist(),
        "ids": record.token_ids,
        "texts": record.token_texts,
        "types": {name: x.dtype.name for name, x in arrays.items()},
        "scales": scales | ({"clipped": 1.0} if "clipped" in scales else {}),
    }
    # Level 1 is the fastest, and numbers of a model are hardly smaller at a higher level.
    return data, {name: base64.b64encode(zlib.compress(x.tobytes(), level=1)).decode() for name, x in arrays.items()}


def scale(values: np.ndarray) -> float:
    """Returns the absolute value at which the color of a token is strongest; 0 if all values are 0."""
    magnitudes = np.abs(values[np.isfinite(values)].astype(np.float64))
    if not magnitudes.size:
        return 0.0
    # If the percentile is 0, the largest value is used, because a scale of 0 would hide rare values.
    return float(np.percentile(magnitudes, PERCENTILE) or magnitudes.max())
