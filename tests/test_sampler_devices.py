"""A sampler with devices of its own: the numbers of a shared mesh, while the others learn."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny
from test_steps import numbers
from test_steps import tiny as tiny_config

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import sharding
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.structs import Prompts, Rollouts
from jaxrl_llm.train import steps

LIMITS = dict(max_completion_tokens=12, stop_ids=(3, 4), pad_id=0)


def sampled(mesh: jax.sharding.Mesh, trainer: jax.sharding.Mesh) -> Rollouts:
    """Completions with weights that were pushed from the mesh of the trainer."""
    _, params = tiny.model_and_params()
    engine = Sampler(Decoder(tiny.CONFIG), mesh, trainer=trainer, **LIMITS)
    engine.update_weights(jax.device_put(params, sharding.shardings(params, trainer)))
    engine.release()
    if trainer is mesh:
        engine.update_weights(jax.device_put(params, sharding.shardings(params, trainer)))
    prompts = Prompts(*tiny.prompts(), [], np.arange(tiny.B))
    return engine.sample(prompts, jax.random.key(0), group_size=tiny.G, sampling=Sampling())


@pytest.mark.parametrize("tensor", [1, 2])
def test_completions_of_four_devices_beside_four_that_learn_are_those_of_a_shared_mesh(tensor: int):
    sizes = dict(data=1, fsdp=-1, tensor=tensor)
    trainer, mesh = sharding.meshes_over(jax.devices(), sizes, 4)
    assert not {*trainer.devices.flat} & {*mesh.devices.flat}
    assert dict(mesh.shape) == dict(data=4 // tensor, fsdp=1, tensor=tensor)
    shared = sharding.mesh_over(jax.devices()[:4], **sizes)
    jax.tree.map(np.testing.assert_array_equal, sampled(mesh, trainer), sampled(shared, shared))
