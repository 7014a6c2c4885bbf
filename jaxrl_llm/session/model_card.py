"""Writes the model card of a trained model, README.md of its folder: measured accuracies, data, and the config."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import EvalResult

import jaxrl_llm
from jaxrl_llm.config.load import flatten
from jaxrl_llm.data.settings import PREFERENCE, accuracies_of, set_name
from jaxrl_llm.health import json_lines
from jaxrl_llm.machine import disk
from jaxrl_llm.models import hf
from jaxrl_llm.session import changes

POINTS = 20  # maximum number of rows in the table of measurements
# Columns of the table of measurements after the accuracies: metric -> (heading, format).
COLUMNS = {
    "reward/mean": ("reward", ".3f"),
    "loss/sft": ("loss", ".4f"),
    "completion/length": ("completion tokens", ".1f"),
    "kl/ref": ("KL to the reference", ".1e"),
    "entropy": ("entropy", ".3f"),
}


def write(folder: Path, text: str) -> None:
    """Writes a card into a model's folder. Raises: UserError, if the disk write fails."""
    with disk.writing(folder):
        (folder / "README.md").write_text(text, encoding="utf-8")


def card(workdir: Path, config: Mapping[str, Any], input_hashes: Mapping[str, str], step: int | None = None) -> str:
    """Returns the model card of a run's model after `step`; None = after the last step.

    config: content of config.json. input_hashes: hashes of the initial model and of the data by config field.
    """
    records = [
        record
        for record in json_lines.read(workdir / "metrics.jsonl", quiet=True)
        if step is None or record["step"] <= step
    ]
    last_step = records[-1]["step"] if records else 0
    fields = flatten(config)
    # The card has metadata for a hub, a sentence on the model, and sections on measurements, data, code and config.
    name, (algorithm, *tags) = workdir.resolve().name, _algorithm(fields)
    commit = _commit()
    trainer = f"jaxrl_llm {jaxrl_llm.__version__}" + (f", commit {commit}" if commit else "")
    base_model = _without_home(fields["model.path"]) or "a new model"
    sections = [
        f"# {name}",
        f"This model was trained from `{base_model}` with {algorithm}, by {trainer}. It is the model after step "
        f"{last_step:,} of {config['num_steps']:,}.",
        "```python\nfrom transformers import pipeline\n\n"
        'generate = pipeline("text-generation", "THIS_MODEL")  # or a folder, for vLLM too\n```',
        "## Measured",
        _curve(records, fields),
        "## Data",
        _data(fields, input_hashes, [change for change in changes.read(workdir) if change.after_step < last_step]),
        *_code(input_hashes),
        "## Config",
        f"```json\n{_without_home(json.dumps(config, indent=2))}\n```",
    ]
    return f"---\n{_metadata(name, fields, tags, records)}\n---\n\n" + "\n\n".join(sections) + "\n"


def _metadata(name: str, fields: Mapping[str, Any], tags: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the card's metadata for a model hub, as YAML."""
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="custom",
            dataset_name=_without_home(fields[f"{section}.source"]),
            dataset_config=set_name(section) or None,  # without it the hub would merge all sets into one
            metric_type="accuracy",
            metric_value=round(record[metric], 4),
            metric_name=fields[f"{section}.function"],
        )
        for section, metric in accuracies_of(fields).items()
        for record in [record for record in records if record.get(metric) is not None][-1:]
    ]
    path = fields["model.path"]
    metadata = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["jaxrl_llm", *tags],
        base_model=path if hf.is_hub_id(path) else None,
        eval_results=results or None,
    )
    return metadata.to_yaml().strip()


