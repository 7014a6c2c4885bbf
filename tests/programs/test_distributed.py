"""Runs of several processes, which give the numbers of one, and end together."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import QUICK
from safetensors.numpy import load_file
from tiny import SMALL

from jaxrl_llm import train
from jaxrl_llm.config.load import load, override, parse_arguments
from jaxrl_llm.config.names import resolve
from jaxrl_llm.machine import distributed, meshes
from jaxrl_llm.machine.distributed import joining
from jaxrl_llm.rollout.vllm import engine
from jaxrl_llm.session.checkpoint import Checkpoints
from jaxrl_llm.tasks import SOURCES

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "jaxrl_llm/assets"
TINY = (
    "num_steps=3", "optim.warmup_steps=1", "optim.decay=constant", "prompts_per_step=8", "prompts_per_update=4",
    "group_size=4", "eval.every=3", "eval.problems=20", "checkpoint.every=1", "log.to=()", "mesh.data=-1",
    "mesh.fsdp=1", "health.self_test=False", f"model.path={SMALL}",
)  # fmt: skip
IN_PROCESS = "reward.timeout=0.0"  # rewards
NO_EVALUATION = ("eval=none", "checkpoint.keep_best=0")
FEW_PROGRAMS = (*NO_EVALUATION, "kl=none", "epochs=1", "prompts_per_update=8")
CONFIGS = {
    "grpo": ("epochs=2",),
    "search_ppo": (
        "critic.warmup_steps=1", "critic.optim.warmup_steps=0", "kl.adaptive.target=0.01", "group_size=2",
        "rollout.max_completion_tokens=128", f"model.path={ASSETS}/encyclopedia",
    ),
}  # fmt: skip
DEVICES = 4  # of all processes together


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Processes:
    """The processes of a run on this host."""

    def __init__(
        self,
        count: int,
        config: Path,
        workdir: Path,
        *fields: str,
        last: dict[str, str] | None = None,
        other: Sequence[str] = (),
    ):
        """last, other: environment variables and further arguments of the last process alone."""
        address = f"127.0.0.1:{free_port()}"
        self.outputs = [workdir.with_name(f"{workdir.name}.{i}.out") for i in range(count)]
        flags = f"--xla_force_host_platform_device_count={DEVICES // count}{QUICK}"
        command = [sys.executable, "-m", "jaxrl_llm.train", "--config", str(config), "--workdir", str(workdir)]
        command += [f"--config.{field}" for field in fields]
        self.each = []
        for i, output in enumerate(self.outputs):
            place = ["--distributed", f"{address},{i}/{count}"] if count > 1 else []
            environment = os.environ | {"XLA_FLAGS": flags} | ((last or {}) if i == count - 1 else {})
            place += other if i == count - 1 else []
            with output.open("w") as out:
                pipes = dict(stdout=out, stderr=subprocess.STDOUT)
                self.each.append(subprocess.Popen([*command, *place], env=environment, cwd=ROOT, **pipes))

    def end(self, seconds: float = 400) -> list[int]:
        """Waits for all and returns their exit codes."""
        end = time.monotonic() + seconds
        try:
            return [process.wait(end - time.monotonic()) for process in self.each]
        finally:
            for process in self.each:
                process.kill()

    def wait_for(self, text: str, seconds: float = 600) -> None:
        """Waits until the first process has said `text`."""
        end = time.monotonic() + seconds
        while text not in self.outputs[0].read_text():
            assert time.monotonic() < end and all(process.poll() is None for process in self.each), self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return "\n".join(f"--- {i}\n{output.read_text()[-3000:]}" for i, output in enumerate(self.outputs))


def run(count: int, config: str, workdir: Path, *fields: str) -> None:
    """Trains to the end."""
    processes = Processes(count, ROOT / "configs" / f"{config}.py", workdir, *TINY, *CONFIGS[config], *fields)
    assert processes.end() == [0] * count, processes.said()


def records(workdir: Path) -> list[dict]:
    """Returns the records of metrics.jsonl without times and without what is nothing but rounding."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    # The critic's values before and after an update of another part of the batch are on the edge of being clipped. The
    # share of completions that the KL term pays is one of signs, and that of step 1 has the signs of rounding.
    left_out = ("time/", "tokens_per_second", "sampler/gap", "importance/kl", "critic/clip", "completion/compressed")
    left_out += ("reward/kl_pays",)
    return [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in lines]


