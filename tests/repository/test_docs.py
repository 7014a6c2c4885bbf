"""The pages of docs/: a site whose links hold, programs that run, and names that are there."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms import advantages, losses
from jaxrl_llm.config.load import load
from jaxrl_llm.recipe import missing

ROOT = Path(__file__).parents[2]


@pytest.mark.needs("mkdocs")
def test_the_site_is_built_without_a_broken_link(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert {page.stem for page in (tmp_path / "site").glob("*.html")} >= pages
    assert "fonts.googleapis" not in (tmp_path / "site" / "index.html").read_text()


SMALL = dict(  # fields that make a program of a page short
    prompts_per_step=8, prompts_per_update=8, group_size=2, num_steps=2, eval=dict(every=2, problems=8),
    log=dict(to=()), mesh=dict(fsdp=1), rollout=dict(max_completion_tokens=4), health=dict(self_test=False),
)  # fmt: skip


@pytest.mark.slow
def test_the_loop_of_the_docs_runs_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "your_own_loop.md").read_text(), re.DOTALL)
    small = SMALL | dict(schedule_steps=4, optim=dict(warmup_steps=0), reward=dict(timeout=0.0))
    place = "config.num_steps = 20\n"
    assert place in program
    program = program.replace('"runs/own_loop"', repr(str(tmp_path / "run")))
    for steps in (2, 3):
        exec(program.replace(place, f"config.update({small!r})\nconfig.num_steps = {steps}\n"), {})
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(0 <= record["mine/solved"] <= 1 for record in records[1:])
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r"[123] \d", line)]
    assert [float(mean) for _, _, mean in printed] == [record["reward/mean"] for record in records[1:]]
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


# Names that a block may have from elsewhere: those of a config file, and of a user's script of TRL.
GIVEN = {"c", "ConfigDict"}
OF_TRL = {"GRPOTrainer", "model", "reward", "rows"}


@pytest.mark.needs("ruff")
def test_no_block_of_python_in_the_docs_lacks_a_name(tmp_path):
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            (tmp_path / f"{page.stem}_{number}.py").write_text(block)
    lint = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F82", "--output-format", "json"]
    found = json.loads(subprocess.run([*lint, tmp_path], capture_output=True, text=True).stdout)
    unknown = {(Path(x["filename"]).stem, x["message"].partition("`")[2].partition("`")[0]) for x in found}
    given = {page: GIVEN | OF_TRL if page.startswith("health") else GIVEN for page, _ in unknown}
    assert {(page, name) for page, name in unknown if name not in given[page]} == set()
    assert len([*tmp_path.iterdir()]) > 15


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README", "docs/configs", "docs/start_reward", "docs/start_tools"])
def test_the_program_of_a_page_trains_as_it_is_written(page, tmp_path):
    blocks = re.findall(r"```python\n(?:# (\w+\.py)\n)?(.*?)```", (ROOT / f"{page}.md").read_text(), re.DOTALL)
    (program,) = (source for _, source in blocks if "for record in" in source)
    for name, source in blocks:
        (tmp_path / (name or "unnamed.py")).write_text(source)
    if page == "README":  # its model is on a hub, and its rows are the reader's own
        program = re.sub(r"^c\.(?:model\.path|data\.max_prompt_tokens).*\n", "", program, flags=re.MULTILINE)
        rows = [{"prompt": [{"role": "user", "content": f"{a}+{a}"}], "answer": str(2 * a)} for a in range(20)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (config,) = re.findall(r"^(\w+) = \w+\.get_config", program, re.MULTILINE)
    small = SMALL | dict(rollout=dict(max_completion_tokens=96 if page == "docs/start_tools" else 4))
    program = program.replace("for record in", f"{config}.update({small!r})\nfor record in")
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert (run / "hf" / "model.safetensors").is_file()


def test_the_configs_of_the_page_on_environments_are_complete(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "environments.md").read_text()
    files = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", text, re.DOTALL))
    snippets = re.findall(r"```python\n# in get_config of my_config\.py.*?\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 6
    monkeypatch.syspath_prepend(tmp_path)
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    for snippet in ("", *snippets):
        config = files["my_config.py"].replace("    return c", f"{indent(snippet, '    ')}    return c")
        (tmp_path / "my_config.py").write_text(config)
        with missing.collected() as lines:  # such as the model of a hub
            recipe = recipes.read(load(tmp_path / "my_config.py").lock())
        sections = recipe.episodes.sections()
        assert [settings.turns.most for settings in sections.values()] == ([4, 6] if len(sections) > 1 else [4])
        assert all("websockets" in line for line in lines), lines


def test_no_page_has_a_gap_that_a_number_was_to_fill():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert "@@" not in page.read_text(), page


def test_the_paper_index_has_all_configs_and_names_what_is_there():
    text = (ROOT / "docs" / "papers.md").read_text()
    for config in (ROOT / "configs").glob("*.py"):
        papers = re.findall(r"arXiv (\d{4}\.\d{5})", config.read_text().split('"""')[1])
        assert all(f"https://arxiv.org/abs/{paper}" in text for paper in papers), config
        assert not papers or f"`configs/{config.name}`" in text, config
    for module, name in re.findall(r"`(advantages|losses)\.(\w+)`", text):
        assert hasattr({"advantages": advantages, "losses": losses}[module], name), name
    assert all((ROOT / name).is_file() for name in re.findall(r"`(configs/\w+\.py)`", text))


