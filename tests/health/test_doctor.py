"""`jaxrl doctor`: what it says of configs, and of logs, ours and other trainers'."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from tensorboardX import SummaryWriter
from test_health import FAULTS, run

from jaxrl_llm import recipe as recipes
from jaxrl_llm import train
from jaxrl_llm.config.load import load
from jaxrl_llm.errors import UserError
from jaxrl_llm.health import judge, logs, rules
from jaxrl_llm.health.doctor import diagnose_log, print_findings
from jaxrl_llm.session.banner import totals_table
from jaxrl_llm.tools import doctor

ROOT = Path(__file__).parents[2]
GRPO = ROOT / "configs" / "grpo.py"
HEALTH_PAGE = (ROOT / "docs" / "health.md").read_text()
# Logs of the real TRL 1.16: `python -m benchmarks.health.trl_logs OUT` in the environment `trl` of
# benchmarks/speed/environments.txt writes OUT/NAME.json.
REAL = ROOT / "tests" / "references" / "trl"
SICK = run(
    **FAULTS["entropy_explosion"],
    **{
        "reward__mean": lambda t: 0.8 - 0.8 * (t > 0.6),
        "reward__std": 0.4,
        "eval__accuracy": lambda t: 0.8 * (t < 0.6),
    },
)
VERL = {
    "reward/mean": "critic/score/mean", "entropy": "actor/entropy", "grad_norm": "actor/grad_norm",
    "clip/fraction": "actor/pg_clipfrac", "completion/length": "response_length/mean",
    "completion/truncated": "response_length/clip_ratio", "critic/explained_variance": "critic/vf_explained_var",
}  # fmt: skip


def verl(records: list[dict]) -> list[dict]:
    """veRL has no deviation, so two rewards with the one of the records."""
    rows = []
    for r in records:
        row = {"step": r["step"]} | {theirs: r[mine] for mine, theirs in VERL.items() if mine in r}
        two = {f"critic/score/{name}": r["reward/mean"] + x * r["reward/std"] for name, x in (("min", -1), ("max", 1))}
        rows.append(row | two | {"training/global_step": r["step"]})
    return rows


def write_workdir(folder: Path, records: list[dict]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.json").write_text(json.dumps({"health": {"max_skipped": 10}}))
    return folder


def doctored(monkeypatch, capsys, *arguments: object) -> tuple[int, str]:
    """Runs the program, and returns its exit code and what it prints."""
    monkeypatch.setattr(sys, "argv", ["doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    return int(ended.value.code), capsys.readouterr().out


def told(path: Path, monkeypatch, capsys) -> tuple[int, dict[str, dict]]:
    """Runs the program on a log, and returns its exit code and its findings."""
    code, printed = doctored(monkeypatch, capsys, "--run", path, "--json")
    return code, {found["id"]: found for found in json.loads(printed)["findings"]}


def rows_of(name: str) -> list[dict]:
    return json.loads((REAL / f"{name}.json").read_text())["log_history"]


def state(name: str, folder: Path) -> Path:
    return REAL / f"{name}.json"


def output_folder(name: str, folder: Path) -> Path:
    """TRL's output folder, with a config.json of the model and two checkpoints, of which the newer has all rows."""
    rows = rows_of(name)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for number, part in ((9, rows[:9]), (10, rows)):
        (folder / f"checkpoint-{number}").mkdir()
        (folder / f"checkpoint-{number}" / "trainer_state.json").write_text(json.dumps({"log_history": part}))
    return folder


def json_lines(name: str, folder: Path) -> Path:
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))
    return folder / "log.jsonl"


