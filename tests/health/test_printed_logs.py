"""Logs of other trainers as they print and keep them: each becomes the same records as TRL's trainer_state.json."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import yaml
from test_doctor import easyr1, rows_of, state, told, verl

from jaxrl_llm.health import logs
from jaxrl_llm.health.doctor import exit_code
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.health.logs import wandb_file
from jaxrl_llm.health.settings import translated

NAME = "entropy_bonus"  # its log has findings from rewards, entropy and lengths


def records() -> list[dict]:
    return logs.read(state(NAME, Path()))


def printed_by_trl(folder: Path) -> Path:
    """As transformers 5 prints them: numbers as texts, beside the bar, and without the number of the step."""
    lines = []
    for row in rows_of(NAME):
        texts = {name: f"{x:.6g}" for name, x in row.items() if name != "step"}
        lines.append(f"  5%|▌ | 2/40 [00:03<01:00]{texts}\n")
    (folder / "train.log").write_text("Loading\n" + "".join(lines))
    return folder / "train.log"


def printed_by_older_trl(folder: Path) -> Path:
    lines = [f"{ {name: x for name, x in row.items() if name != 'step'} }\n" for row in rows_of(NAME)]
    (folder / "nohup.out").write_text("".join(lines).replace("'reward': ", "'reward': np.float64(").replace(
        ", 'reward_std'", "), 'reward_std'"
    ))  # fmt: skip
    return folder / "nohup.out"


def printed_by_verl(folder: Path) -> Path:
    """With Ray's mark and colours."""
    lines = []
    for row in verl(records()):
        values = " - ".join(f"{name}:{x!r}" for name, x in row.items() if name != "step")
        lines.append(f"\x1b[36m(TaskRunner pid=12, ip=10.0.0.1)\x1b[0m step:{row['step']} - {values}\n")
    (folder / "slurm.log").write_text("(TaskRunner pid=12) step:0 - val-core/x/acc/mean@1:0.5\n" + "".join(lines))
    return folder / "slurm.log"


def printed_by_easyr1(folder: Path) -> Path:
    """As YAML."""
    lines = []
    for row in map(easyr1, verl(records())):
        lines += [f"Step {row.pop('step')}", *yaml.safe_dump(row).splitlines(), ""]
    (folder / "run.log").write_text("\n".join(f"\x1b[36m(Runner pid=7)\x1b[0m {line}" for line in lines) + "\n")
    return folder / "run.log"


# What each trainer's log has of the findings of NAME: prime-rl prints neither lengths nor groups, and SkyRL no groups.
WRITERS = {
    printed_by_trl: {"no_signal", "truncated", "entropy_explosion", "reward_collapse"},
    printed_by_older_trl: {"no_signal", "truncated", "entropy_explosion", "reward_collapse"},
    printed_by_verl: {"entropy_explosion", "truncated", "reward_collapse"},
    printed_by_easyr1: {"entropy_explosion", "truncated", "reward_collapse"},
}


@pytest.mark.parametrize("write", WRITERS)
def test_what_a_trainer_prints_gives_its_illness(write, tmp_path, monkeypatch, capsys):
    code, found = told(write(tmp_path), monkeypatch, capsys)
    assert (code, found.keys()) == (1, WRITERS[write])
    assert len(logs.read(write(tmp_path))) == len(records())


def test_a_dict_that_a_reward_function_prints_is_no_record_of_trl(tmp_path, capsys):
    log = printed_by_trl(tmp_path)
    own = "{'reward': 1.0, 'step': 3, 'len': 7}"
    log.write_text("".join(f"{own}\n{line}\n" for line in log.read_text().splitlines()))
    assert len(logs.read(log)) == len(records())
    (line,) = capsys.readouterr().err.splitlines()
    assert f" {len(rows_of(NAME)) + 1} " in line