def check_same(workdir: Path, other: Path) -> None:
    """Checks that two runs have the same records and the same model, to rounding."""
    for one, two in zip(records(workdir), records(other), strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6, nan_ok=True)
    one, two = (load_file(at / "hf" / "model.safetensors") for at in (workdir, other))
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=3e-5, err_msg=name)


def run_alone(config: str, workdir: Path, *fields: str, mesh: tuple[int, int, int] = (DEVICES, 1, 1)) -> Path:
    """Trains in this process, on as many devices, and returns the workdir."""
    c = load(ROOT / "configs" / f"{config}.py")
    sizes = [f"mesh.{name}={size}" for name, size in zip(meshes.AXES, mesh, strict=True)]
    for field in (*TINY, *CONFIGS[config], *fields, *sizes, IN_PROCESS):
        override(c, *field.split("=", 1))
    list(train.steps(c, workdir))
    return workdir


@pytest.mark.slow
def test_two_processes_with_own_devices_to_sample_have_the_numbers_of_one(tmp_path):
    """In episodes, with a critic and a coefficient that adapts, which are of both processes too."""
    rows = resolve(load("search_ppo").data.source, SOURCES)()[:16]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = (f"data.source={tmp_path}/rows.jsonl", "data.curriculum.skip=0.9", "rollout.resample_rounds=1")
    fields += ("engine.devices=2", "eval=none", "checkpoint.keep_best=0", "num_steps=4", IN_PROCESS)
    run(2, "search_ppo", tmp_path / "two", *fields)
    check_same(tmp_path / "two", run_alone("search_ppo", tmp_path / "one", *fields))
    assert "on the last 1 devices of each process" in (tmp_path / "two.0.out").read_text()
    assert sum(record["curriculum/passed_over"] for record in records(tmp_path / "two")) > 0
    assert not (tmp_path / "two" / "lock").exists()


@pytest.mark.slow
def test_another_mesh_resumes_what_a_signal_to_one_process_stopped(tmp_path):
    fields = (*TINY, *CONFIGS["grpo"], *NO_EVALUATION, "num_steps=4", "schedule_steps=4", IN_PROCESS)
    fields += ("checkpoint.every=100", "mesh.tensor=2")
    two = Processes(2, ROOT / "configs" / "grpo.py", tmp_path / "run", *fields)
    two.wait_for("step 2/4")
    two.each[1].send_signal(signal.SIGTERM)
    assert two.end(60) == [0] * 2, two.said()
    assert "stopped by SIGTERM in process 1" in two.outputs[0].read_text()
    four = (*NO_EVALUATION, "num_steps=4", "schedule_steps=4")
    run_alone("grpo", tmp_path / "run", *four, mesh=(1, 2, 2))
    check_same(tmp_path / "run", run_alone("grpo", tmp_path / "alone", *four))


@pytest.mark.slow
def test_two_processes_continue_the_groups_in_flight_of_each_after_a_kill(tmp_path):
    fields = (*TINY, *FEW_PROGRAMS, "rollout.partial=4", "rollout.max_age=1", "num_steps=5")
    fields += ("schedule_steps=5", "checkpoint.every=1", IN_PROCESS)
    config, at = ROOT / "configs" / "grpo.py", tmp_path
    whole = Processes(2, config, at / "whole", *fields)
    assert whole.end() == [0] * 2, whole.said()
    killed = Processes(2, config, at / "killed", *fields)
    killed.wait_for("step 2/5")
    killed.each[1].kill()
    assert all(code != 0 for code in killed.end(60)), killed.said()
    resumed = Processes(2, config, at / "killed", *fields)
    assert resumed.end() == [0] * 2, resumed.said()
    assert records(at / "killed") == records(at / "whole")
    assert {record["rollout/age_max"] for record in records(at / "whole")} == {0, 1}


OWN_REWARD = """
import os, time
def reward(prompts, completions, step=[0], **columns):
    step[0] += 1
    if os.environ.get("HANGS") and step[0] == 4:
        time.sleep(10**9)
    return [float(len(x[0]["content"]) % 3) for x in completions]
"""


