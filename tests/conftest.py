"""Eight virtual CPU devices, no silent rank promotion, and compilations kept between runs."""

import gc
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from wording import Wording

FOLDER = Path(__file__).parent
CACHE = FOLDER.parent / ".pytest_cache" / "jax"
# A test may import from one of another room.
sys.path += sorted({str(file.parent) for file in FOLDER.glob("*/test_*.py")})
# Before imports of tests and fixtures of modules, which may add the folder of a config.
FOLDERS = list(sys.path)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))  # CI gives one for all stages
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XDG_CACHE_HOME"] = str(CACHE.parent)  # no file of a test in the cache of the user
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # each started process would compile 2,000 modules, for 6 seconds
    os.environ["PYTHONPYCACHEPREFIX"] = str(CACHE.parent / "bytecode")

for number in (signal.SIGINT, signal.SIGHUP):  # ignored in what nohup and a shell's & start, and in its children
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INSTALLED = set[str]()  # modules that `unchanged_process` leaves, because they are in a folder of sys.path
QUICK = (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
if version("jaxlib").startswith("0.10."):  # the older emitters of fusions compile twice as fast; later ones are gone
    QUICK += " --xla_cpu_use_fusion_emitters=false"


def pytest_addoption(parser):
    parser.addoption("--update-wording", action="store_true", help="write tests/wording.json anew; needs -n 0")


# The files that take longest begin first, so that no process is left with one of them at the end.
LONG = ("vllm", "published", "distributed", "vision", "lora", "translate", "sampler", "image_rollouts", "update")
LONG += ("plan", "experts", "episodes", "hf", "preferences", "self_test", "train", "errors", "partial")
LONG += ("drafts", "launch", "trees", "open_stream", "attacks", "evaluation", "vllm_engine", "code", "paged_attention")


def pytest_collection_modifyitems(config, items):
    if not hasattr(config, "workerinput"):
        return
    place = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_runtest_setup(item):
    """Skips a test whose marker `needs` names a package that is not installed."""
    needed = [name for mark in item.iter_markers("needs") for name in mark.args]
    if missing := [name for name in needed if find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: see the extras ci, parity and reasoning in pyproject.toml")


def pytest_configure(config):
    """Tests compile more than they compute: this process and those that it starts take XLA's quick compiler.

    Parity tests compile as a run does: they compare numbers, and the peers that they start have other versions of XLA.
    """
    from jaxrl_llm.machine import progress

    progress.LINE_DELAY = math.inf  # a busy machine must not add lines to what a test reads
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses")
    if runs_tests:
        gc.set_threshold(100_000)  # tracing makes many small objects that live on: 7 % less time for a short run
    if runs_tests and config.getoption("markexpr") != "parity":
        import jax

        os.environ["XLA_FLAGS"] += QUICK
        jax.devices()  # XLA reads its flags here, once


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores what programs that a test calls change: sys.path, sys.exit, signal handlers and imported modules."""
    handlers = {number: signal.getsignal(number) for number in STOPS}
    monkeypatch.setattr(sys, "path", list(FOLDERS))
    monkeypatch.setattr(sys, "exit", sys.exit)  # W&B puts its own function there
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    files = {name: getattr(sys.modules[name], "__file__", None) for name in sys.modules.keys() - INSTALLED}
    # Configs and rewards from another folder: the next test may have another file with the same name.
    own = {name for name, file in files.items() if file and "." not in name and _folder(file) not in FOLDERS}
    own -= {"__main__"}  # of `python -m pytest`
    for name, file in files.items():
        if name.partition(".")[0] in own:
            del sys.modules[name]
        elif file:
            INSTALLED.add(name)


def _folder(file: str) -> str:
    """Returns the folder in which a module or package was found."""
    path = Path(file)
    return str(path.parent.parent if path.stem == "__init__" else path.parent)


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A stand-in for Cloud Storage, which this process and those that it starts use. Its clients are made once."""
    from fake_bucket import enter, served

    with served(tmp_path_factory.mktemp("cloud") / "objects") as server:
        os.environ.update(server.environment())
        enter()
        yield server


@pytest.fixture
def cloud(bucket_server, tmp_path: Path) -> Iterator[Path]:
    """The folder of the objects of gs://bucket/NAME, where NAME is the name of this new folder."""
    folder = bucket_server.folder / "bucket" / tmp_path.name
    yield folder
    bucket_server.changes = lambda change: None


@pytest.fixture
def wording(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wording]:
    """Compares each text that it is called with to the one in tests/wording.json; those of default tests only.

    Whoever rewords a message runs the default tests and sees it there. In a slow test, CI would find it after an hour.
    """
    default = not any(request.node.get_closest_marker(name) for name in ("slow", "vllm", "parity"))
    update = request.config.getoption("--update-wording")
    of_test = Wording(f"{request.path.stem}::{request.node.name}", tmp_path, compared=default and not update)
    yield of_test
    if update:
        of_test.write(stored=default)


@pytest.fixture
def refused(wording: Wording) -> Callable[..., AbstractContextManager]:
    """Returns `refused(*words, error=UserError)`: its block must raise that error, in one line that has the words."""
    from jaxrl_llm.errors import UserError

    @contextmanager
    def refused(*words: str, error: type[Exception] = UserError):
        with pytest.raises(error) as caught:
            yield caught
        text = str(caught.value)
        assert [word for word in words if word not in text] == [], text
        wording(text)

    return refused
