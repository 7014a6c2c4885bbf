"""The banner at the start of a run: model, mesh, data and batch sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.data.settings import DataSettings, EvalSet, set_name
from jaxrl_llm.errors import printable
from jaxrl_llm.machine.shapes import MAX_SHAPES, Shape
from jaxrl_llm.models.adapters import Adapters
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.rollout.jax.sizes import StreamSizes
from jaxrl_llm.rollout.settings import JudgeSettings
from jaxrl_llm.session.changes import Change
from jaxrl_llm.session.settings import HealthSettings
from jaxrl_llm.structs import Sizes

if TYPE_CHECKING:  # the import of these modules takes a second, and a check of a config does not need them
    from jaxrl_llm.learner.scorers import Scorer
    from jaxrl_llm.learner.update import Learner


def print_banner(title: str, rows: list[tuple[str, Any]], *, lines: Sequence[str] = ()) -> None:
    """Prints a title, a table of (name, value) rows, and lines of text below the table."""
    console = Console(highlight=False, soft_wrap=True, force_jupyter=False)
    console.print(printable(title), markup=False, style="bold")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        text = f"{value:,}" if isinstance(value, int) else f"{value}"
        console.print(_wrapped(f"  {name:<{width}}  {text}", width + 4, console), markup=False)
    for line in lines:
        console.print(_wrapped(line, 2, console), markup=False)


def _wrapped(line: str, indent: int, console: Console) -> str:
    """Returns a line for a console. On a terminal a long line is wrapped between words.

    indent: spaces before the continuation lines.
    """
    line = printable(line)
    if not console.is_terminal:
        return line
    return textwrap.fill(line, console.width, subsequent_indent=" " * indent, break_long_words=False)


def model_and_data_table(
    path: str, mesh: Mesh, model: DecoderConfig, sizes: Sizes, settings: DataSettings, dataset: Dataset
) -> list[tuple[str, Any]]:
    """Returns the banner's rows on model, mesh and training data.

    path: folder of the model, "" for a new model. sizes: numbers of steps, prompts and completions of the run.
    """
    # Each row of the table is made below from one fact, and a row without a name continues the row above it.
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    shape = f"{model.layers} layers of {model.width}, vocabulary {model.vocab_size:,}, {model.dtype}"
    has_few_rows = len(dataset.rows) < sizes.prompts_per_step
    no_repeat_note = ""
    if settings.skip and sizes.steps * sizes.prompts_per_step <= len(dataset.rows):
        no_repeat_note = f"no prompt is drawn twice in {sizes.steps:,} steps"
    path = path.removeprefix(f"{Path.cwd()}/") or "new"
    return [
        ("model", f"{path} ({shape})"),
        ("mesh", f"{axes} on {mesh.devices.flat[0].device_kind}"),
        ("prompts", f"{_describe_size(dataset, 'data.convert')}, {dataset.dropped:,} over-long dropped"),
        *_source_rows(settings, dataset),
        *_image_rows(dataset),
        *([("", "fewer prompts than config.prompts_per_step: each step repeats some prompts")] if has_few_rows else []),
        *_order_row(settings, dataset, sizes),
        *([("", f"{no_repeat_note}, so config.data.curriculum has no effect")] if no_repeat_note else []),
        *[("", note) for note in (*dataset.notes, *_duplicate_notes(dataset))],
    ]


def problems_table(eval_sets: Mapping[str, EvalSet], held_out: Mapping[str, Dataset]) -> list[tuple[str, Any]]:
    """Returns the banner's rows on the evaluation sets. eval_sets, held_out: settings and rows by config section."""
    rows = list[tuple[str, Any]]()
    for section, problems in held_out.items():
        settings, name = eval_sets[section], set_name(section)
        rows += [
            (f"problems {name}".rstrip(), _describe_size(problems, f"{section}.convert")),
            ("", f"from {settings.source}, judged by {settings.function}"),
            *([("", problems.read_as)] if problems.read_as else []),
            *_image_rows(problems),
            *[("", note) for note in (*problems.notes, *_duplicate_notes(problems))],
        ]
    return rows


# Line of the banner if programs of the policy may run without a sandbox.
UNCONFINED = (
    "WARNING: config.reward.unconfined = True: programs that the policy writes run WITHOUT a sandbox. They can read, "
    "change and send all that you can: keys, data, other processes."
)


