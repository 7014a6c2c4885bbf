"""How many programs a run compiles, and where they are kept."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from jaxrl_llm import sharding
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.compilation import Compilations
from jaxrl_llm.learner import forward
from jaxrl_llm.learner.packing import pack
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout import sampler as sampler_module
from jaxrl_llm.structs import Batch, Prompts

LIMIT = 32


@pytest.mark.slow
def test_fifty_ragged_steps_compile_few_programs_and_the_last_ten_almost_none(monkeypatch):
    monkeypatch.setattr(sampler_module, "FIRST_CACHE", 8)
    compilations, mesh = Compilations(), sharding.make_mesh(data=1, fsdp=1, tensor=1)
    model, params = Decoder(tiny.CONFIG, mesh), tiny.model_and_params()[1]
    sampler = sampler_module.Sampler(model, mesh, max_completion_tokens=LIMIT, stop_ids=(), pad_id=0)
    sampler.update_weights(params)
    score = forward.make_logprob_fn(model, Sampling(), mesh, 0)
    prompts = Prompts(*tiny.prompts(), [], np.arange(tiny.B))
    before_last_ten = 0
    for step in range(50):
        if step == 40:
            before_last_ten = compilations.programs.total()
        lengths = np.random.default_rng(step).lognormal(np.log(7), 0.7, (tiny.B, tiny.G)).astype(int)
        key = jax.random.fold_in(jax.random.key(0), step)
        budget = lengths.clip(1, LIMIT)
        rollouts = sampler.generate(prompts, key, group_size=tiny.G, sampling=Sampling(), max_tokens=budget)
        batch = Batch(prompts.tokens, prompts.mask, *dataclasses.astuple(rollouts)[:3])
        batch = dataclasses.replace(batch, packed_index=pack(rollouts.completion_mask.sum(axis=-1), LIMIT))
        score(params, sharding.shard_batch(batch, mesh))
    programs = compilations.programs
    assert programs["jit(start)"] == 1, programs
    assert 2 <= programs["jit(run)"] <= 14, programs  # of 6 widths x 3 caches
    assert 1 <= programs["jit(move_layer)"] <= 36, programs  # from any shape to any smaller one: a gather each
    assert 1 <= programs["jit(score)"] <= 6, programs
    assert programs.total() - before_last_ten <= 6, programs


def test_determinism_is_a_flag_that_xla_knows_and_has_before_it_finds_its_devices():
    code = """if True:
        import os
        os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=false"
        import jax
        from jaxrl_llm.compilation import compute_deterministically
        compute_deterministically()
        print(jax.numpy.ones(2) + 1, os.environ["XLA_FLAGS"])  # XLA ends a process that gives it an unknown flag
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[2. 2.] --xla_cpu_enable_fast_math=false --xla_gpu_deterministic_ops=true\n", done.stderr


def test_compiled_programs_are_kept_in_the_users_cache_folder_unless_told_otherwise(tmp_path):
    code = """if True:
        import jax
        from jaxrl_llm.compilation import keep_compilations
        print(keep_compilations())
        jax.jit(lambda x: x @ x)(jax.numpy.ones((2, 2)))
    """
    base = {"PATH": "/usr/bin", "HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    base |= {"PYTHONPATH": str(Path(__file__).parent.parent), "JAX_PLATFORMS": "cpu"}

    def said(**environ: str) -> str:
        run = [sys.executable, "-c", code]
        return subprocess.run(run, env=base | environ, capture_output=True, text=True, check=True).stdout.strip()

    assert said() == "~/.cache/jaxrl_llm/xla"
    assert list((tmp_path / ".cache" / "jaxrl_llm" / "xla").iterdir())
    assert said(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "here")) == "~/here"
    assert list((tmp_path / "here").iterdir())
    assert said(JAX_COMPILATION_CACHE_DIR="") == "off"
