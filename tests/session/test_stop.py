"""Signals and the disk, each by itself: no model, no device."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict
from test_process import alive

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import disk
from jaxrl_llm.machine.compilation import Compilations
from jaxrl_llm.machine.meshes import make_mesh
from jaxrl_llm.session.checkpoint import MODELS, SAMPLES, SAVED, Checkpoints, has_checkpoint, kept_steps
from jaxrl_llm.session.checksums import checksums
from jaxrl_llm.session.signals import SaveOnInterrupt
from jaxrl_llm.structs import PartState

PROGRAM = """
import hashlib, multiprocessing, sys, time
from contextlib import ExitStack
from jaxrl_llm.session.signals import StopSignals

def long_call():  # releases the lock of the interpreter, and runs no signal handler
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

def say(text):
    print(text, flush=True)

def finish():
    say("finish")
    if "hangs" in sys.argv:
        long_call()

if __name__ == "__main__":
    if "child" in sys.argv:
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        child.start()
        say(child.pid)
    with ExitStack() as opened, StopSignals(opened) as stop:
        stop.finish = finish
        opened.callback(say, "closed last")
        opened.callback(say, "closed first")
        if "later" in sys.argv:
            with stop.deferred():
                say("ready")
                time.sleep(0.5)
                say("state changed")
                if "fails" in sys.argv:
                    raise ValueError("own error")
        else:
            say("ready")
        long_call()
"""


def start(tmp_path: Path, *words: str, before: str = "ready") -> subprocess.Popen[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, str(tmp_path / "program.py"), *words], start_new_session=True, **pipes)
    process.said = []  # type: ignore[attr-defined]
    while before not in process.said:  # type: ignore[attr-defined]
        line = process.stdout.readline()  # type: ignore[union-attr]
        assert line, process.communicate()[1]
        process.said.append(line.strip())  # type: ignore[attr-defined]
    return process


def end(process: subprocess.Popen[str], seconds: float = 5) -> tuple[int, list[str], str]:
    out, error = process.communicate(timeout=seconds)
    return process.returncode, out.splitlines(), error


@pytest.mark.parametrize(("words", "number", "code", "said"), [
    ((), signal.SIGHUP, 0, ["finish"]),  # in the middle of a long call
    (("later",), signal.SIGTERM, 0, ["state changed", "finish"]),
    (("later", "fails"), signal.SIGTERM, 1, ["state changed"]),  # nothing of a state that is half changed
])  # fmt: skip
def test_a_signal_ends_a_run_when_its_state_is_whole(tmp_path, words, number, code, said):
    process = start(tmp_path, *words)
    process.send_signal(number)
    ended, printed, error = end(process)
    assert (ended, printed) == (code, [*said, "closed first", "closed last"])
    assert "own error" in error if code else error == ""


def test_a_second_signal_ends_at_once_and_leaves_no_process(tmp_path):
    process = start(tmp_path, "hangs", "child")
    child = int(process.said[0])  # type: ignore[attr-defined]
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "finish\n"  # type: ignore[union-attr]
    process.send_signal(signal.SIGINT)
    code, said, error = end(process, 2)
    assert (code, error) == (128 + signal.SIGINT, "")
    assert "closed last" not in said
    time.sleep(0.2)
    assert not alive(child)


def test_a_signal_that_is_ignored_stays_ignored_as_nohup_wants_it(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = start(tmp_path)
    signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("error", "saves"), [
    (KeyboardInterrupt(), ["Ctrl-C"]),
    (ValueError(), ["ValueError"]),
    (SystemExit(3), ["SystemExit"]),
    (GeneratorExit(), ["the end of the caller's loop"]),
    (UserError("a rule stops the run"), []),
    (None, []),
])  # fmt: skip
def test_a_run_in_the_callers_process_saves_when_it_is_left_early_and_raises(error, saves):
    saved, stop = [], SaveOnInterrupt(signals=False)
    stop.finish = lambda: saved.append(stop.ending_text())
    with nullcontext() if error is None else pytest.raises(type(error)), stop:
        with stop.deferred():
            pass
        if error:
            raise error
    assert saved == saves


def test_nothing_is_saved_of_a_state_that_is_half_changed():
    saved, stop = [], SaveOnInterrupt(signals=False)
    stop.finish = lambda: saved.append(1)
    with pytest.raises(ValueError, match="own"), stop, stop.deferred():
        raise ValueError("own")
    assert not saved


@pytest.mark.parametrize(
    ("number", "signals", "later"),
    [(signal.SIGINT, False, False), (signal.SIGINT, False, True), (signal.SIGTERM, True, True),
     (signal.SIGHUP, True, False)],
)  # fmt: skip
def test_a_signal_is_an_exception_after_what_must_not_be_interrupted(number, signals, later):
    before, happened, stop = signal.getsignal(number), [], SaveOnInterrupt(signals)
    stop.finish = lambda: happened.append("saved")

    def change() -> None:
        with stop, stop.deferred() if later else nullcontext():
            signal.raise_signal(number)
            happened.append("state changed")

    with pytest.raises(KeyboardInterrupt):
        change()
    assert happened == ["state changed"] * later + ["saved"]
    assert signal.getsignal(number) is before


def test_a_run_in_another_thread_of_the_caller_leaves_signals_alone():
    def run() -> None:
        with SaveOnInterrupt(signals=True) as stop, stop.deferred():
            assert signal.getsignal(signal.SIGTERM) is before

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(run).result()


KEEP = ConfigDict(dict(every=1, keep=1, keep_best=1))
MESH = make_mesh(data=1, fsdp=1, tensor=1)
STATE = {"a": jnp.arange(2**20, dtype=jnp.float32) ** 0.5}


PARTS = {MODELS: PartState({}, STATE), SAMPLES: PartState({"positions": [{"next_index": 0}], "metrics": []}, [])}


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def full():
    """Makes every file stop at so many bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_for_ten_seconds(checkpoints: Checkpoints) -> None:
    """As at every step: it does not wait for the save."""
    for _ in range(100):
        checkpoints.check()
        time.sleep(0.1)