def unconfined_warning(settings: JudgeSettings) -> list[str]:
    """Returns the warning of a run that may execute the policy's programs without a sandbox, else []."""
    return [UNCONFINED] if settings.unconfined else []


def shortened_warmups(warmups: Mapping[str, tuple[int, int]]) -> list[str]:
    """Returns a note for each warm-up that is longer than the run. warmups: section -> (configured, actual steps)."""
    return [
        f"note: config.{section}.warmup_steps = {configured_steps} does not fit into this run: the warm-up lasts "
        f"{actual_steps} step{'s' * (actual_steps != 1)}"
        for section, (configured_steps, actual_steps) in warmups.items()
        if configured_steps > actual_steps
    ]


def _source_rows(settings: DataSettings, dataset: Dataset) -> list[tuple[str, str]]:
    """Returns the banner's rows on how the columns were read, and on the sources of a mixture."""
    weights = {name: settings.mixture[name].weight for name in dataset.parts}
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    parts = [f"{name}: {len(rows):,} prompts, {shares[name]:.1%} of a step" for name, rows in dataset.parts.items()]
    return [("", line) for line in [*([dataset.read_as] if dataset.read_as else []), *parts]]


def _order_row(settings: DataSettings, dataset: Dataset, sizes: Sizes) -> list[tuple[str, str]]:
    """Returns the banner's row on the order of the prompts, if config.data.order_column decides it."""
    if dataset.order_values is None:
        return []
    drawn_prompts = sizes.steps * sizes.prompts_per_step
    values = np.sort(dataset.order_values)
    line = f"each epoch by {settings.order_column}, from {values[0]:g} to {values[-1]:g}"
    if drawn_prompts < len(values) and not dataset.parts:
        # Groups without a reward difference are replaced by later prompts, so the run may get further than this.
        open_end = " or above" if sizes.samples > sizes.group_size else ""
        line += f"; the run has {drawn_prompts:,} prompts, and ends at {values[drawn_prompts - 1]:g}{open_end}"
    return [("", line)]


def _image_rows(dataset: Dataset) -> list[tuple[str, str]]:
    """Returns the banner's row on the images of a data set, or [] if it has none."""
    images = dataset.images
    return [("images", images.line(dataset.width))] if images and images.count else []


def _duplicate_notes(dataset: Dataset) -> list[str]:
    """Returns a note with the number of prompts that repeat an earlier prompt, or [] if all differ."""
    count, number, earlier_number = dataset.repeated()
    if not count:
        return []
    return [
        f"{count:,} of {len(dataset.rows):,} prompts repeat an earlier prompt; the first of them is row {number:,}, "
        f"which equals row {earlier_number:,}"
    ]


def start_table(start: int, steps: int, changes: Sequence[Change]) -> list[tuple[str, str]]:
    """Returns the banner's rows on the step after which the run continues, and on accepted changes of rows or code.

    start: step of the newest checkpoint, 0 for a new run. steps: config.num_steps.
    """
    start_text = f"after step {start} of {steps}, resumed" if start else "a new run"
    if start > steps:
        start_text = f"after step {start}, which is more than config.num_steps = {steps}: the run has ended already"
    return [("starts", start_text), *[("", f"{change}: accepted") for change in changes]]


def rollback_table(health: HealthSettings, checkpoint_every: int) -> list[tuple[str, str]]:
    """Returns the banner's row on how far the run can roll back; [] if no health rule may roll back.

    checkpoint_every: config.checkpoint.every.
    """
    if not (rollback := health.rollback):
        return []
    ages = ", ".join(str(checkpoint_every * 2**i) for i in range(3))
    reach = f"it keeps checkpoints about {ages} … steps back, to half of the steps done"
    return [("rolls back", f"at {' or '.join(rollback.rules)}, at most {rollback.most} times: {reach}")]


def totals_table(sizes: Sizes) -> list[tuple[str, int]]:
    """Returns the banner's rows on batch sizes and step counts."""
    return [
        ("sequences per step", sizes.sequences_per_step),
        ("sequences per optimizer step", sizes.sequences_per_update),
        ("optimizer steps per rollout", sizes.updates_per_rollout),
        ("optimizer steps", sizes.updates),
        ("warm-up steps", sizes.warmup_steps),
        ("most completion tokens in all", sizes.completion_tokens),
    ]


