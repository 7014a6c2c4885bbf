"""Real vLLM servers: sampled from, fed, killed, cut off and hung. They need launch/vllm_cpu.sh --install."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_distributed import ASSETS, CONFIGS, Processes
from test_distributed import TINY as FEW_STEPS
from test_episodes import Echo
from test_families import random_model
from test_train import ROOT, beginning, log_of, records, run, start, wait_for_step

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import forward
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf, hf_export, names
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.rollout.protocol import EngineInputs
from jaxrl_llm.rollout.samples import CompletionTask
from jaxrl_llm.rollout.vllm import address, connection, weights
from jaxrl_llm.rollout.vllm.connection import ServerConnection
from jaxrl_llm.rollout.vllm.engine import VllmEngine
from jaxrl_llm.rollout.vllm.managed_server import ManagedServer
from jaxrl_llm.rollout.vllm.server_checks import check_model
from jaxrl_llm.structs import Batch, PyTree, Rollouts
from jaxrl_llm.tasks import arithmetic
from jaxrl_llm.tools.serve_vllm import shared_memory

pytestmark = pytest.mark.vllm
PYTHON = str(ROOT / ".vllm" / "bin" / "python")
FOLDER = ROOT / "jaxrl_llm" / "assets" / "arithmetic"
ARGUMENTS = (
    "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192", "--max-num-seqs", "256",
)  # fmt: skip
LENGTH, B, G = 12, 16, 4
SERVED = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # that vLLM knows
KEY = jax.random.key(3)
TINY = [
    "--config.prompts_per_step=16", "--config.prompts_per_update=16", "--config.group_size=4", "--config.eval=none",
    "--config.checkpoint.every=2", "--config.log.to=()", "--config.optim.warmup_steps=1",
    "--config.health.self_test=False",
]  # fmt: skip


def processes(group: int) -> dict[int, str]:
    """Command line by process id of a process group, zombies left out."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
    return found


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def worker(group: int) -> int:
    return next(pid for pid, name in processes(group).items() if "Worker" in name)


@contextmanager
def serving(
    log: Path, *extra: str, dtype: str = "float32", folder: Path = FOLDER, most: int = 32
) -> Iterator[ManagedServer]:
    server = ManagedServer(PYTHON, folder, dtype=dtype, max_model_len=most, log=log, config_args=(*ARGUMENTS, *extra))
    try:
        yield server
    finally:
        group = vllm_group(server) if server._process.poll() is None else None
        server.stop()
        assert group is None or not processes(group), "a process outlived its server"


def vllm_group(server: ManagedServer) -> int:
    """The process group of vLLM now; it is another one after every start."""
    return wait_for(lambda: vllm_of(server._process.pid))


def vllm_of(keeper: int) -> int | None:
    """The API server that a serve_vllm process started."""
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in children(keeper)}
    return next(
        (pid for pid, file in commands.items() if file.exists() and "vllm.entrypoints" in file.read_text()), None
    )


def ask(server: ManagedServer, method: str, path: str, **body: Any) -> httpx.Response:
    """The answer of a server, asked behind the engine's back."""
    with address.client(server.url) as door:
        return door.request(method, path, **body)


def healthy(server: ManagedServer) -> bool:
    with suppress(httpx.TransportError):
        return ask(server, "get", "/health").status_code == 200
    return False