def test_a_failed_save_is_told_at_the_next_step_and_the_last_one_resumed(tmp_path, full, capfd, monkeypatch, refused):
    folder = tmp_path / "run" / "checkpoints"
    checkpoints = Checkpoints(folder, {}, KEEP, MESH)
    checkpoints.save(1, PARTS)
    checkpoints.wait()
    full(2**18)
    checkpoints.save(2, PARTS)
    with refused(str(tmp_path)):
        check_for_ten_seconds(checkpoints)
    full(resource.RLIM_INFINITY)
    checkpoints.close()
    assert capfd.readouterr().err == ""
    again = Checkpoints(folder, {}, KEEP, MESH)
    step, parts = again.resume(STATE)
    assert step == 1
    assert (parts[MODELS].arrays["a"] == STATE["a"]).all()
    again.save(2, PARTS)
    again.close()
    assert steps(folder) == ["2"]


def damage(folder: Path, how: str) -> None:
    """Changes 64 bytes in the middle of the arrays, or cuts a file of Orbax."""
    if how == "cut":
        (folder / "models" / "_METADATA").write_text("{")
        return
    largest = max(folder.rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    content = bytearray(largest.read_bytes())
    at = len(content) // 2
    content[at : at + 64] = bytes(255 - x for x in content[at : at + 64])
    largest.write_bytes(content)


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_checkpoint_whose_bytes_have_changed_is_refused_with_the_step_before(tmp_path, how, refused):
    folder = tmp_path / "run" / "checkpoints"
    with closing(Checkpoints(folder, {}, ConfigDict(dict(every=1, keep=2, keep_best=0)), MESH)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, PARTS)
    damage(folder / "2", how)
    with closing(Checkpoints(folder, {}, KEEP, MESH)) as checkpoints, refused(str(folder / "2"), "step 1"):
        checkpoints.resume(STATE)
    shutil.move(folder / "2", tmp_path)
    with closing(Checkpoints(folder, {}, KEEP, MESH)) as checkpoints:
        assert checkpoints.resume(STATE)[0] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "uint32"])
