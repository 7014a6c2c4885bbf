"""Sampling ahead: which weights make which batch, what a restart finds, and what a push is checked against."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

from jaxrl_llm.algorithms.importance import make_importance_weights
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import meshes, sharding
from jaxrl_llm.models import hf
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.names import DENSE
from jaxrl_llm.recipe import fit
from jaxrl_llm.rollout import weight_check
from jaxrl_llm.rollout.actor import Actor
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.prefetch import Prefetcher
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.rollout.vllm import weights
from jaxrl_llm.rollout.weight_check import WeightCheck
from jaxrl_llm.structs import PartState, Prompts, Rollouts

ARITHMETIC = Path(hf.__file__).parent.parent / "assets" / "arithmetic"


class Recorder:
    """A run of `steps` steps; `versions` are the weights that each step's batch was sampled with."""

    def __init__(self, lag: int, steps: int):
        self.version, self.steps = 0, steps
        self.ahead = Prefetcher(lambda step: (step, self.version), lag=lag, last=steps)

    def give(self, version: int) -> None:
        self.version = version

    def run(self, start: int = 0, made: tuple = (), stop: int | None = None) -> list[tuple[int, int]]:
        self.ahead.submit(self.give, start)
        self.ahead.start(start, made)
        seen = []
        for step in range(start + 1, (stop or self.steps) + 1):
            seen.append(self.ahead.next())
            self.ahead.drop_current()
            self.ahead.submit(self.give, step)
            self.waiting = self.ahead.finished_batches()
            self.ahead.order_after(step)
        return seen


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_batches_are_of_weights_of_lag_steps_before_and_wait_for_a_resumed_run(lag):
    whole = Recorder(lag, 8).run()
    assert whole == [(step, max(0, step - 1 - lag)) for step in range(1, 9)]
    before = Recorder(lag, 8)
    seen = before.run(stop=4)
    assert len(before.waiting) == lag
    assert seen + Recorder(lag, 8).run(4, tuple(before.waiting)) == whole


class CountingSource:
    """Batches of one prompt, whose number is the position in the data; `sampled` has the keys."""

    def __init__(self):
        self.pushes = []
        self.position, self.in_flight, self.sampled, self.prompts = 0, None, {}, self

    def get_state(self) -> int:
        return self.position

    def set_state(self, position: int) -> None:
        self.position = position

    def sample(self, key: jax.Array) -> Samples:
        self.position += 1
        self.sampled[self.position] = jax.random.key_data(key).tolist()
        return Samples(Prompts(*tiny.prompts(), [], np.array([self.position])), *[None] * 2)

    def apply_replacements(self, samples: Samples) -> Samples:
        return replace(samples)

    def to_checkpoint(self, samples: Samples) -> dict[str, np.ndarray]:
        return {"numbers": samples.prompts.numbers}

    def from_checkpoint(self, arrays: dict[str, np.ndarray], metrics: dict, replaced: list) -> Samples:
        return Samples(Prompts(*tiny.prompts(), [], arrays["numbers"]), *[None] * 2)


def acting(lag: int, last: int = 9) -> tuple[Actor, CountingSource]:
    source = CountingSource()
    engine = SimpleNamespace(update_weights=lambda params, version: source.pushes.append(version), release=list)
    return Actor(engine, source, 0, lag=lag, last=last), source


@pytest.mark.parametrize("lag", [0, 1])
def test_the_actor_returns_the_same_batch_until_the_push(lag):
    actor, _ = acting(lag)
    with closing(actor):
        actor.load(None)
        actor.start({}, {}, 0)
        first = actor.next()
        assert actor.next() is first
        actor.push({}, {}, 1)
        assert actor.next().prompts.numbers == [2]


