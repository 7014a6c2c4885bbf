"""The banner at the start of a run: model, mesh, data and batch sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.data.settings import DataSettings, EvalSet, set_name
from jaxrl_llm.errors import printable
from jaxrl_llm.learner.scorers import Scorer
from jaxrl_llm.learner.update import Learner
from jaxrl_llm.machine.shapes import MOST, Shape
from jaxrl_llm.models.adapters import Adapters
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.rollout.jax.sizes import StreamSizes
from jaxrl_llm.rollout.settings import JudgeSettings
from jaxrl_llm.session.changes import Change
from jaxrl_llm.session.settings import HealthSettings
from jaxrl_llm.structs import Sizes


def print_banner(title: str, rows: list[tuple[str, Any]], *, lines: Sequence[str] = ()) -> None:
    """Prints a title, aligned pairs, and lines of text below them."""
    console = Console(highlight=False, soft_wrap=True, force_jupyter=False)
    console.print(printable(title), markup=False, style="bold")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        text = f"{value:,}" if isinstance(value, int) else f"{value}"
        console.print(_wrapped(f"  {name:<{width}}  {text}", width + 4, console), markup=False)
    for line in lines:
        console.print(_wrapped(line, 2, console), markup=False)


def _wrapped(line: str, indent: int, console: Console) -> str:
    """Returns a line for a console. On a terminal it goes on below, after a word, with an indent."""
    line = printable(line)
    if not console.is_terminal:
        return line
    return textwrap.fill(line, console.width, subsequent_indent=" " * indent, break_long_words=False)


def model_and_data_table(
    path: str, mesh: Mesh, model: DecoderConfig, sizes: Sizes, settings: DataSettings, dataset: Dataset
) -> list[tuple[str, Any]]:
    """Returns the banner's rows on model, mesh and training data. path: folder of the model, "" if it is new."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    shape = f"{model.layers} layers of {model.width}, vocabulary {model.vocab_size:,}, {model.dtype}"
    few = len(dataset.rows) < sizes.prompts_per_step
    once = ""
    if settings.skip and sizes.steps * sizes.prompts_per_step <= len(dataset.rows):
        once = f"none is drawn twice in {sizes.steps:,} steps"
    path = path.removeprefix(f"{Path.cwd()}/") or "new"
    return [
        ("model", f"{path} ({shape})"),
        ("mesh", f"{axes} on {mesh.devices.flat[0].device_kind}"),
        ("prompts", f"{_count(dataset, 'data.convert')}, {dataset.dropped:,} over-long dropped"),
        *_sources(settings, dataset),
        *_pictures(dataset),
        *([("", "fewer than prompts_per_step: a step has some of them twice or more")] if few else []),
        *_order(settings, dataset, sizes),
        *([("", f"{once}, so that data.curriculum changes nothing")] if once else []),
        *[("", note) for note in (*dataset.notes, *_repeated(dataset))],
    ]


def problems_table(eval_sets: Mapping[str, EvalSet], held_out: Mapping[str, Dataset]) -> list[tuple[str, Any]]:
    """Returns the banner's rows on the evaluation sets; both by their sections of the config."""
    rows = list[tuple[str, Any]]()
    for section, problems in held_out.items():
        settings, name = eval_sets[section], set_name(section)
        rows += [
            (f"problems {name}".rstrip(), _count(problems, f"{section}.convert")),
            ("", f"of {settings.source}, judged by {settings.function}"),
            *([("", problems.read_as)] if problems.read_as else []),
            *_pictures(problems),
            *[("", note) for note in (*problems.notes, *_repeated(problems))],
        ]
    return rows


UNCONFINED = (
    "WARNING: config.reward.unconfined = True: programs that the policy writes run WITHOUT a sandbox. They can read, "
    "change and send all that you can: keys, data, other processes."
)


def unconfined(settings: JudgeSettings) -> list[str]:
    """Returns the line of a run whose programs of the policy may run without a sandbox."""
    return [UNCONFINED] if settings.unconfined else []


def shortened_warmups(warmups: Mapping[str, tuple[int, int]]) -> list[str]:
    """Returns a line for each warm-up that does not fit; warmups: steps of the config, and of the run, by section."""
    return [
        f"note: config.{section}.warmup_steps = {steps} does not fit into this run: its warm-up has {used}"
        for section, (steps, used) in warmups.items()
        if steps > used
    ]


def _sources(settings: DataSettings, dataset: Dataset) -> list[tuple[str, str]]:
    """Returns the rows on how the columns were read, and on the sources of a mixture."""
    weights = {name: settings.mixture[name].weight for name in dataset.parts}
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    parts = [f"{name}: {len(rows):,} prompts, {shares[name]:.1%} of a step" for name, rows in dataset.parts.items()]
    return [("", line) for line in [*([dataset.read_as] if dataset.read_as else []), *parts]]


def _order(settings: DataSettings, dataset: Dataset, sizes: Sizes) -> list[tuple[str, str]]:
    """Returns the row on the order of the prompts, if a column gives it."""
    if dataset.order_values is None:
        return []
    drawn = sizes.steps * sizes.prompts_per_step
    values = np.sort(dataset.order_values)
    line = f"each epoch by {settings.order_column}, from {values[0]:g} to {values[-1]:g}"
    if drawn < len(values) and not dataset.parts:
        # A prompt that replaces another one comes later in the order.
        open_end = " or above" * (sizes.samples > sizes.group_size)
        line += f"; the run has {drawn:,} prompts, and ends at {values[drawn - 1]:g}{open_end}"
    return [("", line)]


