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
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf
from jaxrl_llm.session import changes, checkpoint, model_card, workdir
from jaxrl_llm.session.changes import Rows
from jaxrl_llm.session.checkpoint import MODELS, SAMPLES, Checkpoints
from jaxrl_llm.structs import PartState

ASSET = Path(checkpoint.__file__).parents[1] / "assets" / "arithmetic"


def write(file: Path, answers: list[str | None]) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}"}], "answer": x} for i, x in enumerate(answers)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def seen(workdir: Path, file: Path, **more) -> list[str]:
    """Goes on with a run by a step that samples and learns nothing, saves it, and returns its rows."""
    with build.build(config_of(file, **more), workdir) as (session, parts):
        lease = session.start()
        rows = parts.actor.next().prompts.rows
        session.run_state.states, _ = lease.reclaim()
        session.run_state.step += 1
        parts.actor.push(
            session.run_state.states, parts.learning.policy(session.run_state.states), session.run_state.step
        )
        session.save()
        session.checkpoints.wait()
    return [f"{row['prompt'][0]['content']}={row['answer']}" for row in rows]


def config_of(file: Path, **more) -> ConfigDict:
    return tiny(**{"data.source": str(file), "eval": None, "kl": None, "reward.timeout": 0.0} | more)


def drawn(numbers: list[int], answers: dict[int, str | None], count: int) -> list[str]:
    """The first rows that a run over rows of these numbers draws."""
    batches = order.iterate(len(numbers), 8, 0, list)
    found = [numbers[i] for _ in range(count // 8) for i in next(batches)]
    return [f"{i}+{i}={answers[i]}" for i in found]


def test_a_repaired_file_is_resumed_where_the_run_was_by_an_explicit_choice(tmp_path, capsys, monkeypatch, refused):
    file, run, numbers = tmp_path / "x.jsonl", tmp_path / "run", [*range(16)]
    right = {i: str(2 * i) for i in numbers}
    broken = right | {int(drawn(numbers, right, 16)[-1].partition("+")[0]): None}
    write(file, [*broken.values()])
    assert seen(run, file) == drawn(numbers, broken, 8)
    assert "1 of 16 rows has no 'answer', the first is row " in capsys.readouterr().out
    write(file, [*right.values()])
    with refused("config.data.source", "16 rows then, 16 now", "--config.checkpoint.accept=") as caught:
        seen(run, file, **{"checkpoint.accept": "yes"})
    assert not (run / changes.FILE).exists()
    (name,) = re.findall(r"--config.checkpoint.accept=(\w{12})$", str(caught.value))
    assert seen(run, file, **{"checkpoint.accept": name}) == drawn(numbers, right, 16)[8:]
    assert "(16 rows then, 16 now): accepted" in capsys.readouterr().out
    (change,) = changes.read(run)
    assert (change.after_step, change.field, change.rows_before, change.rows_now) == (1, "data.source", [16], [16])
    (run / "metrics.jsonl").write_text('{"step": 2}\n')
    card = model_card.card(run, config_of(file).to_dict(), HASHES)
    assert "- after step 1, data.source had other rows: SHA-256 `" in card
    # Now by another convert function, which drops a row.
    (tmp_path / "other_convert.py").write_text("def some(row):\n    return row if row['answer'] != '0' else None\n")
    monkeypatch.syspath_prepend(tmp_path)
    with refused("config.data.source", "16 rows then, 15 now", "data.convert"):
        seen(run, file, **{"data.convert": "other_convert.some"})


def test_a_chat_template_writes_the_day_on_which_a_resumed_run_began(tmp_path, monkeypatch):
    """A run begins with the hashes of its model, its rows and its problems."""
    write(tmp_path / "x.jsonl", ["0", "2"])
    write(tmp_path / "exam.jsonl", ["0"])
    shutil.copytree(ASSET, tmp_path / "model")
    dated = "{{ strftime_now('%d') }}" + (ASSET / "chat_template.jinja").read_text()
    (tmp_path / "model" / "chat_template.jinja").write_text(dated)
    fields = {"data.source": f"{tmp_path}/x.jsonl", "eval.source": f"{tmp_path}/exam.jsonl"}
    config = tiny(**fields, **{"model.path": f"{tmp_path}/model"})
    prompts = []
    for day in (24, 25):  # by the clock of this package, and that of transformers
        clock = SimpleNamespace(today=lambda day=day: date(2026, 11, day), now=lambda day=day: datetime(2026, 11, day))
        monkeypatch.setattr(workdir, "date", clock)
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        opened = build.opened_run(config.copy_and_resolve_references(), tmp_path / "run", recipes.read, lambda *x: x)
        with opened as (place, recipe):
            inputs = build.load(place, recipe, lambda: Path(recipe.model.path))
            workdir.write_config(tmp_path / "run", place.config)
            prompts.append(inputs.tokenizer.decode(inputs.dataset.ids[0]))
    assert prompts == ["24<|user|>0+0<|assistant|>"] * 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["today"] == "2026-11-24"
    assert inputs.input_hashes == {
        "model.path": hf.fingerprint(tmp_path / "model"),
        "data.source": inputs.dataset.fingerprint(),
        "eval.source": inputs.held_out["eval"].fingerprint(),
    }
    assert len(set(inputs.input_hashes.values())) == 3


KEEP, MESH = ConfigDict(dict(every=1, keep=2, keep_best=0)), meshes.make_mesh(data=1, fsdp=1, tensor=1)
HASHES = {"model.path": "m", "data.source": "old", "eval.source": "e"}


def checkpoints(workdir: Path, data: str, rows: Rows) -> Checkpoints:
    return Checkpoints(workdir / "checkpoints", HASHES | {"data.source": data}, KEEP, MESH, rows)


def parts(position: dict, batches: list) -> dict[str, PartState]:
    """A model, and the position in the data with batches that wait."""
    return {MODELS: PartState({}, {"w": jnp.zeros(2)}), SAMPLES: PartState({"positions": [position]}, batches)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A workdir with a checkpoint and a batch that waits."""
    with closing(checkpoints(tmp_path, "old", ROWS)) as made:
        made.save(1, parts({"next": 7}, [{"tokens": jnp.ones((2, 3))}]))
    (tmp_path / "config.json").write_text('{"data": {"source": "a"}}')
    return tmp_path


def accepting(hashes: dict[str, str]) -> dict[str, str]:
    return {"data.source": "a", "checkpoint.accept": changes.acceptance_token(hashes)}


ROWS = Rows({"data.source": [4, 2], "eval.source": [3]}, "prompts")


@pytest.mark.parametrize(("counts", "prompts", "waits", "position"), [
    ([4, 2], "prompts", 1, {"next": 7}),  # other answers
    ([4, 2], "others", 0, {"next": 7}),  # other prompts: what waits is an answer to those before
    ([3, 3], "prompts", None, None),  # another source of the mixture has them
    ([4, 3], "others", None, None),
])  # fmt: skip
def test_what_waits_and_the_position_hold_as_far_as_the_rows_are_the_same(saved, counts, prompts, waits, position):
    rows = Rows({"data.source": counts, "eval.source": [3]}, prompts)
    with closing(checkpoints(saved, "new", rows)) as made:
        step, (change,) = made.check_beginning(accepting(HASHES | {"data.source": "new"}))
        assert (step, change.rows_before, change.rows_now) == (1, [4, 2], counts)
        assert str(change).startswith("config.data.mixture holds other rows than this run had (6 rows then")
        samples = made.resume({"w": jnp.zeros(2)})[1].get(SAMPLES)
    assert (samples and len(samples.arrays or [])) == waits
    assert (samples and samples.notes["positions"][0]) == position


def test_a_checkpoint_of_another_format_and_a_torn_one_are_refused(saved, refused):
    notes = saved / "checkpoints" / "1" / "notes" / "metadata"
    for text in (json.dumps(json.loads(notes.read_text()) | {"format": 99}), '{"data'):
        notes.write_text(text)
        with closing(checkpoints(saved, "old", ROWS)) as made, refused("checkpoints/1"):
            made.check_beginning({"checkpoint.accept": ""})


def test_the_newest_checkpoint_is_named(saved, tmp_path):
    with closing(checkpoints(saved, "old", ROWS)) as made, closing(checkpoints(tmp_path / "new", "old", ROWS)) as none:
        assert str(saved / "checkpoints" / "1") in made.latest()
        assert none.latest() == "the run has no checkpoint"


def test_one_choice_accepts_the_rows_of_both_and_no_other_model(saved, refused, wording):
    rows = Rows({"data.source": [6], "eval.source": [2]}, "prompts")
    now = HASHES | {"data.source": "new", "eval.source": "f"}
    with closing(Checkpoints(saved / "checkpoints", now, KEEP, MESH, rows)) as made:
        _, accepted = made.check_beginning(accepting(now))
    assert [change.field for change in accepted] == ["data.source", "eval.source"]
    assert "(3 rows then, 2 now" in str(accepted[1])
    wording(str(accepted[1]))
    for _ in range(2):  # a run that ends before its next checkpoint resumes as this one
        changes.write(saved, accepted)
    assert changes.read(saved) == accepted
    other = now | {"model.path": "n"}
    with closing(Checkpoints(saved / "checkpoints", other, KEEP, MESH, rows)) as made, refused("config.model.path"):
        made.check_beginning(accepting(now))


def test_code_that_has_changed_is_accepted_by_choice_and_is_in_the_card(saved, refused):
    rows, key = ROWS, changes.CODE + "my.digits"
    begun, now = HASHES | {key: "1"}, HASHES | {key: "2"}

    def opened(hashes: dict[str, str]) -> Checkpoints:
        return Checkpoints(saved / "checkpoints", hashes, KEEP, MESH, rows)

    with closing(opened(begun)) as made:
        assert made.check_beginning(accepting(begun)) == (1, [])  # the run had no code of its own at step 1
        made.save(2, parts({"next": 1}, []))
    with closing(opened(now)) as made, refused("my.digits", changes.acceptance_token(now)):
        made.check_beginning(accepting(begun))
    with closing(opened(now)) as made:
        step, (change,) = made.check_beginning(accepting(now))
    assert (step, change.field, change.before, change.now) == (2, key, "1", "2")


def test_a_run_that_has_saved_accepted_rows_does_not_need_the_choice_again(saved):
    rows, now = Rows({"data.source": [6], "eval.source": [3]}, "prompts"), HASHES | {"data.source": "new"}
    for config in (accepting(now), {"checkpoint.accept": ""}):
        with closing(checkpoints(saved, "new", rows)) as made:
            step, accepted = made.check_beginning(config)
            made.save(step + 1, parts({"next": 1}, []))
    assert (step, accepted) == (2, [])