@pytest.mark.slow
def test_a_process_that_sleeps_for_ever_ends_all_and_no_step_is_lost(tmp_path):
    """The heartbeats of one that sleeps go on: without the watchdog the others wait for ever."""
    (tmp_path / "own.py").write_text(OWN_REWARD)
    (tmp_path / "config.py").write_text((ROOT / "configs" / "grpo.py").read_text())
    fields = (*TINY, *FEW_PROGRAMS, IN_PROCESS, "reward.functions=('own.reward',)", "reward.weights=(1.0,)")
    fields += ("health.hang_minutes=0.4", "num_steps=5", "schedule_steps=5")
    processes = Processes(2, tmp_path / "config.py", tmp_path / "run", *fields, last={"HANGS": "1"})
    assert processes.end(200) == [75, 75], processes.said()
    said = [output.read_text() for output in processes.outputs]
    assert "in reward" in said[1] and all("minutes, while a step takes" in text for text in said), processes.said()
    assert records(tmp_path / "run")[-1]["step"] == 3


EXCHANGES = """
import json, sys
from types import SimpleNamespace
import numpy as np
from jaxrl_llm.machine import distributed, meshes, transfers
from jaxrl_llm.machine.distributed import store
from jaxrl_llm.rollout.grading import GradedCompletions
from jaxrl_llm.rollout.samples import Samples, apply_replacements, resample_groups
from jaxrl_llm.structs import Prompts, Rewards, Rollouts

B, G, C, sent = 8, 2, int(sys.argv[2]), []
exchanged = store._exchange
store._exchange = lambda value, channel: sent.append(len(value)) or exchanged(value, channel)
with distributed.join_processes(sys.argv[1]):
    mesh = meshes.make_mesh(data=-1, fsdp=1, tensor=1)
    part = distributed.part(B)

    def collate(numbers):
        return Prompts(numbers[:, None], np.ones((len(numbers), 1), bool), [{} for _ in numbers], numbers)

    def sampled(i, signal):
        numbers = (10 * i + np.arange(B, dtype=np.int32))[part]
        tokens = np.broadcast_to(numbers[:, None, None], (len(numbers), G, C)).astype(np.int32)
        mask, cut = np.ones(tokens.shape, bool), np.zeros(tokens.shape[:2], bool)
        rollouts = Rollouts(tokens, mask, mask, tokens.astype(np.float32), cut, tokens)
        total = np.array([[0.0, 1.0] if s else [1.0, 1.0] for s in signal], np.float32)[part]
        graded = GradedCompletions([[str(n)] * G for n in numbers], Rewards(total, {}), [], {})
        return Samples(collate(numbers), rollouts, lambda: graded)

    fresh = {1: sampled(1, [False, True] * 4), 2: sampled(2, [True] * 8)}
    decoder = SimpleNamespace(batch_decode=lambda ids, **_: [str(tokens[0]) for tokens in ids])
    samples, replaced = resample_groups(sampled(0, [True] + [False] * 7), fresh.__getitem__, collate, 3)
    whole = apply_replacements(samples, decoder, mesh)
    rows = transfers.gather(whole.rollouts.completions, mesh)
    assert (rows == rows[:, :1, :1]).all() and (rows[part] == whole.rollouts.versions).all()
    assert (whole.rollouts.logprobs == rows[part]).all() and whole.rollouts.completion_mask.all()
    assert [text[0] for text in whole.wait_for_grades().texts] == [str(n) for n in rows[part][:, 0, 0]]
    assert (whole.prompts.numbers == rows[part][:, 0, 0]).all() and not whole.no_signal.any()
    largest = transfers.max_over_processes(np.arange(3) * (1 - 2 * distributed.index()), mesh).tolist()
    print("found", json.dumps([rows[:, 0, 0].tolist(), replaced, largest, len(sent), sum(sent)]), flush=True)
"""