def _pictures(dataset: Dataset) -> list[tuple[str, str]]:
    images = dataset.images
    return [("pictures", images.line(dataset.width))] if images and images.count else []


def _repeated(dataset: Dataset) -> list[str]:
    count, number, before = dataset.repeated()
    if not count:
        return []
    return [
        f"{count:,} of {len(dataset.rows):,} prompts equal an earlier one, the first is row {number:,} (as {before:,})"
    ]


def beginning(start: int, steps: int, changes: Sequence[Change]) -> list[tuple[str, str]]:
    """Returns the banner's rows on the step at which the run begins, and on the rows that it accepts from there on."""
    begins = f"after step {start} of {steps}, resumed" if start else "anew"
    if start > steps:
        begins = f"after step {start}, which is more than config.num_steps = {steps}: there is nothing to do"
    return [("begins", begins), *[("", f"{change}: accepted") for change in changes]]


def rollback_table(health: HealthSettings, every: int) -> list[tuple[str, str]]:
    """Returns the banner's row on how far the run can go back, if a health rule may send it back."""
    if not (back := health.rollback):
        return []
    ages = ", ".join(str(every * 2**i) for i in range(3))
    reach = f"it keeps checkpoints about {ages} … steps back, to half of the steps done"
    return [("goes back", f"at {' or '.join(back.rules)}, at most {back.most} times: {reach}")]


def totals_table(sizes: Sizes) -> list[tuple[str, int]]:
    """Returns the rows on batch sizes and step counts."""
    return [
        ("sequences per step", sizes.sequences_per_step),
        ("sequences per optimizer step", sizes.sequences_per_update),
        ("optimizer steps per rollout", sizes.updates_per_rollout),
        ("optimizer steps", sizes.updates),
        ("warm-up steps", sizes.warmup_steps),
        ("completion tokens, at most", sizes.completion_tokens),
    ]


def _count(dataset: Dataset, convert: str) -> str:
    refused = f", {dataset.refused:,} dropped by {convert}" if dataset.refused else ""
    return f"{len(dataset.rows):,} of at most {dataset.width} tokens{refused}"


def models_table(scorers: Mapping[str, Scorer], learners: Mapping[str, Learner]) -> list[tuple[str, str]]:
    """Returns the banner's rows on models: scorers with their columns, and learners with their first step."""
    columns = [f"{name} ({', '.join(scorer.columns)})" for name, scorer in scorers.items()]
    late = {name: f" (from step {x.frozen_steps + 1})" for name, x in learners.items() if x.frozen_steps}
    return [
        ("models that score", ", ".join(columns) or "none"),
        ("models that learn", ", ".join(f"{name}{late.get(name, '')}" for name in learners)),
    ]


def truncation_table(sampling: Sampling, terms: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the banner's row on what top-k and top-p do to terms of the loss, such as "KL", if the run has both."""
    if not (sampling.truncates and terms):
        return []
    cut = ", ".join(f"{n} {x}" for n, x in (("top_k", sampling.top_k), ("top_p", sampling.top_p)) if x not in (0, 1))
    return [(" and ".join(terms), f"of truncated distributions ({cut}): each model is cut to its own tokens")]


def sampler_table(mesh: Mesh, devices: int) -> list[tuple[str, str]]:
    """Returns the banner's row on the sampler's mesh, if it has `devices` of its own."""
    if not devices:
        return []
    axes, local = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()), len(mesh.local_devices)
    where = f"the last {local} devices" if local == devices else f"the last {local} devices of each process"
    return [("sampling", f"{axes} on {where}, the mesh above has the others")]


def adapters_table(adapters: Adapters | None) -> list[tuple[str, str]]:
    """Returns the banner's row on adapters, if the run has some."""
    if not adapters:
        return []
    names = ", ".join(module.rpartition(".")[2] for module in adapters.modules.values())
    rows = [("adapters that learn", f"{adapters.size:,} parameters, {type(adapters.kind).__name__}, of {names}")]
    return rows + [("kernels of the base", "int8, with a scale for each output")] * bool(adapters.int8_paths)


def shapes_table(stream: StreamSizes | None, packed: Sequence[Shape]) -> list[tuple[str, str]]:
    """Returns the banner's rows on the shapes of decoding and on the largest shape of packed rows.

    Each shape is a program to compile. stream: sizes of the in-JAX engine, None if another engine samples.
    """
    rows = []
    if stream:
        counts = list(dict.fromkeys(slots.count for slots in stream.slots))
        cache = f"{stream.pages} pages of {stream.page} tokens"
        rows.append(("decoding, on a device", f"{' or '.join(map(str, counts))} completions at once, {cache}"))
    n, t = packed[0]
    later = f"; up to {MOST} shapes, none larger than the first batch needs" if len(packed) > 1 else ""
    rows.append(("learning, largest shape", f"{n} row{'s' * (n > 1)} of {t} completion tokens for a prompt{later}"))
    return rows