def _algorithm(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a description of how the model was trained, followed by the tags for a hub."""
    if fields.get("data.rejected_column"):
        return f"the `{fields['loss.name']}` loss on pairs of completions", "preference-learning", fields["loss.name"]
    if not (name := fields.get("advantage.name")):
        return "supervised fine-tuning", "sft"
    return f"`{name}` advantages and the `{fields['loss.name']}` loss", "reinforcement-learning", name


def _curve(records: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str:
    """Returns a Markdown table of the evaluations, or of the steps if the run evaluated nothing.

    If there are more than POINTS rows, the table shows POINTS of them at equal distances.
    """
    evaluated = [record for record in records if record.get("eval/accuracy") is not None]
    shown_records = evaluated or list(records)
    if len(shown_records) > POINTS:
        distance = (len(shown_records) - 1) / (POINTS - 1)
        shown_records = [shown_records[round(i * distance)] for i in range(POINTS)]
    accuracies = {metric: f"accuracy {set_name(section)}".rstrip() for section, metric in accuracies_of(fields).items()}
    columns = {metric: (heading, ".1%") for metric, heading in accuracies.items()} | COLUMNS
    # A column is shown if at least one of the shown records has its metric.
    shown_columns = {
        metric: column
        for metric, column in columns.items()
        if any(record.get(metric) is not None for record in shown_records)
    }
    if not shown_columns:
        return "Nothing was measured."
    headings = ["step", *(heading for heading, _ in shown_columns.values())]
    rows: list[list[str]] = []
    for record in shown_records:
        values = [(record.get(metric), number_format) for metric, (_, number_format) in shown_columns.items()]
        texts = ["" if value is None else format(value, number_format) for value, number_format in values]
        rows.append([f"{record['step']:,}", *texts])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [headings, ["---"] * len(headings), *rows])


def _data(fields: Mapping[str, Any], input_hashes: Mapping[str, str], accepted: Sequence[changes.Change]) -> str:
    """Returns the lines about the data: sources and hashes of training and evaluation, and accepted changes."""
    lines = []
    # Each section of the config that names rows, with what the run does with the rows.
    uses = {section: f"evaluation {set_name(section)}".rstrip() for section in accuracies_of(fields)}
    for section, use in {"data": "training", **uses}.items():
        source, convert = _without_home(fields[f"{section}.source"]), fields[f"{section}.convert"]
        digest = input_hashes.get(f"{section}.source")
        convert_text = f", converted by `{convert}`" if convert else ""
        digest_text = f", SHA-256 `{digest}`" if digest else ""
        lines.append(f"- {use}: `{source}`{convert_text}{digest_text}")
    for change in accepted:
        description = "changed" if change.field.startswith(changes.CODE) else "had other rows"
        lines.append(
            f"- after step {change.after_step:,}, {change.field} {description}: SHA-256 `{change.before}` before"
        )
    lines.append(f"- base model: SHA-256 `{input_hashes['model.path']}` of its config and of a part of each tensor")
    for section in uses:
        judge, name = fields[f"{section}.function"], f"accuracy {set_name(section)}".rstrip()
        mean = f"the mean of `{judge}` over greedy completions"
        pairs = "the share of pairs whose chosen completion has the larger reward"
        lines.append(f"- {name}: {pairs if judge == PREFERENCE else mean}")
    return "\n".join(lines)


def _code(input_hashes: Mapping[str, str]) -> list[str]:
    """Returns the heading and the list of the user's own functions, or [] if the run uses none."""
    functions = {key: digest for key, digest in input_hashes.items() if key.startswith(changes.CODE)}
    lines = [f"- {key}: SHA-256 `{digest}`" for key, digest in functions.items()]
    return ["## Own code", "\n".join(lines)] if lines else []


def _without_home(text: str) -> str:
    """Removes the folder of this package and the home folder from a text, because a card may become public."""
    package = Path(jaxrl_llm.__file__).parent
    return text.replace(f"{package.parent}/", "").replace(str(Path.home()), "~")


def _commit() -> str:
    """Returns the commit of this package's git checkout, marked if files have changed; "" without a checkout."""
    folder = Path(jaxrl_llm.__file__).resolve().parent.parent

    def git(*command: str) -> str:
        words = ["git", "-C", str(folder), *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != folder:  # the checkout of another project
            return ""
        return git("rev-parse", "--short=12", "HEAD") + (
            " with changes" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def for_hub(text: str, repo: str) -> str:
    """Returns a card whose example loads the model from the repository `repo` of a hub."""
    ModelCard(text)  # raises if the metadata cannot be read
    return text.replace("THIS_MODEL", repo)