PRIME = {"reward/mean": "reward/all/mean", "completion/length": "decode_len/all/mean"}
PRIME |= {"completion/truncated": "is_truncated/all/mean", "entropy": "entropy/mean", "grad_norm": "optim/grad_norm"}
SKYRL = {
    "reward/mean": "reward/avg_raw_reward", "completion/length": "generate/avg_num_tokens",
    "kl/ref": "policy/policy_kl", "entropy": "policy/policy_entropy", "grad_norm": "policy/raw_grad_norm",
    "clip/fraction": "policy/ppo_clip_ratio",
}  # fmt: skip


def test_the_names_of_prime_rl_and_skyrl_become_ours():
    prime = logs.renamed({theirs: float(i) for i, theirs in enumerate(PRIME.values())})
    assert prime == {ours: float(i) for i, ours in enumerate(PRIME)}
    skyrl = logs.renamed({theirs: float(i) for i, theirs in enumerate(SKYRL.values())})
    assert skyrl == {ours: float(i) for i, ours in enumerate(SKYRL)}
    row = {"reward/all/mean": 0.2, "reward/all/min": 0.0, "reward/all/max": 1.0, "solve_none/all": 0.25}
    derived = logs.renamed(row | {"solve_all/all": 0.5})
    # The deviation is that of two rewards.
    assert (derived["groups/no_signal"], derived["reward/std"]) == pytest.approx((0.75, 0.4))


def test_summaries_of_rewards_are_no_reward_functions():
    row = {"reward/math/mean": 1.0, "reward/avg_pass_at_4": 1.0, "reward/mean_positive_reward": 1.0}
    assert logs.renamed(row | {"reward/overall": 0.5, "reward/format": 1.0}) == {
        "reward/mean": 0.5,
        "reward/format": 1.0,
    }


def test_the_two_logs_of_prime_rl_are_one(tmp_path):
    (tmp_path / "logs" / "trainer").mkdir(parents=True)
    begin, rest = "12:01:02 SUCCESS ", "Throughput: 1.0 tokens/s | Seq. Length: 9.0 tokens/sample"
    lines = [f"{begin}Step {i} | Time: 2.10s | Reward: 0.{i}000 | {rest}\n" for i in range(4)]
    (tmp_path / "logs" / "orchestrator.log").write_text("".join(lines))
    (tmp_path / "logs" / "trainer" / "rank_0.log").write_text(
        f"{begin}Step 1 | Time: 2s | Loss: 0.1 | Entropy: 0.4 | Mismatch KL: 0.001 | Grad. Norm: 0.5 | LR: 1.0e-06\n"
    )
    records = logs.read(tmp_path)
    assert [record["reward/mean"] for record in records] == [0.0, 0.1, 0.2, 0.3]
    entropy = {"entropy": 0.4, "grad_norm": 0.5, "importance/kl": 0.001, "learning_rate": 1e-6}
    assert entropy.items() <= records[1].items() and "entropy" not in records[0]


def test_files_of_one_metric_each_are_joined_by_their_steps(tmp_path):
    for name in ("reward", "grad_norm"):
        head = ",".join(f"my-run - train/{name}{end}" for end in ("", "__MIN", "__MAX"))
        rows = "".join(f"{row['step']},{row[name]},-9,9\n" for row in rows_of(NAME) if name in row)
        (tmp_path / f"{name}.csv").write_text(f"Step,{head}\n{rows}")
    joined = logs.read(tmp_path / "reward.csv", tmp_path / "grad_norm.csv")
    whole = [{name: record[name] for name in joined[0]} for record in records()]
    assert joined == whole and {"reward/mean", "grad_norm", "at"} <= joined[0].keys()


def varint(number: int) -> bytes:
    low = bytes([number & 127 | (128 if number > 127 else 0)])
    return low + (varint(number >> 7) if number > 127 else b"")


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def wandb_bytes(rows: list[dict]) -> bytes:
    """As W&B writes a run: records of protobuf in the parts of a log of LevelDB."""
    data = b":W&B\xe1\xbe\x00"
    for number, row in enumerate(rows):
        items = [field(1, field(2, name.encode()) + field(16, json.dumps(x).encode())) for name, x in row.items()]
        rest, first = field(2, b"".join(items) + field(2, b"\x08" + varint(number))), True
        while rest or first:
            left = wandb_file.BLOCK - len(data) % wandb_file.BLOCK
            if left < 7:
                data += bytes(left)
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if first else 4) if not rest else (2 if first else 3)
            data, first = data + struct.pack("<IHB", 0, len(part), kind) + part, False
    return data


