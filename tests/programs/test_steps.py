"""Training in this process: the records, what a caller may change, and going back to a checkpoint while a run lives."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from tiny import SMALL

from jaxrl_llm.build import build
from jaxrl_llm.config import load as configs
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.learning import Learning
from jaxrl_llm.machine import keys
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.protocol import Engine, EngineChoice, EngineInputs
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.session import log
from jaxrl_llm.session.checkpoint import Checkpoints
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.structs import Prompts, Rollouts
from jaxrl_llm.train import steps, train

ROOT = Path(__file__).parents[2]


def tiny(**changes) -> ConfigDict:
    """configs/grpo.py, made small."""
    c = configs.load(ROOT / "configs" / "grpo.py")
    small = {
        "num_steps": 4, "prompts_per_step": 8, "prompts_per_update": 8, "group_size": 4, "optim.warmup_steps": 1,
        "optim.decay": "constant", "eval.every": 2, "eval.problems": 16, "checkpoint.every": 1, "checkpoint.keep": 9,
        "log.to": (), "log.completions_every": 0, "mesh.fsdp": 1, "rollout.max_completion_tokens": 6,
        "health.self_test": False, "model.path": str(SMALL),
    }  # fmt: skip
    c.update_from_flattened_dict(small | changes)
    return c


# A run without an evaluation and a KL penalty, which would be programs, and without processes that compute rewards.
SHORT = {"eval": None, "kl": None, "checkpoint.keep_best": 0, "reward.timeout": 0.0}


def numbers(records: list[dict]) -> list[dict]:
    """Without wall-clock time."""
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "tokens_per_second"} for r in records]


def written(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_steps_that_a_config_names_are_traced(tmp_path, capsys):
    list(steps(tiny(num_steps=3, **SHORT, **{"log.profile": "2:2"}), tmp_path / "run"))
    assert str(tmp_path / "run" / "profile") in capsys.readouterr().out
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    (perfetto,) = (tmp_path / "run" / "profile").rglob("perfetto_trace.json.gz")
    names = {event.name for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
             for line in plane.lines for event in line.events}  # fmt: skip
    assert any("update" in name for name in names)
    assert '"step' in gzip.decompress(perfetto.read_bytes()).decode()


OBSERVED = 2  # tokens that the environment appends


class Echo(Sampler):
    """The in-JAX sampler behind an environment that answers every completion with its own last two tokens."""

    def sample(self, prompts: Prompts, key, *, group_size, sampling, environments=None, **_) -> Rollouts:
        room = np.full((len(prompts.tokens), group_size), 6 - OBSERVED)
        made = super().sample(prompts, key, group_size=group_size, sampling=sampling, max_tokens=room)
        tokens, mask = np.array(made.completions), np.array(made.completion_mask)
        length = mask.sum(axis=-1, keepdims=True)
        at = np.arange(tokens.shape[-1])
        said = (at >= length) & (at < length + OBSERVED)
        tokens[said] = np.broadcast_to(np.take_along_axis(tokens, length - 1, axis=-1), tokens.shape)[said]
        return replace(made, completions=tokens, completion_mask=mask | said)


def echo() -> EngineChoice:
    def start(given: EngineInputs) -> Engine:
        limits = dict(max_completion_tokens=given.max_completion_tokens, stop_ids=given.stop_ids, pad_id=given.pad_id)
        return Echo(given.model, given.mesh, **limits)

    return EngineChoice(start, in_trainer=True)


def certain(logprobs, batch, entropy, ref_logprobs, *, width: float):
    """A loss with inputs of its own: the policy stays near the reference where it was certain."""
    pull = jax.numpy.where(entropy < width, (logprobs - ref_logprobs) ** 2, 0.0)
    return pull - batch.advantages * logprobs, {"certain/pull": pull, "certain/share": 1.0 * (entropy < width)}


def test_an_engine_and_a_loss_of_ones_own_train_and_logs_precede_a_save(tmp_path, monkeypatch):
    """The loss asks for columns by the names of its arguments, and the policy attends to the observations."""
    events: list[str] = []

    def note(owner: type, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **more: events.append(name) or method(*given, **more))

    for owner, name in ((Checkpoints, "save"), (Learning, "score"), (Samples, "rewards")):
        note(owner, name)
    monkeypatch.setattr(log.os, "fsync", lambda number: events.append(Path(f"/proc/self/fd/{number}").resolve().name))
    config = tiny(**SHORT | {"num_steps": 2, "log.completions_every": 1, "optim.warmup_steps": 0})
    config.checkpoint.every = 2
    config.engine = ConfigDict(dict(name="test_steps.echo"))
    config.loss = ConfigDict(dict(name="test_steps.certain", width=0.5))
    config.reward.update(functions=("test_rewards.unsure", "arithmetic.thought"), weights=(1.0, 0.0))
    first, last = steps(config, tmp_path / "run")
    assert OBSERVED + 1 < first["completion/length"] <= 6
    assert last["sampler/gap_max"] < 1e-4  # of what was sampled, which comes before what was said
    assert 0 < first["reward/no_verdict"] < 1
    assert first["grad_norm"] > 0 and first["test_rewards.unsure/asked"] == 32.0
    assert 0 < last["certain/share"] < 1
    assert 0 < last["certain/pull"] < last["kl/ref"] and "kl/coef" not in last
    line = json.loads((tmp_path / "run" / "completions.jsonl").read_text().splitlines()[0])
    odd = [len(text) % 2 == 1 for text in line["completions"]]
    assert [reward is None for reward in line["rewards"]] == odd
    assert {"metrics.jsonl", "completions.jsonl"} <= set(events[: events.index("save")])
    assert events.index("score") < events.index("rewards")  # the device works while the host waits for rewards
    assert "code of test_steps.echo" in SavedRun(tmp_path / "run").input_hashes(2)


@pytest.mark.slow
def test_a_reference_and_an_optimizer_in_the_hosts_memory_change_no_number(tmp_path):
    fields = {"prompts_per_update": 4, "eval": None, "mesh.fsdp": 4, "num_steps": 3, "schedule_steps": 3}
    fields |= {"kl.refresh.every": 2, "kl.refresh.mix": 0.5}
    away = fields | {"host_memory.reference": True, "host_memory.optimizer": True}
    whole = list(steps(tiny(**fields), tmp_path / "run"))
    list(steps(tiny(**away | {"num_steps": 2}), tmp_path / "away"))  # saves, and goes on from what it has saved
    with build(tiny(**away), tmp_path / "away") as (session, parts):
        resumed = list(train(session, parts))
        states = session.run_state.states
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(states["reference"])}
        moments = [x.sharding.memory_kind for x in jax.tree.leaves(states["policy"].opt_state) if x.ndim]
        assert kinds == set(moments) == {"pinned_host"}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(states["policy"].params)} == {"device"}
    assert numbers(resumed) == numbers(whole)[-1:]
    one, two = ((tmp_path / name / "hf" / "model.safetensors").read_bytes() for name in ("run", "away"))
    assert one == two


@pytest.mark.slow
def test_a_run_whose_workdir_vanishes_ends_and_goes_on_when_it_is_back(tmp_path):
    fields = SHORT | {"num_steps": 3, "schedule_steps": 3}

    def run() -> None:
        for record in steps(tiny(**fields), tmp_path / "run"):
            if record["step"] == 1:
                (tmp_path / "run").rename(tmp_path / "elsewhere")

    with pytest.raises(UserError, match="run "):  # it has vanished, or a save that was under way cannot be written
        run()
    shutil.rmtree(tmp_path / "run", ignore_errors=True)  # what a save that was under way has made again
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    (tmp_path / "run" / "lock").unlink()  # it went with the folder, and its owner, this process, has not ended
    assert [record["step"] for record in steps(tiny(**fields), tmp_path / "run")][-1] == 3


def test_a_key_is_that_of_the_seed_with_the_numbers_folded_in():
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 2**32 - 1), 7)
    expected = jax.random.key_data(key).tolist()
    assert jax.random.key_data(keys.derived(3, 2**32 - 1, 7)).tolist() == expected
    with jax.default_prng_impl("rbg"):  # as TPUs are often set
        assert jax.random.key_data(keys.derived(3, 2**32 - 1, 7)).tolist() == expected