def _describe_size(dataset: Dataset, convert: str) -> str:
    """Returns text with the number of prompts, their lengths, and the rows that the convert function has dropped.

    convert: config field of the convert function.
    """
    dropped_text = f", {dataset.refused:,} dropped by {convert}" if dataset.refused else ""
    smaller_widths = [f"{width:,}" for width, _ in dataset.sizes.smaller]
    padding_text = f", padded to {dataset.width:,} or {' or '.join(smaller_widths)}" if smaller_widths else ""
    mean_length = np.mean([len(tokens) for tokens in dataset.ids])
    length_text = f"{len(dataset.rows):,} of at most {dataset.width:,} tokens, {mean_length:.0f} on average"
    return f"{length_text}{padding_text}{dropped_text}"


def models_table(scorers: Mapping[str, Scorer], learners: Mapping[str, Learner]) -> list[tuple[str, str]]:
    """Returns the banner's rows on models: scorers with the columns that they compute, and learners."""
    columns = [f"{name} ({', '.join(scorer.columns)})" for name, scorer in scorers.items()]
    start_notes = {name: f" (from step {x.frozen_steps + 1})" for name, x in learners.items() if x.frozen_steps}
    return [
        ("models that score", ", ".join(columns) or "none"),
        ("models that learn", ", ".join(f"{name}{start_notes.get(name, '')}" for name in learners)),
    ]


def truncation_table(sampling: Sampling, terms: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the banner's row on loss terms that are computed on truncated distributions, if top-k or top-p is used.

    terms: names such as "KL".
    """
    if not (sampling.truncates and terms):
        return []
    truncation = ", ".join(
        f"{n} {x}" for n, x in (("top_k", sampling.top_k), ("top_p", sampling.top_p)) if x not in (0, 1)
    )
    return [
        (
            " and ".join(terms),
            f"of truncated distributions ({truncation}): each model keeps only its own most likely tokens",
        )
    ]


def sampler_table(mesh: Mesh, devices: int) -> list[tuple[str, str]]:
    """Returns the banner's row on the sampler's mesh; [] if it shares the trainer's devices.

    devices: number of devices that only the sampler uses; 0 = none.
    """
    if not devices:
        return []
    axes, local_count = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()), len(mesh.local_devices)
    devices_text = (
        f"the last {local_count} devices"
        if local_count == devices
        else f"the last {local_count} devices of each process"
    )
    return [("sampling", f"{axes} on {devices_text}; the trainer's mesh has the other devices")]


def adapters_table(adapters: Adapters | None) -> list[tuple[str, str]]:
    """Returns the banner's rows on adapters, or [] if the run has none."""
    if not adapters:
        return []
    names = ", ".join(module.rpartition(".")[2] for module in adapters.modules.values())
    rows = [("adapters that learn", f"{adapters.size:,} parameters, {type(adapters.kind).__name__}, of {names}")]
    if adapters.int8_paths:
        rows.append(("kernels of the base", "int8, with a scale for each output"))
    return rows


def shapes_table(stream: StreamSizes | None, packed: Sequence[Shape]) -> list[tuple[str, str]]:
    """Returns the banner's rows on the shapes of decoding and of packed rows, each of which is a compiled program.

    stream: sizes of the in-JAX engine, None if another engine samples. packed: shapes [N, T], the largest first.
    """
    rows = []
    if stream:
        # Numbers of completions that the decode programs run at once, the largest first.
        counts = list(dict.fromkeys(slots.count for slots in stream.slots))
        cache = f"{stream.pages} pages of {stream.page} tokens"
        if drafts := stream.drafted(stream.slots[-1]):
            cache += f", {drafts} drafts for each of {counts[-1]} or fewer"
        elif stream.drafts:
            cache += ", no drafts, because a pass would compute too many tokens"
        rows.append(("decoding, on a device", f"{' or '.join(map(str, counts))} completions at once, {cache}"))
    row_count, row_tokens = packed[0]
    limit_note = f"; up to {MAX_SHAPES} shapes, none larger than the first batch needs" if len(packed) > 1 else ""
    rows.append(
        (
            "learning, largest shape",
            f"{row_count} row{'s' * (row_count > 1)} of {row_tokens} completion tokens for a prompt{limit_note}",
        )
    )
    return rows