def wait_for(condition: Callable[[], Any], seconds: float = 600) -> Any:
    """What a condition comes to, when it is something. A start of vLLM takes half a minute of a quiet machine."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


@contextmanager
def connected(*servers: ManagedServer, tmp_path: Path, run: str = "test", **changes) -> Iterator[VllmEngine]:
    usual = dict(run=run, weights_dir=str(tmp_path), push_address="", concurrency=64, timeout=120.0, patience=200.0)
    cfg = replace(changes.pop("model", MODEL.cfg), dtype=changes.pop("dtype", "float32"))
    length, width = changes.pop("max_completion_tokens", LENGTH), changes.pop("max_prompt_tokens", 8)
    inputs = EngineInputs(SimpleNamespace(cfg=cfg), None, FOLDER, tmp_path, width, length, STOPS, PAD)
    engine = VllmEngine(tuple(server.url for server in servers), inputs, **usual | changes)
    try:
        yield engine
    finally:
        engine.close()


MODEL, TOKENIZER = hf.load_model(FOLDER), hf.load_tokenizer(FOLDER)
STOPS, PAD = hf.stop_ids(FOLDER, TOKENIZER), TOKENIZER.pad_token_id


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ManagedServer]:
    """A server of all tests. At the end its keeper, serve_vllm, is killed: nothing of the server may outlive it."""
    with serving(tmp_path_factory.mktemp("server") / "vllm.log") as live:
        wait_for(lambda: healthy(live))
        yield live
        group = vllm_group(live)
        files = shared_memory(group)
        live._process.kill()
        wait_for(lambda: not processes(group))
        wait_for(lambda: not any(file.exists() for file in files), seconds=30)


@pytest.fixture(scope="module")
def params() -> PyTree:
    return hf.load_params(FOLDER, MODEL, meshes.make_mesh(data=1, fsdp=2, tensor=2))


def nudged(params: PyTree, by: float) -> PyTree:
    return jax.tree.map(lambda x: x + by * jax.random.normal(jax.random.key(1), x.shape), params)


@pytest.fixture(scope="module")
def prompts():
    dataset = data.tokenize(arithmetic.held_out(), TOKENIZER, max_prompt_tokens=8, overlong="error")
    return data.make_prompts(dataset, range(B), PAD)


@cache
def scorer(model: Decoder, sampling: Sampling) -> Callable[[PyTree, Batch], jax.Array]:
    return forward.make_logprob_fn(model, sampling, meshes.make_mesh(data=1, fsdp=2, tensor=2), 0)


def gap(
    params: PyTree,
    prompts,
    rollouts: Rollouts,
    sampling: Sampling | None = None,
    of: Callable = np.max,
    model: Decoder = MODEL,
) -> float:
    """The largest difference to the trainer's log-probabilities, or what `of` makes of all of them."""
    completions = rollouts.completions, rollouts.completion_mask, rollouts.loss_mask
    batch = Batch(prompts.tokens, prompts.mask, *completions, images=prompts.images)
    score = scorer(model, sampling or Sampling())
    return float(of(np.abs(np.asarray(score(params, batch)) - rollouts.logprobs)[rollouts.loss_mask]))


def sample(engine: VllmEngine, prompts, key=KEY, sampling: Sampling | None = None, group_size: int = G) -> Rollouts:
    return engine.sample(prompts, key, group_size=group_size, sampling=sampling or Sampling())


def same(a: Rollouts, b: Rollouts) -> float:
    """The share of completions that are alike; a batch's make-up moves rounding, and that now and then a token."""
    return float((a.completions == b.completions).all(axis=-1).mean())


def test_what_is_sampled_is_what_the_trainer_scores_whatever_was_pushed(server, params, prompts, tmp_path):
    with connected(server, tmp_path=tmp_path) as engine:
        for version, by in enumerate((0.0, 0.02, 0.0), 1):
            pushed = nudged(params, by)
            engine.update_weights(pushed, version)
            for sampling in (Sampling(), Sampling(0.7), Sampling(1.3, top_k=5), Sampling(1.0, top_p=0.8)):
                rollouts = sample(engine, prompts, sampling=sampling)
                assert gap(pushed, prompts, rollouts, sampling) < 1e-4
                assert (rollouts.versions[rollouts.loss_mask] == version).all()
        assert len({tuple(x) for x in rollouts.completions.reshape(-1, LENGTH).tolist()}) > B
        last = np.take_along_axis(rollouts.completions, rollouts.completion_mask.sum(-1, keepdims=True) - 1, -1)[..., 0]
        np.testing.assert_array_equal(np.isin(last, STOPS), ~rollouts.truncated)
        again, other = sample(engine, prompts), sample(engine, prompts, jax.random.key(4))
        assert same(again, sample(engine, prompts)) > 0.95
        assert same(again, other) < 0.9


# Without mistral: vLLM and this package build it from the parts of llama.
FAMILIES = ["llama", "gemma2", "gemma3_text", "qwen3_moe"]


def job(folder: Path, pushed: weights.WeightFile, prompts, dtype: str = "float32") -> dict[str, Any]:
    """What vllm_in_process.py is asked for."""
    return {
        "model": str(folder), "dtype": dtype, "max_model_len": 32, "tensors": pushed.tensor_shapes,
        "source": pushed.source("in process"),
        "prompts": [tokens[mask].tolist() for tokens, mask in zip(prompts.tokens, prompts.mask, strict=True)],
        "sampling": {"n": 2, "max_tokens": LENGTH, "seed": 1, "stop_token_ids": STOPS, "ignore_eos": True},
    }  # fmt: skip