def start(program: str, *words: str, count: int = 2, devices: int = 1) -> list[subprocess.Popen[str]]:
    """Starts processes that run a program, whose first word is how they are joined."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    address, environment = f"127.0.0.1:{free_port()}", os.environ | {"XLA_FLAGS": flags}
    places = [f"{address},{i}/{count}" if count > 1 else "" for i in range(count)]
    return [subprocess.Popen([sys.executable, "-c", program, x, *words], env=environment, **pipes) for x in places]


@pytest.mark.slow
def test_groups_go_to_other_processes_by_the_devices_and_not_through_the_store():
    def found(count: int, tokens: int) -> list[list]:
        each = start(EXCHANGES, str(tokens), count=count, devices=DEVICES // count)
        said = [process.communicate(timeout=100)[0] for process in each]
        return [json.loads(text.split("found ")[1].splitlines()[0]) for text in said]

    alone, short, long = found(1, 4), found(2, 4), found(2, 20_000)
    assert [x[:2] for x in (*short, *long)] == [alone[0][:2]] * 4
    assert alone[0][:2] == [[0, 11, 13, 15, 17, 20, 21, 22], 7]
    assert [x[2] for x in short] == [[0, 1, 2]] * 2
    # Neither the number of exchanges nor their bytes grows with the number of tokens.
    assert [x[3:] for x in short] == [x[3:] for x in long] and long[0][4] < 4000


PROGRAM = """
import sys, time
from jax.experimental import multihost_utils
from jaxrl_llm.errors import UserError, run_main
from jaxrl_llm.machine import distributed
from jaxrl_llm.session.signals import AgreedSignals

def main():
    with distributed.join_processes(sys.argv[1]), AgreedSignals(command=True):
        multihost_utils.sync_global_devices("both have compiled it")
        print("ready", flush=True)
        if distributed.index() and "fails" in sys.argv:
            raise UserError("own error")
        if distributed.index() == 1:
            time.sleep(60)
        if "exchange" in sys.argv:
            distributed.wait("one alone")
        multihost_utils.sync_global_devices("one alone")

