"""A data file that was repaired: the run is resumed by an explicit choice, which names the rows that are there now."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict
from test_steps import tiny

from jaxrl_llm import build
from jaxrl_llm import recipe as recipes
from jaxrl_llm.data import order
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import sharding
from jaxrl_llm.session import checkpoint, other_rows
from jaxrl_llm.session.checkpoint import MODELS, SAMPLES, Checkpoints
from jaxrl_llm.session.other_rows import Rows
from jaxrl_llm.structs import PartState
from jaxrl_llm.train import steps

SEEN: list[str] = []
ASSET = Path(checkpoint.__file__).parents[1] / "assets" / "arithmetic"


def looks(prompts: list, answer: list, **_: object) -> list[float]:
    """A reward that remembers what it was asked about."""
    SEEN.extend(f"{p[0]['content']}={a}" for p, a in zip(prompts[::4], answer[::4], strict=True))
    return [float(i % 2) for i in range(len(prompts))]


def write(file: Path, answers: list[str | None]) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}"}], "answer": x} for i, x in enumerate(answers)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def seen(workdir: Path, file: Path, num_steps: int, **more) -> list[str]:
    """Runs up to a step, and returns the rows that it drew."""
    SEEN.clear()
    config = tiny(**{
        "data.source": str(file), "eval": None, "num_steps": num_steps, "schedule_steps": 9, "prompts_per_step": 2,
        "prompts_per_update": 2, "reward.functions": ("test_other_rows.looks",), "reward.weights": (1.0,),
        "reward.timeout": 0.0, "rollout.max_completion_tokens": 1, "kl": None,
    } | more)  # fmt: skip
    assert [record["step"] for record in steps(config, workdir)][-1] == num_steps
    return list(SEEN)


def drawn(numbers: list[int], answers: dict[int, str | None], count: int) -> list[str]:
    """The first rows that a run over rows of these numbers draws."""
    batches = order.iterate(len(numbers), 2, 0, list)
    found = [numbers[i] for _ in range(count // 2) for i in next(batches)]
    return [f"{i}+{i}={answers[i]}" for i in found]


def test_a_repaired_file_is_resumed_where_the_run_was_and_one_with_fewer_rows_begins_its_order_anew(
    tmp_path, capsys, monkeypatch
):
    file, run, right = tmp_path / "x.jsonl", tmp_path / "run", {i: str(2 * i) for i in range(6)}
    broken = right | {int(drawn([*range(6)], right, 6)[-1][0]): None}
    write(file, [*broken.values()])
    assert seen(run, file, 2) == drawn([*range(6)], broken, 4)
    assert "1 of 6 rows has no 'answer', the first is row " in capsys.readouterr().out
    write(file, [*right.values()])
    line = "config.data.source holds other rows than this run had (6 rows then, 6 now): put the rows back"
    for accept in ("", "yes"):
        with pytest.raises(UserError, match=re.escape(line)) as refused:
            seen(run, file, 3, **{"data.accept": accept})
    assert not (run / other_rows.FILE).exists()
    (name,) = re.findall(r"--config.data.accept=(\w{12})$", str(refused.value))
    assert seen(run, file, 3, **{"data.accept": name}) == drawn([*range(6)], right, 6)[4:]
    assert "(6 rows then, 6 now): accepted" in capsys.readouterr().out
    (change,) = other_rows.read(run)
    assert (change.after_step, change.field, change.rows_before, change.rows_now) == (2, "data.source", [6], [6])
    # Now by another convert function, which drops a row.
    (tmp_path / "other_convert.py").write_text("def some(row):\n    return row if row['answer'] != '0' else None\n")
    monkeypatch.syspath_prepend(tmp_path)
    fewer = {"data.convert": "other_convert.some"}
    line = (
        "(6 rows then, 5 now; the order of the rows begins anew); "
        "data.convert was '' and is 'other_convert.some': put the rows back"
    )
    with pytest.raises(UserError, match=re.escape(line)) as refused:
        seen(run, file, 4, **fewer)
    (name,) = re.findall(r"--config.data.accept=(\w{12})$", str(refused.value))
    assert seen(run, file, 4, **fewer, **{"data.accept": name}) == drawn([1, 2, 3, 4, 5], right, 2)
    first, second = other_rows.read(run)
    assert (second.after_step, second.rows_before, second.rows_now, second.before) == (3, [6], [5], first.now)
    assert "- after step 3, data.source had other rows: SHA-256 `" in (run / "hf" / "README.md").read_text()


def test_a_chat_template_writes_the_day_of_the_runs_beginning_when_it_is_resumed_too(tmp_path, monkeypatch):
    write(tmp_path / "x.jsonl", ["0", "2"])
    shutil.copytree(ASSET, tmp_path / "model")
    dated = "{{ strftime_now('%d') }}" + (ASSET / "chat_template.jinja").read_text()
    (tmp_path / "model" / "chat_template.jinja").write_text(dated)
    fields = {"data.source": f"{tmp_path}/x.jsonl", "eval": None, "model.path": f"{tmp_path}/model"}
    prompts = []
    for day in (24, 25):  # by the clock of this package, and that of transformers
        clock = SimpleNamespace(today=lambda day=day: date(2026, 11, day), now=lambda day=day: datetime(2026, 11, day))
        monkeypatch.setattr(checkpoint, "date", clock)
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        opened = build.opened_run(tiny(**fields), tmp_path / "run", recipes.read, lambda *of_run: of_run)
        with opened as (place, recipe):
            inputs = build.load(place, recipe, lambda: Path(recipe.model.path))
            checkpoint.open_workdir(tmp_path / "run", place.config)
            prompts.append(inputs.tokenizer.decode(inputs.dataset.ids[0]))
    assert prompts == ["24<|user|>0+0<|assistant|>"] * 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["today"] == "2026-11-24"


KEEP, MESH = ConfigDict(dict(every=1, keep=2, keep_best=0)), sharding.make_mesh(data=1, fsdp=1, tensor=1)
HASHES = {"model.path": "m", "data.source": "old", "eval.source": "e"}


def checkpoints(workdir: Path, data: str, rows: Rows) -> Checkpoints:
    return Checkpoints(workdir / "checkpoints", HASHES | {"data.source": data}, KEEP, MESH, rows)


def parts(position: dict, batches: list) -> dict[str, PartState]:
    """A model, and the position in the data with batches that wait."""
    return {MODELS: PartState({}, {"w": jnp.zeros(2)}), SAMPLES: PartState({"position": position}, batches)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A workdir with a checkpoint and a batch that waits."""
    rows = Rows({"data.source": [4, 2], "eval.source": [3]}, "prompts")
    with closing(checkpoints(tmp_path, "old", rows)) as made:
        made.save(1, parts({"next": 7}, [{"tokens": jnp.ones((2, 3))}]), None)
    (tmp_path / "config.json").write_text('{"data": {"source": "a", "accept": ""}}')
    return tmp_path