def wandb_table(name: str, folder: Path) -> Path:
    """As W&B's history: its own step, empty cells, and `train/` before the names of the Trainer."""
    rows = [{f"train/{'global_' * (n == 'step')}{n}": x for n, x in row.items()} for row in rows_of(name)]
    with (folder / "history.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(["_step", *(n for row in rows for n in row)])))
        writer.writeheader()
        writer.writerows({"_step": number} | row for number, row in enumerate(rows))
    return folder / "history.csv"


def tensorboard(name: str, folder: Path) -> Path:
    """As the Trainer writes it: one event for each number, in a folder below that of the output."""
    with SummaryWriter(str(folder / "runs" / "now")) as writer:
        for row in rows_of(name):
            for n, x in row.items():
                writer.add_scalar(f"train/{n}", x, row["step"])
    return folder


def verl_lines(name: str, folder: Path) -> Path:
    lines = [json.dumps({"step": row["step"], "data": row}) + "\n" for row in verl(logs.read(state(name, folder)))]
    (folder / "verl.jsonl").write_text("".join(lines) + '{"step": 99, "da')  # a line that is being written
    return folder / "verl.jsonl"


def easyr1(row: dict) -> dict:
    """A row of veRL as EasyR1 has it: sections in sections, and other names for two numbers."""
    names, nested = {"actor/entropy": "actor/entropy_loss", "actor/pg_clipfrac": "actor/pg_clipfrac_higher"}, {}
    for key, x in row.items():
        *sections, last = names.get(key, key).split("/")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = x
    return nested


def easyr1_folder(name: str, folder: Path) -> Path:
    lines = [json.dumps(easyr1(row)) + "\n" for row in verl(logs.read(state(name, folder)))]
    (folder / "experiment_log.jsonl").write_text("".join(lines))
    return folder


ILLNESSES = {  # of each log: findings under all names, and those from numbers that veRL does not have
    "healthy": ((), ()),
    "healthy_logged_by_4": ((), ()),
    "healthy_4_epochs": ((), ()),
    "high_rate": (("no_signal",), ()),  # after one step nothing is left to fall
    "high_rate_logged_by_2": (("no_signal",), ()),
    "many_epochs": (("truncated", "reward_collapse"), ()),
    "constant_reward": (("no_signal",), ()),
    "never_stops": (("never_stops",), ("no_signal",)),
    "long_is_better": (("never_stops",), ("channels_diverge",)),
    "short_is_better": (("length_collapse",), ("channels_diverge",)),
    "entropy_bonus": (("entropy_explosion", "truncated", "reward_collapse"), ("no_signal",)),
}
OF_TRL, OF_VERL = (state, output_folder, json_lines, wandb_table, tensorboard), (verl_lines, easyr1_folder)


# Every log in one format of each trainer; in the others one with updates, one with gaps, and one with most findings.
FEW = ("healthy_4_epochs", "high_rate_logged_by_2", "entropy_bonus")
FORMATS = [(write, name) for write in OF_TRL + OF_VERL for name in (ILLNESSES if write in (state, verl_lines) else FEW)]


@pytest.mark.parametrize(("write", "name"), FORMATS)
def test_a_real_log_of_trl_gives_its_illness_in_every_format(write, name, tmp_path, monkeypatch, capsys):
    assert {file.stem for file in REAL.glob("*.json")} == set(ILLNESSES)
    code, found = told(write(name, tmp_path), monkeypatch, capsys)
    always, of_trl = ILLNESSES[name]
    assert found.keys() == {*always, *(of_trl if write in OF_TRL else ())}
    assert code == any(one["severity"] == "error" for one in found.values())
    last = json.loads(state(name, tmp_path).read_text())["log_history"][-1]["step"]
    assert all(one["last_step"] <= last for one in found.values())


# Logs of TRL on SmolLM2-135M-Instruct, OUT/trl_real.json.gz: `python -m benchmarks.health.trl_real_logs MODEL OUT`.
SMOLLM2 = json.loads(gzip.decompress((ROOT / "tests" / "references" / "trl_real.json.gz").read_bytes()))
ILLNESSES_OF_SMOLLM2 = {
    "healthy": (),
    "cut": ("never_stops",),
    "constant_reward": ("no_signal",),
    "high_rate": ("never_stops", "reward_collapse", "entropy_collapse"),
    "long_is_better": ("never_stops",),
}


@pytest.mark.parametrize("name", SMOLLM2)
def test_a_log_of_a_published_model_gives_its_illness(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SMOLLM2[name]))
    code, found = told(tmp_path / "log.jsonl", monkeypatch, capsys)
    assert found.keys() == {*ILLNESSES_OF_SMOLLM2[name]}
    assert code == (name != "healthy")


def test_updates_on_a_rollout_are_one_record():
    """TRL logs each update, but the reward only with the first."""
    rows = rows_of("healthy_4_epochs")[:80]
    assert sum("reward" in row for row in rows) == 20
    records = logs.read(state("healthy_4_epochs", REAL))
    assert [record["at"] for record in records] == list(range(4, 81, 4))
    assert records[2]["grad_norm"] == pytest.approx(sum(row["grad_norm"] for row in rows[8:12]) / 4)
    assert records[2]["reward/mean"] == rows[8]["reward"]