@pytest.mark.parametrize("lag", [0, 1])
def test_the_weights_after_the_last_step_are_pushed_for_an_evaluation_alone(lag):
    actor, source = acting(lag, last=2)
    with closing(actor):
        actor.load(None)
        actor.start({}, {}, 0)
        for step in (1, 2):
            actor.next()
            actor.push({}, {}, step)
        assert actor.lease.reclaim() == ({}, {})
        assert source.pushes == [0, 1]
        for _ in range(2):
            actor.wait_for_weights()
        assert source.pushes == [0, 1, 2]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_new_attempt_samples_the_prompts_anew_that_waited_in_the_checkpoint(lag):
    """Also if the checkpoint is of a run that was resumed one step before, from two batches that waited."""

    def learned(actor: Actor, step: int) -> PartState:
        actor.next()
        actor.push({}, {}, step)
        return actor.state()

    begun, state = 0, None
    for _ in range(2):
        actor, source = acting(lag)
        with closing(actor):
            actor.load(state)
            actor.start({}, {}, begun)
            begun += 1
            state = learned(actor, begun)
    again, resampled = acting(lag)
    with closing(again):
        again.load(state)
        again.start({}, {}, begun, attempt=1)
        assert again.next().prompts.numbers == [3]
        again.wait_for_weights()
    assert resampled.sampled[3] != source.sampled.get(3, ())
    assert sorted(resampled.sampled) == list(range(3, 4 + lag))


def test_a_batch_that_a_stop_does_not_wait_for_is_told(capsys):
    go_on = threading.Event()
    ahead = Prefetcher(lambda step: step == 1 or go_on.wait(10), lag=1, last=3)
    ahead.start(0, ())
    ahead.next()
    assert ahead.finished_batches(0.1) == [True]
    assert capsys.readouterr().out.startswith("note: 1 of ")
    go_on.set()
    assert len(ahead.finished_batches()) == 2 and not capsys.readouterr().out


@pytest.mark.parametrize("lag", [0, 1])
def test_an_error_of_a_push_or_of_the_sampler_ends_the_run(lag):
    sampled = []
    for sample, push in ((sampled.append, lambda: 1 / 0), (lambda step: 1 / 0, dict)):
        ahead = Prefetcher(sample, lag=lag, last=9)
        ahead.submit(push)
        ahead.start(0, ())
        with pytest.raises(ZeroDivisionError):
            ahead.next()
    assert not sampled  # nothing is sampled after a failed push


def test_without_a_lag_the_caller_samples_when_the_pushes_are_done():
    done = []
    ahead = Prefetcher(lambda step: (step, threading.current_thread(), tuple(done)), lag=0, last=9)
    ahead.submit(lambda: time.sleep(0.2) or done.append("push"))
    ahead.start(0, ())
    assert ahead.next() == (1, threading.current_thread(), ("push",))


def test_two_threads_with_programs_that_may_wait_for_each_other_are_refused(monkeypatch, refused):
    def check(platform: str, size: int, lag: int, devices: int, processes: int) -> None:
        monkeypatch.setattr(fit.distributed, "count", lambda: processes)
        mesh = SimpleNamespace(size=size, devices=np.array([SimpleNamespace(platform=platform)] * size))
        choice, rollout = SimpleNamespace(in_trainer=True), SimpleNamespace(max_lag=lag)
        recipe = SimpleNamespace(chosen_engine=choice, sampler_devices=devices, rollout=rollout)
        fit.check_one_at_a_time(recipe, mesh)

    for allowed in (("tpu", 1, 1, 0, 1), ("tpu", 4, 0, 0, 1), ("cpu", 4, 1, 0, 1), ("tpu", 4, 1, 2, 1)):
        check(*allowed)
    check("tpu", 4, 0, 2, 2)
    for case in (("tpu", 4, 1, 0, 1), ("cpu", 4, 1, 0, 2), ("tpu", 4, 1, 2, 2)):
        with refused("config.rollout.max_lag = 1"):
            check(*case)


@pytest.mark.parametrize(("off_policy", "weight"), [(True, 2.0), (False, 1.0)])
def test_automatic_correction_weighs_what_older_weights_or_another_engine_drew(off_policy, weight):
    mask = np.ones((1, 1, 2), bool)
    correct = make_importance_weights(action="auto", off_policy=off_policy)
    used, _ = correct(jnp.zeros((1, 1, 2)), jnp.full((1, 1, 2), -3.0), mask)
    np.testing.assert_array_equal(used, weight)


@pytest.fixture(scope="module")
def params():
    model = hf.load_model(ARITHMETIC)
    return hf.load_params(ARITHMETIC, model, meshes.make_mesh(data=1, fsdp=2, tensor=2))