FAILURES = (ROOT / "docs" / "failures.md").read_text()
HEALTH = (ROOT / "docs" / "health.md").read_text()
JUDGES = [  # that make findings
    file for room in ("health", "recipe", "selftest") for file in sorted((ROOT / "jaxrl_llm" / room).rglob("*.py"))
]
FAILURE = r"\bF\d{1,2}[a-c]?\b"


def test_a_failure_that_a_message_or_a_page_cites_is_on_the_page_of_failures():
    rows = re.findall(rf"^\| ({FAILURE}) \|", FAILURES, re.MULTILINE)
    assert len(rows) == len(set(rows)) > 30
    rules = [(file, file.read_text()) for file in JUDGES]
    for file, text in [*rules, (Path("docs/health.md"), HEALTH)]:
        assert set(re.findall(FAILURE, text)) <= set(rows), file
    for file in (ROOT / "jaxrl_llm").rglob("*.py"):
        text = file.read_text()
        assert "FAILURES" not in text, file
        for cited in re.findall(r'"([^"{]*docs/failures\.md[^"{]*)"', text):
            assert re.fullmatch(rf"(docs/health\.md S\d+, )?docs/failures\.md {FAILURE}(, {FAILURE})*", cited), cited
        for check in re.findall(r'(?:docs/health\.md |alarm\(")(S\d+)', text):
            assert f"\n| {check} |" in HEALTH, (file, check)


def test_the_page_of_failures_names_every_rule_that_warns():
    named = {
        rule for line in FAILURES.splitlines() if line.startswith("| F") for rule in re.findall(r"`(\w+)`", cell(line))
    }
    findings = {}  # {id: what may be its severity}, of every finding that the package makes
    for file in JUDGES:
        rules = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        for rule, call in ((function, node) for function in rules for node in ast.walk(function)):
            match call:
                case ast.Call(ast.Name("Finding"), [severity, *_]) if rule.name != "alarm":
                    findings[rule.name] = ast.unparse(severity)
                case ast.Call(ast.Name("alarm"), [_, ast.Constant(name), *_]):  # of the self-test
                    findings[name] = " ".join(ast.unparse(x.value) for x in call.keywords if x.arg == "severity")
    assert len(findings) > 40
    assert named <= findings.keys()
    warns = {name for name, severity in findings.items() if "note" not in severity}
    assert warns - named == OF_NO_FAILURE
    assert all(f"`{name}`" in HEALTH for name in named)


OF_NO_FAILURE = {"reference_differs", "samples_repeat", "reward_fails", "reward_collapse"}  # S1, S9, S5; any cause


def cell(line: str) -> str:
    """Returns the last cell of a row of a table."""
    return line.strip("| ").rsplit("|", 1)[1]