def test_a_file_of_wandb_is_read_over_its_blocks_and_while_it_is_written(tmp_path):
    rows = [{f"train/{'global_' * (name == 'step')}{name}": x for name, x in row.items()} for row in rows_of(NAME)]
    data = wandb_bytes([row | {"text": "x" * 4000} for row in rows])
    assert len(data) > 3 * wandb_file.BLOCK
    folder = tmp_path / "wandb" / "offline-run-1"
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "wandb-summary.json").write_text("{}")
    (folder / "run-1.wandb").write_bytes(data)
    for path in (folder, folder / "run-1.wandb", folder / "files" / "wandb-summary.json", tmp_path):
        assert all(row.items() <= read.items() for row, read in zip(records(), logs.read(path), strict=True))
    (folder / "run-1.wandb").write_bytes(data[:-3])
    assert len(logs.read(folder)) == len(records()) - ("reward" in rows_of(NAME)[-1])


def test_a_block_of_wandb_whose_last_bytes_have_no_place_for_a_part_is_read():
    sizes = range(wandb_file.BLOCK - 60, wandb_file.BLOCK)
    size = next(n for n in sizes if len(wandb_bytes([{"text": "x" * n}])) == wandb_file.BLOCK - 3)
    rows = wandb_file.rows(wandb_bytes([{"text": "x" * size}, {"reward": 0.5}]))
    assert [row.get("reward") for row in rows] == [None, 0.5]


def test_a_broken_file_and_a_text_without_a_step_are_refused_in_a_line(tmp_path, refused):
    for name, content in (
        ("run.wandb", b"x"), ("run.wandb", b":W&B\xe1\xbe\x00" + struct.pack("<IHB", 0, 2, 1) + b"\x12\xff"),
        ("train.log", b"Loading\nStep by step: {'a'\n{'b': nan\n"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with refused(name):
            logs.read(tmp_path / name)


def test_a_log_that_begins_within_a_rollout_loses_only_its_rest(tmp_path):
    rows = [{"step": i, "grad_norm": float(i)} | ({"reward": 0.5} if i % 4 == 3 else {}) for i in range(1, 11)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = logs.read(tmp_path / "log.jsonl")
    assert [(record["step"], record["at"], record["grad_norm"]) for record in records] == [(1, 6, 4.5), (2, 10, 8.5)]


def test_gradients_that_are_not_finite_are_found(tmp_path, monkeypatch, capsys):
    rows = [{"step": i, "reward": 0.5, "grad_norm": float("nan" if i > 5 else 1)} for i in range(1, 9)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, found = told(tmp_path / "log.jsonl", monkeypatch, capsys)
    assert (code, found.keys(), found["updates_skipped"]["first_step"]) == (1, {"updates_skipped"}, 8)
    assert "3" in found["updates_skipped"]["evidence"]


def test_the_exit_code_follows_the_severity_that_is_asked_for():
    warning, error = Finding("warning", "x"), Finding("error", "x")
    codes = {name: [exit_code([x], name) for x in (warning, error)] for name in ("warning", "error", "never")}
    assert codes == {"warning": [1, 1], "error": [0, 1], "never": [0, 0]}
    assert exit_code([Finding("note", "x")], "warning") == 0


def test_settings_are_told_in_the_words_of_trl_and_verl():
    fix = "lower optim.learning_rate or kl.coef, not critic.optim.warmup_steps"
    kl = "kl.coef is beta in TRL, actor.kl_loss_coef in veRL"
    rate = "optim.learning_rate is learning_rate in TRL, actor.optim.lr in veRL"
    assert translated([Finding("error", "x", fix=fix)]) == [kl, rate]
    assert translated([Finding("error", "x", fix="raise critic.optim.learning_rate")]) == []
