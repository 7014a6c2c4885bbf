"""A sampler with devices of its own: the numbers are those of a shared mesh."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from test_episodes import RESAMPLED, config_with_turns, run_records
from test_steps import tiny as small_config

from jaxrl_llm.machine import meshes
from jaxrl_llm.rollout.actor import Actor
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.structs import Prompts
from jaxrl_llm.train import steps


@pytest.mark.slow
def test_a_lag_on_four_and_four_devices_has_the_numbers_of_one_mesh(tmp_path, capfd):
    """In episodes, with groups that are replaced while others learn, and after a resume."""
    changes = RESAMPLED | {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.data": 1, "num_steps": 4, "eval": None, "kl": None}
    changes |= {"checkpoint.keep_best": 0, "data.curriculum.skip": 0.9}
    changes |= {"prompts_per_step": 4, "prompts_per_update": 4, "group_size": 2}  # few programs
    shared = run_records(config_with_turns(**changes), tmp_path / "shared")
    apart = run_records(config_with_turns(**changes, **{"engine.devices": 4}), tmp_path / "apart", stop=1)
    assert apart == shared
    last = shared[-1]
    assert last["rollout/lag"] == 1 and last["groups/no_signal_sampled"] > 0 and last["episode/turns"] > 1
    assert "data 2 x fsdp 1 x tensor 2" in capfd.readouterr().out
    models = [(tmp_path / name / "hf" / "model.safetensors").read_bytes() for name in ("shared", "apart")]
    assert models[0] == models[1]


def test_a_push_has_the_trainers_devices_and_a_sampling_thread_its_own():
    done: list[str] = []

    class Engine:
        def update_weights(self, params: Any, version: int) -> None:
            time.sleep(0.1)
            done.append(f"push {version}")

    def sample(key: jax.Array) -> Samples:
        done.append(f"on {[*key.devices()]}, {[*jax.random.split(key).devices()]}")
        return Samples(Prompts(*tiny.prompts(), [], np.arange(tiny.B)), *[None] * 2)

    own = jax.devices()[5]
    source = SimpleNamespace(
        prompts=SimpleNamespace(get_state=dict, set_state=id), sample=sample, apply_replacements=lambda x: x
    )
    with closing(Actor(Engine(), source, 0, lag=1, last=2, device=own)) as actor:
        actor.load(None)
        actor.start({}, {}, 0)
        assert done[0] == "push 0"
        actor.next()
        actor.push({}, {}, 1)
        assert done == ["push 0", *2 * [f"on {[own]}, {[own]}"], "push 1"]


class Chip:
    """A device of a process, which need not be here."""

    platform = device_kind = "gpu"

    def __init__(self, number: int, process: int):
        self.id, self.process_index = number, process


def test_each_process_gives_its_last_devices(refused):
    devices: Any = [Chip(i, i // 4) for i in range(8)]
    trainer, mesh = meshes.meshes_over(devices, 4, data=-1, fsdp=1, tensor=2)
    assert [d.id for d in trainer.devices.flat] == [0, 1, 4, 5]
    assert [d.id for d in mesh.devices.flat] == [2, 3, 6, 7] and mesh.shape["tensor"] == 2
    assert meshes.meshes_over(devices, 2, data=-1, fsdp=3, tensor=1)[1].shape["data"] == 2
    with refused("engine.devices = 3"):
        meshes.meshes_over(devices, 3, data=-1, fsdp=1, tensor=1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine.devices": -1}, "config.engine.devices"),
        ({"engine.devices": 8}, "config.engine.devices"),
        ({"engine.devices": 4, "mesh.fsdp": 8}, "config.engine.devices"),
        ({"engine.devices": 2, "mesh.data": 4, "mesh.fsdp": -1}, "devices = 2"),
        ({"engine.devices": 2, "mesh.fsdp": 6}, "config.prompts_per_update"),
    ],
    ids=["negative", "all", "too few for the mesh", "some left idle", "batch"],
)
def test_devices_are_refused_that_are_not_there_or_leave_no_mesh(changes, field, refused, tmp_path: Path):
    with refused(field):
        next(steps(small_config(**changes), tmp_path / "run"))
    assert not (tmp_path / "run").exists()