def test_weights_of_a_killed_run_are_removed_by_the_next_and_no_others(tmp_path):
    killed, foreign, alive, last = (tmp_path / f"jaxrl_llm-{name * 12}" for name in "abcd")
    killed.mkdir(mode=0o700)
    (killed / weights.LOCK).touch()  # the system has released it
    (killed / weights.WEIGHTS).touch()
    foreign.mkdir()
    (foreign / weights.WEIGHTS).touch()
    offers = [weights.WeightFile(folder, np.float32, DENSE) for folder in (alive, last)]
    assert set(tmp_path.iterdir()) == {alive, foreign, last}
    assert (foreign / weights.WEIGHTS).exists()
    for offer in offers:
        offer.close()
    assert set(tmp_path.iterdir()) == {foreign}


def test_weights_that_are_not_finite_or_cannot_be_written_are_not_offered(params, tmp_path, monkeypatch, refused):
    offer = weights.WeightFile(tmp_path / "offer", np.float32, DENSE)
    broken = params | {"norm": params["norm"] | {"scale": params["norm"]["scale"].at[3].set(np.nan)}}
    with refused("model.norm.weight"):
        offer.write(broken)
    with monkeypatch.context() as patch, refused("config.engine.weights_dir"):
        patch.setattr(weights.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        offer.write(params)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "write_stream", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(UserError, match=r"config\.engine\.weights_dir .* 28"):
            offer.write(params)
    offer.write(params)
    assert offer.source("server") == {"path": str(tmp_path / "offer" / weights.WEIGHTS)}
    shutil.rmtree(offer.folder)  # as by a program that empties /tmp
    with pytest.raises(UserError, match=r"config\.engine\.weights_dir .* 2\]"):
        offer.write(params)
    (tmp_path / "file").touch()
    with refused("config.engine.weights_dir"):
        weights.WeightFile(tmp_path / "file" / "offer", np.float32, DENSE)
    with refused("config.engine.push_address = '192.0.2.1'"):
        weights.WeightFile(tmp_path / "offer", np.float32, DENSE, address="192.0.2.1")


def test_weights_over_http_are_the_rounded_checkpoint_for_the_tokens_bearer(params, tmp_path):
    offer = weights.WeightFile(tmp_path / "offer", ml_dtypes.bfloat16, DENSE, address="127.0.0.1")
    offer.write(params)
    url, token = offer.source("server").values()

    def get(url: str, token: str) -> bytes:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()

    (tmp_path / "got").write_bytes(get(url, token))
    found, want = load_file(tmp_path / "got"), load_file(ARITHMETIC / "model.safetensors")
    assert set(found) == set(want)
    for name, tensor in want.items():
        np.testing.assert_array_equal(found[name], tensor.astype(ml_dtypes.bfloat16))
    for wrong in ((url, "x"), (url + "/../../etc/passwd", token), (url.replace("weights", ""), token)):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(*wrong)
    offer.close()
    assert not (tmp_path / "offer").exists()


class Server:
    """The in-JAX sampler in the place of servers: what it was pushed is what `meddle` makes of it."""

    def __init__(self, model: Decoder, mesh: jax.sharding.Mesh):
        self.sampler = Sampler(model, mesh, max_completion_tokens=tiny.C, stop_ids=(1,), pad_id=0)
        self.server_count, self.drawn_gap = 1, 0.0  # the latter of log-probabilities of what is not greedy

    def sample(self, *args, sampling: Sampling, **kwargs):
        rollouts = self.sampler.sample(*args, sampling=sampling, **kwargs)
        return replace(rollouts, logprobs=rollouts.logprobs + self.drawn_gap * bool(sampling.temperature))


def test_the_weight_check_tells_a_push_that_arrived_from_one_that_did_not(wording):
    mesh = meshes.make_mesh(data=2, fsdp=1, tensor=1)
    model, params = tiny.model_and_params()
    params = jax.device_put(params, sharding.shardings(params, mesh))
    nudge: Callable = lambda by, tree: jax.tree.map(lambda x: x * (1 + by), tree)  # noqa: E731
    server = Server(model, mesh)
    tokens, mask = tiny.prompts()
    collate = lambda numbers: Prompts(tokens[: len(numbers)], mask[: len(numbers)], [], numbers)  # noqa: E731
    check = WeightCheck(server, model, mesh, collate, rows=len(tokens), bound=1e-3)
    server.sampler.update_weights(params)
    assert check.check(check.ask(), params)["weight_check/gap"] < 1e-4
    learned = nudge(0.01, params)
    server.sampler.update_weights(learned)
    told = check.check(check.ask(), learned)
    assert told["weight_check/gap"] < 1e-4
    assert told.get("weight_check/gap_before", 1.0) > 1e-3
    server.sampler.update_weights(learned)
    assert 0 < check.check(check.ask(), learned)["weight_check/gap_before"] < 1e-4  # of answers that are the same
    for pushed in (learned, nudge(-0.5, params)):  # the weights before, and weights that are garbled
        server.sampler.update_weights(pushed)
        with pytest.raises(UserError, match=r"config\.engine\.max_gap") as error:
            check.check(check.ask(), nudge(0.01, learned))
        wording(re.sub(r"-?\d[\d.]*(e-\d+)?", "N", str(error.value)))
    server.sampler.update_weights(learned)
    server.drawn_gap = 0.01  # of tokens of which the model is not sure
    with pytest.raises(UserError, match=r"config\.engine\.max_gap"):
        check.check(check.ask(), learned)


def test_in_bfloat16_the_weight_check_bounds_greedy_tokens_and_the_mean(monkeypatch, wording):
    model = SimpleNamespace(cfg=SimpleNamespace(dtype="bfloat16"))
    mesh, shape = meshes.make_mesh(data=1, fsdp=1, tensor=1), (4, 5, 3)
    collate = lambda numbers: Prompts(np.ones((4, 2), np.int32), np.ones((4, 2), bool), [], numbers)  # noqa: E731
    monkeypatch.setattr(weight_check, "make_logprob_fn", lambda *_, **__: lambda params, batch: np.zeros(shape))
    check = WeightCheck(SimpleNamespace(server_count=1), model, mesh, collate, rows=4, bound=0.5)

    def answered(greedy: float, drawn: float, others: float = 0.0) -> Rollouts:
        logprobs = np.full(shape, others, np.float32)
        logprobs[0, 0, 0], logprobs[0, 1, 0] = greedy, drawn
        ones = np.ones(shape, bool)
        return Rollouts(np.ones(shape, np.int32), ones, ones, logprobs, ones[..., 0], np.ones(shape, np.int32))

    assert check.check(answered(-0.4, -1.5), {})["weight_check/gap"] == 1.5  # a rare token
    wrong = [(0.5, answered(x, 0.0)) for x in (-0.6, np.nan)] + [(0.5, answered(0.0, 0.0, others=-0.1))]
    for check._bound, sampled in [*wrong, (1e-3, answered(-0.0072, 0.0))]:
        with pytest.raises(UserError, match=r"config\.engine\.max_gap") as error:
            check.check(sampled, {})
        wording(str(error.value))


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_the_weight_check_asks_the_same_rows_again_where_the_data_set_has_few(rows: int):
    asked: list[int] = []
    model, mesh = SimpleNamespace(cfg=SimpleNamespace(dtype="float32")), meshes.make_mesh(data=2, fsdp=2, tensor=1)
    WeightCheck(SimpleNamespace(server_count=1), model, mesh, asked.extend, rows=rows, bound=1e-3)
    assert len(asked) == 4
    assert set(asked) == set(range(min(rows, 4)))


def test_a_push_says_by_name_that_the_servers_caches_are_dropped():
    asked = []
    weights.pull(lambda path, body=None: asked.append(path), {}, "tag")
    assert asked[0].partition("?")[0] == "/pause"
    assert set(asked[0].partition("?")[2].split("&")) == {"mode=keep", "clear_cache=true"}
    assert asked[-1] == "/resume"


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def of_another(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)


def linked(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("make", [open_to_all, of_another, linked])
def test_a_weights_folder_that_others_may_write_into_is_refused(make: Callable, tmp_path: Path):
    folder = tmp_path / f"{weights.FOLDER}{'a' * 12}"
    make(folder)
    with pytest.raises(UserError, match=r"config\.engine\.weights_dir"):
        weights.WeightFile(folder, np.float32, DENSE)
    for name in (weights.LOCK, weights.WEIGHTS) if make is not linked else ():
        (folder / name).touch()
    weights.WeightFile(tmp_path / f"{weights.FOLDER}{'b' * 12}", np.float32, DENSE).close()
    assert len(list(folder.iterdir())) == 2 * (make is not linked)  # what others left is not touched
