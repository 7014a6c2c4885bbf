"""How many programs a run compiles, and where they are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jaxrl_llm.machine.compilation import Compilations


def test_programs_of_the_cache_and_compiled_ones_are_told_apart():
    compilations = Compilations()
    compilations.close()
    compilations.programs.update(update=3, decode=16)
    compilations.from_cache, compilations.seconds = 12, 29.4
    assert str(compilations) == "19 programs: 12 from the cache, 7 compiled in 29 s"
    compilations.background_seconds = 3.7
    assert str(compilations).endswith("7 compiled in 29 s and 4 s in the background")


def test_programs_are_deterministic_and_kept_in_the_users_cache_folder(tmp_path):
    """XLA ends a process that gives it an unknown flag."""
    code = """if True:
        import os
        import jax
        from jaxrl_llm.machine.compilation import compute_deterministically, enable_compilation_cache
        compute_deterministically()
        print(enable_compilation_cache(), jax.numpy.ones(2) + 1, os.environ["XLA_FLAGS"])
    """
    base = {"PATH": "/usr/bin", "HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    base |= {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    base |= {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}

    def kept(**environ: str) -> str:
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, env=base | environ, capture_output=True, text=True, check=True)
        folder, others = done.stdout.strip().rsplit(" [", 1)
        assert others == "2. 2.] --xla_cpu_enable_fast_math=false --xla_gpu_deterministic_ops=true"
        return folder

    assert kept() == "~/.cache/jaxrl_llm/xla"
    assert list((tmp_path / ".cache" / "jaxrl_llm" / "xla").iterdir())
    assert kept(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "here")) == "~/here"
    assert list((tmp_path / "here").iterdir())
    (tmp_path / "file").write_text("")
    assert kept(XDG_CACHE_HOME=str(tmp_path / "file")).startswith("not kept: ~/file/jaxrl_llm/xla")
    assert kept(JAX_COMPILATION_CACHE_DIR="") == "off"
