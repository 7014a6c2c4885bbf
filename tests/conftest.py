"""Eight virtual CPU devices, no silent rank promotion, and compilations kept between runs."""

import os
import signal
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XDG_CACHE_HOME"] = str(CACHE.parent)  # no file of a test in the cache of the user

for number in (signal.SIGINT, signal.SIGHUP):  # ignored in what nohup and a shell's & start, and in its children
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_configure(config):
    """Before JAX has its devices. The default tests compile more than they compute: they take XLA's quick compiler.

    The others (slow, parity) compile as a run does.
    """
    if "not slow" in config.getoption("markexpr"):
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
