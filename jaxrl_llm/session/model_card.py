"""The model card of a trained model: README.md of its folder, with config, data and the measured curve."""

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
from jaxrl_llm.machine import disk
from jaxrl_llm.models import hf
from jaxrl_llm.session import changes, json_lines

POINTS = 20  # rows of the curve
COLUMNS = {  # metric -> heading, format; behind the accuracies
    "reward/mean": ("reward", ".3f"),
    "loss/sft": ("loss", ".4f"),
    "completion/length": ("completion tokens", ".1f"),
    "kl/ref": ("KL to the reference", ".1e"),
    "entropy": ("entropy", ".3f"),
}


def write(folder: Path, text: str) -> None:
    """Writes a card into a model's folder. Raises: UserError."""
    with disk.writing(folder):
        (folder / "README.md").write_text(text, encoding="utf-8")


def card(workdir: Path, config: Mapping[str, Any], began_with: Mapping[str, str], step: int | None = None) -> str:
    """Returns the card of the model after `step` of a run; None: after the last one.

    config: content of config.json. began_with: hashes of the model and of the data with which the run began, by field.
    """
    records = [
        record for record in json_lines.read(workdir / "metrics.jsonl") if step is None or record["step"] <= step
    ]
    last = records[-1]["step"] if records else 0
    fields = flatten(config)
    name, (algorithm, *tags) = workdir.resolve().name, _algorithm(fields)
    commit = _commit()
    by = f"jaxrl_llm {jaxrl_llm.__version__}" + (f", commit {commit}" if commit else "")
    base = _plain(fields["model.path"]) or "a new model"
    parts = [
        f"# {name}",
        f"This model was trained from `{base}` with {algorithm}, by {by}. It is the model after step {last:,} of "
        f"{config['num_steps']:,}.",
        "```python\nfrom transformers import pipeline\n\n"
        'generate = pipeline("text-generation", "THIS_MODEL")  # or a folder, for vLLM too\n```',
        "## Measured",
        _curve(records, fields),
        "## Data",
        _data(fields, began_with, [change for change in changes.read(workdir) if change.after_step < last]),
        *_code(began_with),
        "## Config",
        f"```json\n{_plain(json.dumps(config, indent=2))}\n```",
    ]
    return f"---\n{_head(name, fields, tags, records)}\n---\n\n" + "\n\n".join(parts) + "\n"


def _head(name: str, fields: Mapping[str, Any], tags: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the metadata that a hub reads."""
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="custom",
            dataset_name=_plain(fields[f"{section}.source"]),
            dataset_config=set_name(section) or None,  # apart from it, the hub would take all for one data set
            metric_type="accuracy",
            metric_value=round(record[metric], 4),
            metric_name=fields[f"{section}.function"],
        )
        for section, metric in accuracies_of(fields).items()
        for record in [record for record in records if record.get(metric) is not None][-1:]
    ]
    path = fields["model.path"]
    made = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["jaxrl_llm", *tags],
        base_model=path if hf.is_hub_id(path) else None,
        eval_results=results or None,
    )
    return made.to_yaml().strip()


def _algorithm(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns how the model was trained, in words, and the tags for a hub."""
    if fields.get("data.rejected_column"):
        return f"the `{fields['loss.name']}` loss on pairs of completions", "preference-learning", fields["loss.name"]
    if not (name := fields.get("advantage.name")):
        return "supervised fine-tuning", "sft"
    return f"`{name}` advantages and the `{fields['loss.name']}` loss", "reinforcement-learning", name


def _curve(records: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str:
    """Returns a table: the evaluations, or if there are none the steps; of many, some at equal distances."""
    chosen = [r for r in records if r.get("eval/accuracy") is not None] or list(records)
    if len(chosen) > POINTS:
        chosen = [chosen[round(i * (len(chosen) - 1) / (POINTS - 1))] for i in range(POINTS)]
    accuracies = {metric: f"accuracy {set_name(section)}".rstrip() for section, metric in accuracies_of(fields).items()}
    columns = {metric: (heading, ".1%") for metric, heading in accuracies.items()} | COLUMNS
    names = [name for name in columns if any(r.get(name) is not None for r in chosen)]
    if not names:
        return "Nothing was measured."
    head = ["step", *(columns[name][0] for name in names)]
    rows = [
        [f"{r['step']:,}", *("" if r.get(name) is None else format(r[name], columns[name][1]) for name in names)]
        for r in chosen
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def _data(fields: Mapping[str, Any], began_with: Mapping[str, str], accepted: Sequence[changes.Change]) -> str:
    lines = []
    uses = {section: f"evaluation {set_name(section)}".rstrip() for section in accuracies_of(fields)}
    for section, use in {"data": "training", **uses}.items():
        source, convert = _plain(fields[f"{section}.source"]), fields[f"{section}.convert"]
        digest = began_with.get(f"{section}.source")
        lines.append(
            f"- {use}: `{source}`"
            + (f", converted by `{convert}`" if convert else "")
            + (f", SHA-256 `{digest}`" if digest else "")
        )
    for change in accepted:
        other = "changed" if change.field.startswith(changes.CODE) else "had other rows"
        lines.append(f"- after step {change.after_step:,}, {change.field} {other}: SHA-256 `{change.before}` before")
    lines.append(f"- base model: SHA-256 `{began_with['model.path']}` of its config and of a part of each tensor")
    for section in uses:
        judge, name = fields[f"{section}.function"], f"accuracy {set_name(section)}".rstrip()
        mean = f"the mean of `{judge}` over greedy completions"
        pairs = "the share of pairs whose chosen completion has the larger reward"
        lines.append(f"- {name}: {pairs if judge == PREFERENCE else mean}")
    return "\n".join(lines)


def _code(began_with: Mapping[str, str]) -> list[str]:
    """Returns the section on the user's own functions, if the run has some."""
    functions = {key: digest for key, digest in began_with.items() if key.startswith(changes.CODE)}
    lines = [f"- {key}: SHA-256 `{digest}`" for key, digest in functions.items()]
    return ["## Own code", "\n".join(lines)] if lines else []


def _plain(text: str) -> str:
    """Returns a text without the folder of this package and the home folder: a card may become public."""
    package = Path(jaxrl_llm.__file__).parent
    return text.replace(f"{package.parent}/", "").replace(str(Path.home()), "~")


def _commit() -> str:
    """Returns the commit of this package's checkout, marked if files have changed; "": there is no checkout."""
    folder = Path(jaxrl_llm.__file__).resolve().parent.parent

    def git(*command: str) -> str:
        words = ["git", "-C", str(folder), *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != folder:  # a checkout of something else
            return ""
        return git("rev-parse", "--short=12", "HEAD") + (
            " with changes" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def for_hub(text: str, repo: str) -> str:
    """Returns a card that names its place on a hub."""
    ModelCard(text)  # raises if the metadata cannot be read
    return text.replace("THIS_MODEL", repo)