def rollouts_of(completions: list[list[list[tuple[int, float]]]]) -> SimpleNamespace:
    tokens, logprobs = np.full((B, 2, LENGTH), PAD), np.zeros((B, 2, LENGTH), np.float32)
    mask = np.zeros((B, 2, LENGTH), bool)
    for b, i in np.ndindex(B, 2):
        part = b, i, slice(len(completions[b][i]))
        tokens[part], logprobs[part], mask[part] = *zip(*completions[b][i], strict=True), True
    return SimpleNamespace(completions=tokens, completion_mask=mask, loss_mask=mask, logprobs=logprobs)


def test_vllm_samples_from_pushed_weights_of_every_family_and_dtype(params, prompts, tmp_path):
    """All in one process of vLLM, because a server of each would take most of its time to start.

    vLLM takes no push of experts on a CPU, and says so; it gets their weights as an exported folder.
    """
    jobs, trees, models, mesh = [], [], [], meshes.make_mesh(data=1, fsdp=2, tensor=2)
    for name in FAMILIES:
        folder = random_model(tmp_path / name / "source", name, SERVED)
        models.append(hf.load_model(folder))
        trees.append(jax.tree.map(lambda x: x * 3, hf.load_params(folder, models[-1], mesh)))  # no flat softmax
        table = names.family_table(models[-1].cfg.family)
        pushed = weights.WeightFile(tmp_path / f"{address.FOLDER}{name}", np.float32, table)
        pushed.write(trees[-1])
        if models[-1].cfg.mixture:
            hf_export.save(tmp_path / name / "exported", trees[-1], folder)
            folder = tmp_path / name / "exported"
        jobs.append(job(folder, pushed, prompts))
    nudged_params = nudged(params, 0.02)
    pushed = weights.WeightFile(tmp_path / f"{address.FOLDER}bfloat16", "bfloat16", names.family_table("qwen2"))
    pushed.write(nudged_params)
    jobs.append(job(FOLDER, pushed, prompts, "bfloat16"))
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("vllm_in_process.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([PYTHON, script, tmp_path / "jobs.json", tmp_path / "answers.json"], env=environment, check=True)
    *answers, rounded = json.loads((tmp_path / "answers.json").read_text())
    for name, model, tree, answer in zip(FAMILIES, models, trees, answers, strict=True):
        check_model("in process", answer["config_json"], model.cfg)
        assert re.search("refused: .*experts" if model.cfg.mixture else "^$", answer["refusal"])
        assert gap(tree, prompts, rollouts_of(answer["completions"]), model=model) < 1e-3, name
    right, wrong = (
        gap(tree, prompts, rollouts_of(rounded["completions"]), of=np.mean) for tree in (nudged_params, params)
    )
    assert right < 0.05 < wrong / 3, (right, wrong)


def test_episodes_of_several_turns_are_sampled_as_the_trainer_scores_them(server, params, prompts, tmp_path):
    pool = EnvironmentPool(TOKENIZER, Echo, most=4, tokens=8, observation_tokens=10, workers=8, timeout=10.0)
    with connected(server, tmp_path=tmp_path, max_completion_tokens=24) as engine:
        engine.update_weights(params, 5)
        task = CompletionTask(pool.tokenizer, None, pool)
        _, rollouts = task.sample(engine, prompts, KEY, G, Sampling(1.5), "test")
    assert gap(params, prompts, rollouts, Sampling(1.5)) < 1e-4
    turns = data.decode_turns(TOKENIZER, rollouts.completions, rollouts.completion_mask, rollouts.loss_mask)
    several = [one for group in turns for one in group if len(one) > 2]
    assert len(several) > B
    # A turn ends at its first stop string, also where the server has sampled on.
    inner = [turn["content"] for one in several for turn in one[:-1] if turn["role"] == "assistant"]
    assert all(
        len(re.findall("[>,]", text)) <= 1 and (text[-1:] in (">", ",") or not re.search("[>,]", text))
        for text in inner
    )
    assert (rollouts.episodes["turns"] <= 4).all()
    assert len({tuple(x) for x in rollouts.completions.reshape(-1, 24).tolist()}) > B


@pytest.mark.parametrize("how", ["missing", "unknown", "of another shape", "cut in half"])
def test_a_push_with_a_tensor_that_is_wrong_changes_nothing(server, params, prompts, tmp_path, how):
    with connected(server, tmp_path=tmp_path) as engine:
        engine.update_weights(params, 3)
        before, file = sample(engine, prompts), tmp_path / "bad.safetensors"
        name, tensors = "model.layers.1.mlp.down_proj.weight", load_file(FOLDER / "model.safetensors")
        tensor = tensors.pop(name)
        changes = {"unknown": {name: tensor, "model.extra.weight": tensor}, "cut in half": {name: tensor}}
        changes |= {"missing": {}, "of another shape": {name: np.ascontiguousarray(tensor.T)}}
        save_file(tensors | changes[how], file)
        os.truncate(file, file.stat().st_size // (2 if how == "cut in half" else 1))
        post = lambda path, body=None: ask(server, "post", path, json=body, timeout=60)  # noqa: E731
        post("/pause?mode=keep")
        post("/start_weight_update")
        answer = post("/update_weights", {"update_info": {"path": str(file)}})
        post("/resume")
        assert answer.status_code == 500
        assert how == "cut in half" or "refused: " in answer.text, answer.text
        assert ask(server, "get", "/weight_info").json()["weight_version"].endswith(":3")
        after = sample(engine, prompts)
        assert same(before, after) > 0.95
        assert gap(params, prompts, after) < 1e-4
        engine.update_weights(nudged(params, 0.02), 4)
        assert gap(nudged(params, 0.02), prompts, sample(engine, prompts)) < 1e-4


@pytest.fixture
def downloads(monkeypatch) -> list[int]:
    """The downloads of pushed weights, each with the bytes sent. The connection of the first one breaks halfway."""
    whole, sent = weights.WeightServer.send, []

    def send(self, vllm, source, sink):
        size = os.fstat(source.fileno()).st_size
        sent.append(size if sent else size // 2)
        if len(sent) > 1:
            return whole(self, vllm, source, sink)
        sink.write(source.read(size // 2))
        sink.flush()
        sink.close()

    monkeypatch.setattr(weights.WeightServer, "send", send)
    return sent


def test_a_run_killed_in_the_middle_of_a_push_resumes_with_its_server(server, params, prompts, tmp_path):
    for path in ("/pause?mode=keep", "/start_weight_update"):
        ask(server, "post", path, timeout=60)
    with connected(server, tmp_path=tmp_path) as engine:
        engine.update_weights(params, 2)
        assert gap(params, prompts, sample(engine, prompts)) < 1e-4


# A worker that dies takes the engine with it. A kill costs a start of a server, so requests and pushes have one each;
# tests/rollout/test_vllm_engine.py has a broken connection and an error for both, with servers that look like vLLM.
def test_a_server_whose_worker_is_killed_in_requests_comes_back_and_loses_none(server, params, prompts, tmp_path):
    with connected(server, tmp_path=tmp_path) as engine:
        engine.update_weights(nudged(params, 0.01), 6)
        whole, group = sample(engine, prompts), vllm_group(server)
        threading.Timer(0.15, os.kill, (worker(group), signal.SIGKILL)).start()
        rollouts = sample(engine, prompts)
        wait_for(lambda: vllm_group(server) != group)  # the worker may have died after its last answer
        assert not processes(group)
        assert same(rollouts, whole) > 0.95
        assert gap(nudged(params, 0.01), prompts, rollouts) < 1e-4
        assert (rollouts.versions == 6).all()


def stop(group: int, seconds: float) -> None:
    """Stops the processes of a server for some seconds."""
    stopped = list(processes(group))
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, lambda: [os.kill(pid, signal.SIGCONT) for pid in stopped]).start()


def before_push(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> list[str]:
    """Calls action once, before a server is asked to load the weights. The list has an item when it was called."""
    called, pull = [], weights.pull

    def acting(post: Callable) -> Callable:
        def call(path: str, body: object = None) -> object:
            if path == "/update_weights" and not called:
                called.append(path)
                action()
            return post(path, body)

        return call

    monkeypatch.setattr(weights, "pull", lambda post, *source_and_tag: pull(acting(post), *source_and_tag))
    return called


def test_a_server_killed_in_the_middle_of_a_push_comes_back_and_gets_it(server, params, prompts, tmp_path, monkeypatch):
    with connected(server, tmp_path=tmp_path) as engine:
        engine.update_weights(params, 1)
        group = vllm_group(server)
        killed = before_push(monkeypatch, lambda: os.kill(group, signal.SIGKILL))  # the API server
        pushed = nudged(params, 0.02)
        engine.update_weights(pushed, 2)
        assert killed
        assert vllm_group(server) != group
        rollouts = sample(engine, prompts)
        assert gap(pushed, prompts, rollouts) < 1e-4
        assert (rollouts.versions == 2).all()


def test_a_server_that_hangs_in_requests_or_in_a_push_is_waited_for(server, params, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "SHORT_TIMEOUT", 2.0)
    with connected(server, tmp_path=tmp_path, timeout=2.0) as engine:
        engine.update_weights(nudged(params, 0.02), 9)
        group = vllm_group(server)
        stop(group, 8)
        began = time.monotonic()
        assert gap(nudged(params, 0.02), prompts, sample(engine, prompts)) < 1e-4
        assert time.monotonic() - began > 6
        stopped = before_push(monkeypatch, lambda: stop(group, 6))
        engine.update_weights(params, 10)
        assert stopped and vllm_group(server) == group
        assert gap(params, prompts, sample(engine, prompts)) < 1e-4


def test_a_run_that_ends_in_its_requests_ends_soon_and_frees_its_server(server, params, prompts, tmp_path):
    endless = replace(prompts, tokens=np.tile(prompts.tokens, (40, 1)), mask=np.tile(prompts.mask, (40, 1)))
    with connected(server, tmp_path=tmp_path) as engine:
        engine.update_weights(params, 7)

        def sample_all() -> None:
            with suppress(UserError, CancelledError, RuntimeError):  # the last, where not all were asked yet
                sample(engine, endless)

        thread = threading.Thread(target=sample_all, daemon=True)
        thread.start()
        time.sleep(1)
        began = time.monotonic()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert time.monotonic() - began < 20
    assert ask(server, "get", "/weight_info").json()["weight_version"] == "default"


def segments() -> set[str]:
    """The shared memory of vLLM's processes."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "vllm_"))}


def test_a_run_killed_with_its_server_resumes_ahead_and_learns_without_torch(tmp_path):
    """In processes where an import of torch or vllm fails, as in an environment without them."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None; "
        "from jaxrl_llm import train; sys.argv = sys.argv[1:]; train.main()"
    )
    argv = ["train", "--config", "configs/grpo_vllm.py", "--workdir", str(tmp_path / "run"), *TINY[3:]]
    argv += ["--config.num_steps=10", "--config.optim.learning_rate=3e-4", "--config.eval.problems=100"]
    argv += ["--config.eval.every=10", "--config.engine.weights_dir=" + str(tmp_path / "weights")]
    argv, shared = [sys.executable, "-c", code, *argv, "--config.rollout.max_lag=1"], segments()
    given = dict(cwd=ROOT, env=os.environ | {"XLA_FLAGS": ""}, start_new_session=True, stdout=subprocess.DEVNULL)
    process = subprocess.Popen(argv, **given)
    wait_for_step(tmp_path / "run", 5, process)
    keepers = [pid for pid in children(process.pid) if "serve_vllm" in Path(f"/proc/{pid}/cmdline").read_text()]
    group = vllm_of(keepers[0])
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not processes(group))
    wait_for(lambda: segments() <= shared, seconds=30)
    before = beginning(tmp_path / "run")
    resumed = subprocess.run(argv, **given, stderr=subprocess.PIPE, text=True, timeout=600)
    assert resumed.returncode == 0, resumed.stderr
    assert log_of(tmp_path / "run").startswith(before)
    first, *steps = records(tmp_path / "run")
    assert [s["step"] for s in steps] == list(range(1, 11))
    assert [s["rollout/lag"] for s in steps] == [0.0] + [1.0] * 9
    assert min(s["importance/ess"] for s in steps) > 0.5
    assert max(s["weight_check/gap"] for s in steps) < 1e-4
    assert steps[-1]["eval/accuracy"] > first["eval/accuracy"]
    assert not os.listdir(tmp_path / "weights")


def test_a_run_killed_while_its_server_lives_on_resumes_with_it(server, tmp_path):
    extra = [
        *TINY, "--config.num_steps=8", "--config.engine.managed=false", f"--config.engine.servers={server.url}",
        "--config.engine.push=http", "--config.engine.push_address=127.0.0.1",
    ]  # fmt: skip
    process = start(tmp_path / "run", *extra, config="configs/grpo_vllm.py")
    wait_for_step(tmp_path / "run", 4, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    result = run(tmp_path / "other", *extra, config="configs/grpo_vllm.py")
    assert result.returncode == 2
    assert "serves another run" in result.stderr
    before = beginning(tmp_path / "run")
    result = run(tmp_path / "run", *extra, config="configs/grpo_vllm.py")
    assert result.returncode == 0, result.stderr
    assert log_of(tmp_path / "run").startswith(before)
    assert [s["step"] for s in records(tmp_path / "run")] == list(range(1, 9))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["engine"]["name"] == "vllm"
    assert ask(server, "get", "/weight_info").json()["weight_version"] == "default"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[ManagedServer]:
    """A second server, which has two workers. The last test kills it."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
            log = tmp_path_factory.mktemp("pair") / "vllm.log"
            live = stack.enter_context(serving(log, "--tensor-parallel-size", "2"))
        yield live


def test_two_workers_share_a_download_and_survive_a_refused_push(
    pair, params, prompts, tmp_path, monkeypatch, downloads
):
    """Weights are sliced for each worker. A failed download, or a wrong tensor, changes none of them."""
    with connected(pair, tmp_path=tmp_path, push_address="127.0.0.1") as engine:
        pushed = nudged(params, 0.02)
        engine.update_weights(pushed, 1)
        group = vllm_group(pair)
        assert len(downloads) == 2
        assert gap(pushed, prompts, sample(engine, prompts)) < 1e-4
        spoiled = jax.tree.map(lambda x: x.at[(-1,) * x.ndim].set(np.inf), params)
        with monkeypatch.context() as unchecked:
            unchecked.setattr(weights.np, "isfinite", np.ones_like)
            with pytest.raises(UserError, match=r"refused: .* is not finite"):
                engine.update_weights(spoiled, 2)
        engine.update_weights(params, 3)
        assert gap(params, prompts, sample(engine, prompts)) < 1e-4
        # Seven if each worker had its own download. A busy machine may repeat one of the four.
        assert len(downloads) <= 5 and vllm_group(pair) == group


def test_two_processes_with_a_server_each_sample_what_one_process_does(server, pair, tmp_path):
    steps, config = {}, ROOT / "configs" / "grpo_vllm.py"
    fields = (*FEW_STEPS, *CONFIGS["grpo"], "log.completions_every=1", "engine.managed=false")
    fields += (f"engine.weights_dir={tmp_path}", f"model.path={ASSETS}/arithmetic")  # the model of both servers
    for index, each in enumerate((server, pair)):
        (tmp_path / f"socket{index}").symlink_to(each.url.removeprefix(address.UNIX))
    for count, servers in ((1, server.url), (2, f"{address.UNIX}{tmp_path}/socket{{process}}")):
        workdir = tmp_path / f"run{count}"
        processes = Processes(count, config, workdir, *fields, f"engine.servers={servers}")
        assert processes.end() == [0] * count, processes.said()
        steps[count] = [step for step in records(workdir) if "reward/mean" in step]
    for one, two in zip(steps[1], steps[2], strict=True):
        assert max(two["sampler/gap_max"], two["weight_check/gap"]) < 1e-4
        # The same seeds for the same prompts. The batch of a server moves rounding, and that now and then a token.
        assert two["reward/mean"] == pytest.approx(one["reward/mean"], abs=0.05)
        assert two["completion/length"] == pytest.approx(one["completion/length"], rel=0.05)


def test_two_servers_share_the_requests_and_one_serves_on_when_the_other_dies(
    server, pair, params, prompts, tmp_path, monkeypatch
):
    pushed, answered, request = nudged(params, 0.01), [], ServerConnection.request

    def noted(server: ServerConnection, method: str, path: str, *body: object, **options: Any) -> httpx.Response:
        answer = request(server, method, path, *body, **options)
        answered.extend([server.url] if path == "/inference/v1/generate" else [])
        return answer

    monkeypatch.setattr(ServerConnection, "request", noted)
    wait_for(lambda: healthy(pair))
    with connected(server, pair, tmp_path=tmp_path) as engine:
        engine.update_weights(pushed, 3)
        assert gap(pushed, prompts, sample(engine, prompts)) < 1e-4
        assert [answered.count(url) for url in (server.url, pair.url)] == [B / 2, B / 2]
        answered.clear()
        os.killpg(vllm_group(pair), signal.SIGKILL)
        rollouts = sample(engine, prompts)
        assert gap(pushed, prompts, rollouts) < 1e-4
        assert (rollouts.versions == 3).all()
        assert answered.count(server.url) == B  # the other takes longer than that to come back
        answered.clear()
        engine.update_weights(params, 4)  # the other is away: it misses them, unless it is back already
        assert gap(params, prompts, sample(engine, prompts)) < 1e-4
        assert len(answered) == B
