"""`python -m jaxrl_llm.doctor`: what it says of configs, and of logs, ours and other trainers'."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from test_health import FAULTS, run

from jaxrl_llm import doctor
from jaxrl_llm.errors import UserError
from jaxrl_llm.health import logs
from jaxrl_llm.tensorboard import TensorBoardWriter

ROOT = Path(__file__).parent.parent
SICK = run(**FAULTS["entropy_explosion"] | {"reward__mean": lambda t: 0.8 - 0.8 * (t > 0.6), "reward__std": 0.4})
TRL = {
    "reward/mean": "reward", "reward/std": "reward_std", "groups/no_signal": "frac_reward_zero_std", "kl/ref": "kl",
    "completion/length": "completions/mean_length", "completion/truncated": "completions/clipped_ratio",
    "clip/fraction": "clip_ratio/region_mean", "entropy": "entropy", "grad_norm": "grad_norm",
    "reward/task": "rewards/task/mean", "reward/format": "rewards/format/mean",
}  # fmt: skip
VERL = {
    "reward/mean": "critic/score/mean", "entropy": "actor/entropy", "grad_norm": "actor/grad_norm",
    "clip/fraction": "actor/pg_clipfrac", "completion/length": "response_length/mean",
    "completion/truncated": "response_length/clip_ratio", "critic/explained_variance": "critic/vf_explained_var",
}  # fmt: skip


def renamed(records: list[dict], names: dict[str, str], every: int = 1) -> list[dict]:
    return [{"step": r["step"] * every} | {theirs: r[mine] for mine, theirs in names.items()} for r in records]


def verl(records: list[dict]) -> list[dict]:
    rewards = {"critic/score/max": 1.0, "critic/score/min": 0.0}
    return [row | rewards for row in renamed(records, VERL)]


def write_jsonl(folder: Path, records: list[dict]) -> Path:
    lines = [json.dumps({"step": row["step"], "data": row}) + "\n" for row in verl(records)]
    (folder / "run.jsonl").write_text("".join(lines) + '{"step": 99, "da')  # a line that is being written
    return folder / "run.jsonl"


def write_trainer_state(folder: Path, records: list[dict]) -> Path:
    rows = [*renamed(records, TRL, every=10), {"step": 400, "train_runtime": 3.0, "train_loss": 0.1}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder / "trainer_state.json"


def write_csv(folder: Path, records: list[dict]) -> Path:
    with (folder / "wandb.csv").open("w", newline="") as file:
        writer, names = csv.writer(file), list(TRL.values())
        heads = [f"my-run - train/{name}{end}" for name in names for end in ("", "__MIN", "__MAX")]
        writer.writerow(["Step", *heads])
        for row in renamed(records, TRL):
            writer.writerow([row["step"], *(row[name] for name in names for _ in range(3))])
    return folder / "wandb.csv"


def write_tensorboard(folder: Path, records: list[dict]) -> Path:
    writer = TensorBoardWriter(folder, 0)
    for row in renamed(records, TRL):
        writer.write(row["step"], {f"train/{name}": x for name, x in row.items() if name != "step"})
    writer.close()
    return folder


def write_workdir(folder: Path, records: list[dict]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.json").write_text(json.dumps({"health": {"max_skipped": 10}}))
    return folder


@pytest.mark.parametrize("write", [write_jsonl, write_trainer_state, write_csv, write_tensorboard, write_workdir])
def test_an_illness_is_found_in_any_log_and_a_healthy_run_is_called_healthy(write, tmp_path, monkeypatch, capsys):
    def told(records: list[dict], name: str) -> tuple[int, dict[str, dict]]:
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, records)
        monkeypatch.setattr(sys, "argv", ["doctor", "--run", str(path), "--json"])
        with pytest.raises(SystemExit) as ended:
            doctor.main()
        return int(ended.value.code), {found["id"]: found for found in json.loads(capsys.readouterr().out)}

    assert told(run(), "healthy") == (0, {})
    code, found = told(SICK, "sick")
    assert code == 1 and {"entropy_explosion", "reward_collapse"} <= found.keys()
    each = 10 if write is write_trainer_state else 1
    assert found["entropy_explosion"]["first_step"] == 27 * each
    assert found["reward_collapse"]["first_step"] > found["entropy_explosion"]["first_step"]


def test_a_run_is_told_in_lines_the_worst_first(tmp_path, monkeypatch, capsys):
    sick = [record | {"critic/explained_variance": -1.0} for record in SICK]
    monkeypatch.setattr(sys, "argv", ["doctor", "--run", str(write_workdir(tmp_path, sick))])
    with pytest.raises(SystemExit, match="1"):
        doctor.main()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "40 records, up to step 40"
    assert [line.split(": ")[1] for line in lines] == sorted(line.split(": ")[1] for line in lines)  # error, warning
    assert any(line.startswith("steps ") and " to 40: error: entropy " in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --config FILE"),
        (["--run", "nowhere"], "--run nowhere cannot be read"),
        (["--run", str(ROOT / "tests" / "references")], "has no number that a rule knows"),
        (["--run", "x", "--config", "y"], "or --run DIR alone"),
        (["--config", str(ROOT / "configs" / "grpo.py"), "--config.group_size=1"], "group_size"),
    ],
)
def test_what_it_cannot_look_at_is_an_error_in_a_line(arguments, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
    with pytest.raises(UserError, match=words):
        doctor.main()


def test_a_config_is_told_with_its_totals(monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        ["doctor", "--config", str(ROOT / "configs" / "grpo.py"), "--config.prompts_per_update=4", "--json"],
    )
    with pytest.raises(SystemExit, match="0"):
        doctor.main()
    told = json.loads(capsys.readouterr().out)
    assert told["totals"]["sequences_per_update"] == 32 and told["totals"]["updates"] == 1600
    assert [found["id"] for found in told["findings"]] == ["many_updates", "small_updates"]


def test_a_deviation_is_that_of_two_rewards_where_a_log_has_only_their_range():
    row = {"critic/score/mean": 0.2, "critic/score/min": 0.0, "critic/score/max": 1.0}
    assert logs.ours(row)["reward/std"] == pytest.approx(0.4)