def config_of(hashes: dict[str, str]) -> dict[str, str]:
    return {"data.source": "a", "data.accept": other_rows.accepted_by(hashes)}


@pytest.mark.parametrize(("counts", "prompts", "waits", "position"), [
    ([4, 2], "prompts", 1, {"next": 7}),  # other answers
    ([4, 2], "others", 0, {"next": 7}),  # other prompts: what waits is an answer to those before
    ([3, 3], "prompts", None, None),  # another source of the mixture has them
    ([4, 3], "others", None, None),
])  # fmt: skip
def test_what_waits_and_the_position_hold_as_far_as_the_rows_are_the_same(saved, counts, prompts, waits, position):
    rows = Rows({"data.source": counts, "eval.source": [3]}, prompts)
    with closing(checkpoints(saved, "new", rows)) as made:
        step, (change,) = made.check_beginning(config_of(HASHES | {"data.source": "new"}))
        assert (step, change.rows_before, change.rows_now) == (1, [4, 2], counts)
        assert str(change).startswith("config.data.mixture holds other rows than this run had (6 rows then")
        samples = made.resume({"w": jnp.zeros(2)})[1].get(SAMPLES)
    assert (samples and len(samples.arrays or [])) == waits
    assert (samples and samples.notes["position"]) == position


def test_a_checkpoint_of_another_format_is_refused_in_one_line(saved):
    notes = saved / "checkpoints" / "1" / "notes" / "metadata"
    notes.write_text(json.dumps(json.loads(notes.read_text()) | {"format": 99}))
    rows = Rows({"data.source": [4, 2], "eval.source": [3]}, "prompts")
    with (
        closing(checkpoints(saved, "old", rows)) as made,
        pytest.raises(
            UserError, match=r"checkpoints/1 has format 99, and this version of jaxrl_llm reads format 2: go on"
        ),
    ):
        made.check_beginning({"data.accept": ""})


def test_one_choice_accepts_the_rows_of_both_and_no_other_model(saved):
    rows = Rows({"data.source": [6], "eval.source": [2]}, "prompts")
    now = HASHES | {"data.source": "new", "eval.source": "f"}
    with closing(Checkpoints(saved / "checkpoints", now, KEEP, MESH, rows)) as made:
        _, changes = made.check_beginning(config_of(now))
    assert [change.field for change in changes] == ["data.source", "eval.source"]
    assert "(3 rows then, 2 now; accuracies are of these from now on)" in str(changes[1])
    for _ in range(2):  # a run that ends before its next checkpoint resumes as this one
        other_rows.write(saved, changes)
    assert other_rows.read(saved) == changes
    other, line = now | {"model.path": "n"}, r"config.model.path holds something else .*: put that back"
    with (
        closing(Checkpoints(saved / "checkpoints", other, KEEP, MESH, rows)) as made,
        pytest.raises(UserError, match=line),
    ):
        made.check_beginning(config_of(now))


def test_a_run_that_has_saved_accepted_rows_does_not_need_the_choice_again(saved):
    rows, now = Rows({"data.source": [6], "eval.source": [3]}, "prompts"), HASHES | {"data.source": "new"}
    for config in (config_of(now), {"data.accept": ""}):
        with closing(checkpoints(saved, "new", rows)) as made:
            step, changes = made.check_beginning(config)
            made.save(step + 1, parts({"next": 1}, []), None)
    assert (step, changes) == (2, [])