def test_the_checksum_of_an_array_is_of_its_bits_on_every_mesh(dtype):
    values = np.arange(-64, 64).reshape(16, 8).astype(jnp.dtype(dtype))
    expected = {"x/0": int(values.view(f"u{values.itemsize}").sum(dtype=np.uint32))}
    for sizes in (1, 1), (4, 2):
        mesh = make_mesh(data=1, fsdp=sizes[0], tensor=sizes[1])
        spread = jax.device_put(values, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
        assert checksums({"x": [spread]}) == checksums({"x": [values]}) == expected


def test_an_evaluation_is_saved_if_it_is_one_of_the_best_also_when_resumed(tmp_path):
    def make() -> Checkpoints:
        made = Checkpoints(tmp_path / "checkpoints", {}, ConfigDict(dict(every=1, keep=1, keep_best=2)), MESH)
        made.accuracies = {0: 0.8, 1: 0.5, 2: 0.7}  # there is no checkpoint of step 0
        return made

    checkpoints = make()
    assert checkpoints.is_best(0.0) and not checkpoints.is_best(None)
    for step in (1, 2):
        checkpoints.save(step, PARTS)
    checkpoints.close()
    again = make()
    for one in (checkpoints, again):
        assert [one.is_best(accuracy) for accuracy in (0.4, 0.5, 0.6, 0.8)] == [False, False, True, True]
    again.close()
    none = Checkpoints(tmp_path / "none", {}, ConfigDict(dict(every=1, keep=1, keep_best=0)), MESH)
    assert not none.is_best(1.0)
    none.close()


def test_the_best_checkpoint_stays_and_an_evaluation_after_the_last_save_counts(tmp_path):
    checkpoints, accuracies = Checkpoints(tmp_path, {}, KEEP, MESH), {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.9, 5: 1.0}
    for step in range(1, 6):
        checkpoints.accuracies = {s: x for s, x in accuracies.items() if s <= min(step, 4)}
        checkpoints.save(step, PARTS)
        checkpoints.wait()
        assert steps(tmp_path) == [str(s) for s in range(1, 6) if s == step or s == min(step, 2)]
    checkpoints.accuracies = accuracies
    checkpoints.tidy()
    checkpoints.close()
    assert steps(tmp_path) == ["5"]


def test_a_run_that_may_go_back_keeps_checkpoints_whose_ages_double():
    """Whatever the age that a rule asks for, there is a checkpoint of that age, and of no more than four times it."""
    settings, kept = ConfigDict(dict(every=5, keep=2, keep_best=0)), set[int]()
    for step in range(5, 2001, 5):
        kept = kept_steps([*sorted(kept), step], {}, settings, goes_back=True)
        ages = sorted(step - s for s in kept)
        assert len(kept) <= 2 + step.bit_length()
        assert all(any(age <= older <= max(4 * age, 10) for older in ages) for age in range(5, step // 4))
    assert kept_steps([*range(5, 2001, 5)], {}, settings, goes_back=False) == {1995, 2000}


def test_a_checkpoint_of_a_signal_changes_no_step_that_a_run_can_go_back_to(tmp_path):
    """The run without a signal saves at 2, 4, 6 and 8; the other one also at 3 and 7, and is resumed from there."""
    config = ConfigDict(dict(every=2, keep=3, keep_best=0))
    there: dict[str, list[list[int]]] = {}
    for name, saves in {"straight": [[2, 4, 6, 8]], "stopped": [[2, 3], [4, 6, 7], [8]]}.items():
        for of_part in saves:
            checkpoints = Checkpoints(tmp_path / name, {}, config, MESH)
            for step in of_part:
                checkpoints.save(step, PARTS)
                if step % 2 == 0:
                    there.setdefault(name, []).append(checkpoints.steps())
            # It is resumed from the newest, also if a signal made it.
            assert checkpoints.check_beginning({}) == (of_part[-1], [])
            checkpoints.close()
    assert there["stopped"] == there["straight"] == [[2], [2, 4], [2, 4, 6], [4, 6, 8]]
    assert steps(tmp_path / "stopped") == ["4", "6", "8"]


def test_a_step_is_deleted_again_while_its_first_files_still_go(tmp_path, monkeypatch):
    """After a rollback a run makes the same step again, perhaps before a slow disk has deleted the first one."""
    goes_on, remove = threading.Event(), shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: goes_on.wait(60) and remove(*args, **options))
    checkpoints = Checkpoints(tmp_path / "checkpoints", {}, KEEP, MESH)
    for step in (1, 2, 3):
        checkpoints.save(step, {MODELS: PartState({}, {"policy": jnp.ones(1)})})
        checkpoints.wait()
    checkpoints.go_back(0)
    for step in (1, 2, 3):
        checkpoints.save(step, {MODELS: PartState({}, {"policy": jnp.ones(1)})})
        checkpoints.wait()
    goes_on.set()
    checkpoints.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()] == ["3"]
    assert not (tmp_path / "checkpoints.deleted").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("victim", ["the newest, at a rollback", "an old one, after a save"])
def test_a_run_killed_while_it_deletes_a_checkpoint_never_resumes_half_of_it(tmp_path, monkeypatch, victim):
    folder = tmp_path / "checkpoints"
    keep, removed = 3 if "rollback" in victim else 1, list[Path]()
    checkpoints = Checkpoints(folder, {}, ConfigDict(dict(keep=keep, keep_best=0, every=1)), MESH)
    for step in (1, 2, 3):
        checkpoints.save(step, PARTS)
        checkpoints.wait()
        if step == 2:

            def cut_off(path: Path, *_: object, removed: list[Path] = removed, **__: object) -> None:
                removed.extend(sorted(Path(path).rglob("*.*"))[:2] + list(Path(path).glob("notes/*")))
                for file in removed:
                    file.unlink(missing_ok=True)
                raise SystemExit("killed")

            monkeypatch.setattr(shutil, "rmtree", cut_off)
    with suppress(SystemExit):
        if keep == 3:
            checkpoints.go_back(2)
        checkpoints.resume(STATE)
    end = time.monotonic() + 20
    while not removed and time.monotonic() < end:
        time.sleep(0.01)
    assert removed
    monkeypatch.undo()
    again = Checkpoints(folder, {}, ConfigDict(dict(keep=keep, keep_best=0, every=1)), MESH)
    for left in reversed(again.steps()):  # also the one that an evaluation, or a later rollback, takes
        again.go_back(left)
        again.resume(STATE)
    assert again.resume(STATE)[0] == {3: 1, 1: 3}[keep]
    again.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoints", SAVED]


def test_room_for_the_checkpoints_of_the_whole_run_is_asked_for(tmp_path, monkeypatch, refused):
    assert not has_checkpoint(tmp_path)
    checkpoints = Checkpoints(tmp_path, {}, ConfigDict(dict(every=2, keep=1, keep_best=1)), MESH)
    size = STATE["a"].nbytes

    def asks_for(count: int) -> None:
        monkeypatch.setattr(disk, "free", lambda folder: count * size)
        checkpoints.check_room(STATE, 6)
        monkeypatch.setattr(disk, "free", lambda folder: count * size - 1)
        with refused(f" {count} checkpoints "):
            checkpoints.check_room(STATE, 6)

    asks_for(4)
    for step, accuracy, there in ((2, 0.9, [2]), (4, 0.5, [2, 4]), (5, None, [2, 4, 5]), (6, None, [2, 6])):
        checkpoints.accuracies |= {} if accuracy is None else {step: accuracy}
        checkpoints.save(step, PARTS)
        checkpoints.wait()
        # A signal has made the one of step 5. It stays until that of step 6 is complete: then there are four.
        assert sorted(checkpoints._manager.all_steps()) == there
        asks_for(4 - len(there))
    checkpoints.close()
    assert has_checkpoint(tmp_path)


def test_a_save_of_small_arrays_on_several_devices_compiles_none_of_them(tmp_path):
    mesh = make_mesh(data=-1, fsdp=1, tensor=1)
    place = NamedSharding(mesh, PartitionSpec())
    arrays = {str(rows): jax.device_put(np.ones((8 * rows, 3), np.float32), place) for rows in range(1, 6)}
    with closing(Checkpoints(tmp_path / "checkpoints", {}, KEEP, mesh)) as checkpoints, closing(Compilations()) as made:
        checkpoints.save(1, {MODELS: PartState({}, arrays)})
        checkpoints.wait()
    assert made.programs.total() == 1, made.programs  # that of the checksums