def test_a_run_is_told_in_lines_the_worst_first(tmp_path, monkeypatch, capsys, wording):
    sick = [record | {"critic/explained_variance": -1.0} for record in SICK]
    code, printed = doctored(monkeypatch, capsys, "--run", write_workdir(tmp_path, sick))
    _, *lines, _, _ = printed.splitlines()  # at the end, which rules could look
    severities = [line.split(": ")[1] for line in lines]
    assert code == 1 and severities == sorted(severities) and set(severities) == {"error", "warning"}
    wording(printed)


def test_a_finding_has_the_command_that_opens_its_first_step(tmp_path, monkeypatch, capsys):
    workdir = write_workdir(tmp_path, SICK)
    config = json.loads((workdir / "config.json").read_text())
    (workdir / "config.json").write_text(json.dumps(config | {"group_size": 8}))
    _, printed = doctored(monkeypatch, capsys, "--run", workdir)
    lines = printed.splitlines()
    commands = {i: line for i, line in enumerate(lines) if "jaxrl replay" in line}
    assert commands
    for i, line in commands.items():
        (first,) = re.findall(r"steps? (\d+)", lines[i - 1])[:1]
        assert f"jaxrl replay --run {workdir} --step {first} " in line
    found = json.loads(doctored(monkeypatch, capsys, "--run", workdir, "--json")[1])["findings"]
    assert len(found) == len(commands)
    assert all(f"--step {finding['first_step']} " in finding["replay"] for finding in found)


def test_what_a_log_does_not_have_to_judge_is_said(capsys, wording):
    no_critic = [{name: x for name, x in record.items() if not name.startswith("critic/")} for record in run()]
    of_sft = [{"step": step, "loss/sft": 1.0, "grad_norm": 1.0} for step in range(1, 30)]
    for records, named in (
        (run()[:6], "entropy_collapse"), (of_sft, "(no reward/mean)"), (no_critic, "(no critic/explained_variance)")
    ):  # fmt: skip
        print_findings([], records)
        wording(printed := capsys.readouterr().out)
        assert named in printed.splitlines()[3]


def test_the_documentation_shows_what_is_printed(monkeypatch, capsys):
    command, printed = re.findall(r"`jaxrl doctor (--run \S+)` prints:\n\n```text\n(.*?)```", HEALTH_PAGE, re.DOTALL)[0]
    monkeypatch.chdir(ROOT)
    assert doctored(monkeypatch, capsys, *command.split()) == (0, printed)


def test_a_run_without_a_record_is_refused(tmp_path, refused):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text(json.dumps({"health": {"max_skipped": 10}}))
    with refused(str(tmp_path)):
        diagnose_log([tmp_path], as_json=False)


def test_json_tells_of_every_rule_whether_it_could_look(tmp_path, monkeypatch, capsys):
    _, printed = doctored(monkeypatch, capsys, "--run", write_workdir(tmp_path, run()[:1]), "--json")
    printed = json.loads(printed)
    looked = {"sampler_mismatch", "stale_samples", "no_verdict", "tool_down"}
    assert printed["rules"] == len(rules.RULES)
    assert printed["could_not_look"].keys() == {rule.__name__ for rule in rules.RULES} - looked
    assert "32" in printed["could_not_look"]["critic_lags"]


WRONG = [  # arguments, and what the line names
    ([], "--config"), (["--run", "nowhere"], "nowhere"),
    (["--run", ROOT / "tests" / "references"], "trainer_state.json"), (["--run", "x", "--config", "y"], "--run"),
    (["--config", ROOT / "configs" / "grpo.py", "--config.group_size=1"], "group_size"),
]  # fmt: skip
NO_LOGS = [  # a file, its content, and what the line names besides the file
    ("state.json", "{}", "log_history"), ("state.json", '{"log_history": 3}', "log_history"),
    ("state.json", '{"log_history": [3]}', ""), ("state.json", "", ""), ("log.jsonl", "3\n", ""),
    ("log.jsonl", '{"step": NaN, "reward": 1}\n', "NaN"),
    ("log.jsonl", '{"step": Infinity, "reward": 1}\n', "infinity"),
    ("table.csv", "Step\0", ""), ("config.json/config.json", '{"model_type": "qwen2"}', "trainer_state.json"),
    ("x.tfevents.1/x.tfevents.1", "\x02" + "\0" * 11 + "\x0f\x0f" + "\0" * 9, ""),
]  # fmt: skip