run_main(main)
"""


def test_a_second_signal_ends_a_process_that_waits_for_one_that_is_stopped():
    both = start(PROGRAM)
    try:
        # In the line, not the line: Gloo writes to the same pipe, and its words may stand before ours.
        assert all(any("ready" in line for line in iter(process.stdout.readline, "")) for process in both)
        both[1].send_signal(signal.SIGSTOP)
        time.sleep(0.5)  # until the first one is in the collective
        both[0].send_signal(signal.SIGTERM)
        assert any("SIGTERM: the run saves" in line for line in iter(both[0].stdout.readline, ""))
        both[0].send_signal(signal.SIGTERM)
        assert both[0].wait(2) == 128 + signal.SIGTERM
    finally:
        for process in both:
            process.kill()
            process.communicate()


def test_an_error_in_one_process_ends_all(wording):
    both = start(PROGRAM, "fails")
    said = [process.communicate(timeout=100)[1] for process in both]
    assert [process.returncode for process in both] == [2, 2], said
    for text in said:
        wording(next(line for line in text.splitlines() if line.startswith("error: ")))


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["exchange"]], ids=["in a collective", "in an exchange"])
def test_processes_end_long_before_they_miss_the_heartbeat_of_a_killed_one(words, wording):
    each = start(PROGRAM, *words, count=3)
    assert all(any("ready" in line for line in iter(process.stdout.readline, "")) for process in each)
    time.sleep(1)  # until the others are in the collective or exchange
    each[1].kill()
    began = time.monotonic()
    said = [process.communicate(timeout=60)[1] for process in each]
    assert time.monotonic() - began < 30
    assert [process.returncode for process in each] == [75, -9, 75], said
    for text in (said[0], said[2]):
        wording("\n".join(line for line in text.splitlines() if line.startswith("error: ")))


@pytest.mark.slow
def test_two_processes_go_back_together_and_then_end_together(tmp_path):
    never = ("num_steps=20", "reward.functions=arithmetic.accuracy", "reward.weights=1.0", "optim.learning_rate=1e-9")
    act = ("health.rollback.rules=no_signal,", "health.rollback.most=1", "checkpoint.every=4", "checkpoint.keep=4")
    fields = (*TINY, *FEW_PROGRAMS, *never, *act, "rollout.temperature=0.001")
    processes = Processes(2, ROOT / "configs" / "grpo.py", tmp_path / "run", *fields)
    assert processes.end() == [3, 3], processes.said()
    decision = json.loads((tmp_path / "run" / "rollbacks" / "1.json").read_text())
    assert (decision["step"], decision["to"], decision["finding"]["id"]) == (8, 4, "no_signal")
    assert "rollback 1 of at most 1: back to step 4" in processes.outputs[0].read_text()
    assert "config.health.rollback.most = 1" in processes.outputs[0].read_text()
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 9))


def test_the_watch_for_an_end_of_others_rests_when_process_0_is_gone(monkeypatch):
    asked, leaving = [], threading.Event()

    def get(key: str, milliseconds: int) -> str:
        asked.append(key)
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    monkeypatch.setattr(joining, "client", lambda: SimpleNamespace(blocking_key_value_get=get))
    monkeypatch.setattr(joining, "_is_ending", leaving)
    watch = threading.Thread(target=joining._watch_for_ends)
    watch.start()
    time.sleep(0.5)
    leaving.set()
    watch.join()
    assert 1 <= len(asked) <= 5


def test_a_save_that_fails_without_the_others_is_not_called_a_full_disk(monkeypatch, tmp_path, refused):
    monkeypatch.setattr(distributed, "count", lambda: 2)
    saving = lambda: Checkpoints._saving(SimpleNamespace(_folder=tmp_path / "checkpoints", _in_bucket=False))  # noqa: E731
    with refused(), saving():
        raise ValueError("a barrier timed out")
    with refused(str(tmp_path)), saving():
        raise ValueError("Error writing local file [OS error 28: No space left on device]")
    with refused(str(tmp_path)), saving():
        raise ValueError("a thread failed") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_wrong_address_is_told_in_a_line(refused):
    with refused("--distributed here"), distributed.join_processes("here"):
        pass
    done = subprocess.run([sys.executable, "-c", PROGRAM, "127.0.0.1:1,2/2"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "--distributed 127.0.0.1:1,2/2" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_process_whose_peers_never_come_ends_in_a_line(wording):
    """JAX's own limit is 300 s, and then it aborts without a line."""
    program = "import sys\nfrom jaxrl_llm.machine.distributed import joining\njoining.JOIN_SECONDS = 1.0\n"
    program += "with joining.join_processes(sys.argv[1]):\n    print('joined')"
    words = [sys.executable, "-c", program, "127.0.0.1:1,1/2"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert (done.returncode, done.stdout) == (75, "")
    wording(next(line for line in done.stderr.splitlines() if line.startswith("error: ")))


def test_several_processes_need_a_workdir_of_their_own_choice(refused):
    with refused("--workdir"):
        parse_arguments("test", "", ["--config", str(ROOT / "configs" / "grpo.py"), "--distributed", "auto"])


def test_each_process_has_a_server_of_its_own(monkeypatch, refused):
    assert engine.process_address("http://gpu:8000", "servers") == "http://gpu:8000"
    monkeypatch.setattr(distributed, "count", lambda: 3)
    monkeypatch.setattr(distributed, "index", lambda: 2)
    assert engine.process_address("http://gpu-{process}:8000", "servers") == "http://gpu-2:8000"
    with refused("engine.push_address"):
        engine.process_address("10.0.0.1", "push_address")


def chip(number: int, process: int, coords: list[int], of_slice: int = 0) -> SimpleNamespace:
    return SimpleNamespace(id=number, process_index=process, coords=coords, slice_index=of_slice, platform="tpu")


def test_a_process_has_whole_prompts_and_every_process_orders_its_devices_alike():
    """A slice of 4 x 4 chips, whose hosts have 2 x 2; their numbers go along the rows of the slice."""
    chips = [
        chip(4 * row + column, 2 * (row // 2) + column // 2, [column, row, 0])
        for row in range(4)
        for column in range(4)
    ]
    for shape, rows in {(1, 4, 4): 1, (1, 8, 2): 2, (2, 4, 2): 2, (4, 4, 1): 4}.items():
        placed = meshes._split_by_process(chips[::-1], 4, shape).reshape(-1, shape[-1])
        for process in range(4):
            own = placed[process * rows : (process + 1) * rows].ravel()
            assert {chip.process_index for chip in own} == {process}
            first = own[0].coords
            assert [[a - b for a, b in zip(c.coords, first, strict=True)][:2] for c in own] == [
                [0, 0], [0, 1], [1, 0], [1, 1]
            ]  # fmt: skip


def test_only_the_data_axis_goes_over_several_slices(refused):
    chips = [chip(10 * s + i, 1 - s, [i, 0, 0], s) for s in range(2) for i in range(4)]
    placed = meshes._split_by_process(chips, 2, (2, 4, 1))
    assert [[c.slice_index for c in row.ravel()] for row in placed] == [[0] * 4, [1] * 4]
    with refused("mesh.data"):
        meshes._split_by_process(chips, 2, (1, 8, 1))
