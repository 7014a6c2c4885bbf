"""How many programs a run compiles, and where they are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jaxrl_llm.machine.compilation import Compilations


def test_determinism_is_a_flag_that_xla_knows_and_has_before_it_finds_its_devices():
    code = """if True:
        import os
        os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=false"
        import jax
        from jaxrl_llm.machine.compilation import compute_deterministically
        compute_deterministically()
        print(jax.numpy.ones(2) + 1, os.environ["XLA_FLAGS"])  # XLA ends a process that gives it an unknown flag
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[2. 2.] --xla_cpu_enable_fast_math=false --xla_gpu_deterministic_ops=true\n", done.stderr


def test_programs_of_the_cache_and_compiled_ones_are_told_apart():
    compilations = Compilations()
    compilations.close()
    compilations.programs.update(update=3, decode=16)
    compilations.from_cache, compilations.seconds = 12, 29.4
    assert str(compilations) == "19 programs: 12 from the cache, 7 compiled in 29 s"
    compilations.in_background = 3.7
    assert str(compilations).endswith("7 compiled in 29 s and 4 s in the background")


def test_compiled_programs_are_kept_in_the_users_cache_folder_unless_told_otherwise(tmp_path):
    code = """if True:
        import jax
        from jaxrl_llm.machine.compilation import keep_compilations
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