def test_what_it_cannot_look_at_is_an_error_in_a_line(tmp_path, monkeypatch, capsys, refused):
    for arguments, named in WRONG:
        with refused(named):
            doctored(monkeypatch, capsys, *arguments)
    for number, (name, content, named) in enumerate(NO_LOGS):
        folder = tmp_path / str(number)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
        with refused(name.split("/")[0], named) as error:
            doctored(monkeypatch, capsys, "--run", folder / name.split("/")[0])
        assert "\n" not in str(error.value)
    for i in range(7):
        (tmp_path / "runs" / f"run{i}").mkdir(parents=True)
        write_workdir(tmp_path / "runs" / f"run{i}", run()[:1])
    (tmp_path / "runs" / "run0" / "x.tfevents.1").touch()
    with refused("/run0", "/run4", " 2 more"):  # a folder of runs
        doctored(monkeypatch, capsys, "--run", tmp_path / "runs")


def test_the_only_jsonl_of_a_folder_is_its_log_and_several_are_named(tmp_path, monkeypatch, capsys, refused):
    json_lines("never_stops", tmp_path)
    assert told(tmp_path, monkeypatch, capsys)[0] == 1
    (tmp_path / "other.jsonl").write_text("")
    with refused("/log.jsonl", "/other.jsonl"):
        logs.read(tmp_path)


def test_a_log_of_another_trainer_under_our_files_name_is_read_as_such(tmp_path, monkeypatch, capsys):
    write_workdir(tmp_path, rows_of("never_stops"))
    (tmp_path / "config.json").write_text("[]")
    assert told(tmp_path, monkeypatch, capsys)[0] == 1


def test_a_sampler_that_differs_is_found_in_verls_log():
    row = {
        "critic/score/mean": 0.5, "rollout_corr/k3_kl": 0.02, "rollout_corr/rollout_is_mean": 1.0,
        "rollout_corr/rollout_is_eff_sample_size": 0.9,
    }  # fmt: skip
    (span,) = judge.judge_records([logs.renamed(row) | {"step": 1}], logs.OTHER_TRAINER_BOUNDS)
    assert span.finding.id == "sampler_mismatch" and span.finding.severity == "error"
    asynchronous = logs.renamed(row | {"fully_async/count/current_param_version": 1}) | {"step": 1}
    assert judge.judge_records([asynchronous], logs.OTHER_TRAINER_BOUNDS) == []


def test_a_config_is_told_with_its_totals(monkeypatch, capsys):
    _, printed = doctored(monkeypatch, capsys, "--config", GRPO, "--config.prompts_per_update=4", "--json")
    printed = json.loads(printed)
    assert printed["totals"]["sequences_per_update"] == 32 and printed["totals"]["updates"] == 1600
    assert [found["id"] for found in printed["findings"]] == ["many_updates", "small_updates", "published"]


def test_a_config_is_told_in_the_words_of_the_banner(capsys):
    doctor.print_config(sizes := recipes.read(load(GRPO)).sizes, [], {})
    printed = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()[:-2]]
    assert printed == [[name, f"{value:,}"] for name, value in totals_table(sizes)]


# Those of Gemma are of sft, or begin with the folder that another run leaves.
RECIPES = sorted(path for path in (ROOT / "configs" / "recipes").glob("*.py") if not path.stem.startswith("gemma3_1b"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_looked_at_without_its_model_and_without_a_network(recipe, monkeypatch, capsys):
    monkeypatch.setattr("socket.socket.connect", None)
    monkeypatch.setattr("jaxrl_llm.rollout.engines.check_python", lambda python, name: None)  # that of a vLLM server
    code, printed = doctored(monkeypatch, capsys, "--config", recipe, "--config.optim.learning_rate=1")
    assert code == doctor.MISSING_EXIT_CODE and re.search(r"learning_rate \(.*Qwen/Qwen", printed)
    assert "config.model.path = 'Qwen/Qwen" in printed.splitlines()[-1]


def test_the_width_of_a_model_in_the_hubs_cache_is_known_without_a_network(tmp_path, monkeypatch, capsys):
    commit = tmp_path / "models--org--model" / "snapshots" / "abc"
    commit.mkdir(parents=True)
    shutil.copy(ROOT / "jaxrl_llm" / "assets" / "arithmetic" / "config.json", commit)
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    rate = ["--config.model.path=org/model", "--config.optim.learning_rate=1"]
    assert "width 128" in doctored(monkeypatch, capsys, "--config", GRPO, *rate)[1]


def unimportable(folder: Path) -> None:
    (folder / "mine.py").write_text("import math_verify\n\ndef judge(completions, **columns):\n    return []\n")


LACKING = {  # -> fields that name what is not here, what the line names, the package that is missing
    "pyarrow": (["data.source=rows.parquet"], ["data.source", "data.source"], "pyarrow"),
    "file": (["data.source=rows.jsonl"], ["data.source"], ""),
    "hub package": (["data.source=me/rows"], ["data.source"], "datasets"),
    "model folder": (["model.path=./no_model"], ["model.path"], ""),
    "model of the hub": (["model.path=me/no-model"], ["model.path"], ""),
    "package of a reward": (["reward.functions=mine.judge", "reward.weights=1.0"], ["reward.functions"], "math_verify"),
    "tracker": (["log.to=wandb", "log.project=x"], ["log.to"], "wandb"),
}


@pytest.mark.parametrize(("fields", "names", "package"), LACKING.values(), ids=LACKING)
def test_a_config_is_judged_where_the_machine_lacks_what_it_names(
    fields, names, package, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    unimportable(tmp_path)
    if package:
        monkeypatch.setitem(sys.modules, package, None)  # as Python does for a module that is not installed
    monkeypatch.setattr("socket.socket.connect", None)
    given = ["--config", GRPO, *(f"--config.{field}" for field in [*fields, "epochs=9"])]
    code, printed = doctored(monkeypatch, capsys, *given, "--json")
    report = json.loads(printed)
    assert code == doctor.MISSING_EXIT_CODE and len(report["missing"]) == len(names)
    assert all(name in line for name, line in zip(names, report["missing"], strict=True))
    assert "many_updates" in {finding["id"] for finding in report["findings"]}
    assert doctored(monkeypatch, capsys, *given, "--fail-on", "warning")[0] == 1
    if fields[0] != "model.path=me/no-model":  # `train` asks the hub for it
        monkeypatch.setattr(sys, "argv", ["train", "--workdir", "run", *map(str, given)])
        with pytest.raises(UserError, match=names[0]):
            train.main()
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def cases() -> list[tuple[str, str, str]]:
    """The settings of published failures in docs/health.md, with what is to be said of them."""
    text = HEALTH_PAGE.split("## The five cases")[1].split("\n## ")[0]
    rows = re.findall(r"\| `(configs/[^`]+)` \|(?: \d+ \|)? (?:`(\w+)`: )?(.+) \|", text)
    assert len(rows) == 8
    return rows


@pytest.mark.parametrize(("settings", "name", "evidence"), cases())
def test_the_settings_of_the_five_cases_are_told(settings, name, evidence, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code, printed = doctored(monkeypatch, capsys, "--config", *settings.split(), "--json")
    found = {one["id"]: one["evidence"] for one in json.loads(printed)["findings"]}
    rest = found.keys() - {"published"}
    assert code == 0 and (rest == ({name} if name else set()) if name != "published" else not rest)
    assert not name or found[name] == evidence


def test_a_warm_up_is_told_in_steps(monkeypatch, capsys):
    """Ratios of Search-R1 #28: they look different, and are nearly the same."""
    steps = re.findall(r"` \| (\d+) \| ", HEALTH_PAGE)
    monkeypatch.chdir(ROOT)
    for (settings, *_), expected in zip(cases()[-2:], steps, strict=True):
        printed = doctored(monkeypatch, capsys, "--config", *settings.split())[1]
        assert re.search(rf"warm-up steps +{expected}\n", printed)


def test_a_measured_result_is_that_of_its_file(monkeypatch, capsys):
    for changes, ids in ((["--config.microbatch=8", "--config.log.to=()"], []), (["--config.seed=1"], ["published"])):
        _, printed = doctored(monkeypatch, capsys, "--config", GRPO, *changes, "--json")
        assert [found["id"] for found in json.loads(printed)["findings"]] == ids
