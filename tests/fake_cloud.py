"""A checkout, and a cloud in a folder, in which the launch scripts run for real against stand-ins for other programs.

The fake `gcloud` keeps each machine in a folder, and runs each remote command there in a second shell, as ssh would. So
creating, copying, starting, following and fetching truly happen. Only uv, gcsfuse, curl, the vLLM server, the trainer
and the time that `sleep` takes are make-believe. A file in the folder of the cloud asks a stand-in for a fault.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
GPU, TPU = "10.0.0.5", "10.0.0.9"  # addresses
WORKERS = 2
ZONE = "us-central1-a"
OPTIONS = {
    "tpu_vm": ["--name", "tpu", "--zone", ZONE],
    "tpu_pod": ["--name", "tpu", "--zone", ZONE, "--type", "v5litepod-16", "--bucket", "b"],
    "tpu_vm_vllm": ["--name", "tpu", "--zone", ZONE, "--model", "org/model", "--dtype", "bfloat16"],
}

GCLOUD = r"""
printf -v call ' %q' "$@"
echo "gcloud$call" >> "$CLOUD/log"  # in one write: others read and write at the same time
worker='' node=''
for word; do case $word in
  --command=*) text=${word#--command=} ;;
  --worker=*) worker=${word#--worker=} ;;
  --node=*) node=${word#--node=} ;;
  *.tar) [ ! -e "$word" ] || source=$word ;;
  *.env) [ -e "$word" ] && source=$word || target=${word#*:} ;;
esac; done
need() { local state; read -r state < "$CLOUD/$1"; [ "$state" = "$2" ] || exit 255; }
copy() { cp "$source" "$CLOUD/w$1/${target:-launch.tar}"; }
remote() {
  # Worker 0 is the last of all to get a command: its run, which was started before, has ended already.
  if [ -e "$CLOUD/late" ] && [[ $worker$1$text = all0*launch.run* ]]; then
    until [ -s "$CLOUD/w0/jaxrl_llm/launch.exit" ]; do read -rt 0.02 <> "$CLOUD/pipe"; done; fi
  cd "$CLOUD/$2$1" || exit; export HOME=$PWD WORKER=$1; exec bash -c "$text"
}
# The workers of one slice are asked by its name, those of several by their request: each is a slice here.
case " $* " in
  *" queued-resources ssh "* | *" queued-resources scp "*)
    [ -e "$CLOUD/slices" ] && [ "$node" = "$worker" ] || exit 2 ;;
  *" tpu-vm ssh "* | *" tpu-vm scp "*) [ ! -e "$CLOUD/slices" ] && [ ! "$node" ] || exit 2 ;;
  *" --node-count=$WORKERS --node-prefix=tpu "*) touch "$CLOUD/slices" ;;
esac
all() { local pids=() status=0 pid; for ((i = 0; i < WORKERS; i++)); do ("$@" "$i" w) & pids+=($!); done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done; return $status; }
case " $* " in
  *networkIP*) echo "$GPU" ;;
  *networkEndpoints*) need state READY; echo "$TPU" ;;
  *" instances describe "*) cat "$CLOUD/gpu-state" ;;
  *" instances create "*) [ ! -e "$CLOUD/no-gpu" ] && mkdir "$CLOUD/gpu" && echo RUNNING > "$CLOUD/gpu-state" ;;
  *" instances start "*) echo RUNNING > "$CLOUD/gpu-state" ;;
  *" instances delete "*) rm -r "$CLOUD/gpu" "$CLOUD/gpu-state" ;;
  *" compute ssh "*) need gpu-state RUNNING; remote '' gpu ;;
  *" tpu-vm describe "*) cat "$CLOUD/state" ;;
  *" create "*) if [ -e "$CLOUD/refused" ]; then cat "$CLOUD/refused" >&2; exit 1; fi ;;&
  *" tpu-vm create "*) [ ! -e "$CLOUD/full" ] && mkdir "$CLOUD/w0" && echo READY > "$CLOUD/state" ;;
  *" queued-resources describe "*)
    [ ! -e "$CLOUD/next" ] || { head -n 1 "$CLOUD/next" > "$CLOUD/state"; sed -i 1d "$CLOUD/next"
      [ -s "$CLOUD/next" ] || rm "$CLOUD/next"; }
    cat "$CLOUD/state" ;;
  *" queued-resources create "*)
    [ ! -e "$CLOUD/full" ] || exit 1
    for ((i = 0; i < WORKERS; i++)); do mkdir "$CLOUD/w$i"; done
    echo ACTIVE > "$CLOUD/state" ;;
  *" tpu-vm delete "* | *" queued-resources delete "*) rm -r "$CLOUD"/w[0-9] "$CLOUD/state" ;;
  *" scp "*) all copy ;;
  *" ssh "*)
    if [ "$worker" ]; then need state ACTIVE; else need state READY; worker=0 WORKERS=1; fi
    # A connection breaks: while it brings the work directory back, while it sends it, which gcloud tries again though
    # its input is spent, and while it follows the log, once for each line of "breaks".
    if [ -e "$CLOUD/cut" ] && [[ $text == *"cp -al"* ]]; then (remote 0 w) | head -c 1500; exit 255; fi
    if [ -e "$CLOUD/retry" ] && [[ $text == *".part"* ]]; then cat > /dev/null; fi
    if [ -e "$CLOUD/breaks" ] && [[ $text == *"tail -n 200"* ]]; then
      if [ -s "$CLOUD/breaks" ]; then sed -i 1d "$CLOUD/breaks"; exit 255; else rm "$CLOUD/breaks"; fi; fi
    if [ "$worker" = all ]; then all remote; else remote "$worker" w; fi ;;
  *) exit 1 ;;
esac
"""

# One process of a run, which counts its starts and steps. It lasts while $CLOUD/hold exists, or until a SIGTERM to any
# process of its start. It ends with the word of $CLOUD/statuses that belongs to its start.
TRAINER = r"""
shift 2 # -m jaxrl_llm.train
work=$2 finished=0
pause() { read -rt 0.02 <> "$CLOUD/pipe"; [ "$SECONDS" -lt 120 ] || exit 99; }
echo "$$" >> "$CLOUD/starts$WORKER"
mapfile -t starts < "$CLOUD/starts$WORKER"
trap 'echo "${#starts[@]}" > "$CLOUD/stop"' TERM
mkdir -p "$work"
[ ! -e "$work/steps" ] || read -r finished < "$work/steps"
echo "worker $WORKER resuming at step $finished"
printf '%s\0' "$@" > "$work/argv$WORKER"
echo "${HF_TOKEN-}" > "$work/token$WORKER"
while [ -e "$CLOUD/hold" ] || [ -e "$CLOUD/breaks" ]; do
  if [ -s "$CLOUD/stop" ] && read -r stop < "$CLOUD/stop" && [ "$stop" = "${#starts[@]}" ]; then echo saved; exit; fi
  pause
done
for ((i = 0; i < WORKERS; i++)); do # as JAX waits for all processes
  until { mapfile -t other < "$CLOUD/starts$i"; } 2> /dev/null && [ ${#other[@]} -ge ${#starts[@]} ]; do pause; done
done
[ ! -e "$CLOUD/statuses" ] || read -ra statuses < "$CLOUD/statuses"
status=${statuses[${#starts[@]} - 1]:-0}
if [ "$WORKER$status" = 00 ]; then echo $((finished + 1)) > "$work/steps"; echo "done: the trained model"; fi
if [ -e "$CLOUD/linger" ] && [ "$WORKER${#starts[@]}" = 11 ]; then # until the next launch installs, and longer
  until [ "$(grep -c constraints.txt "$CLOUD/log")" = 2 ]; do pause; done
  command -p sleep 0.3
fi
exit "$status"
"""

SERVER = r"""
echo "$*" >> "$CLOUD/served"
[ ! -e "$CLOUD/broken" ] || { echo "CUDA is missing"; exit 1; }
touch "$CLOUD/answers"
until [ -e "$CLOUD/over" ] || [ ! -d "$CLOUD/gpu" ]; do read -rt 0.02 <> "$CLOUD/pipe"; done
"""

PROGRAMS = {
    "gcloud": GCLOUD,
    "trainer": TRAINER,
    "uv": 'echo "$*" >> uv.log; [ "$1" != venv ] || install -D "$CLOUD/bin/trainer" .venv/bin/python',
    # The bucket is a folder that all workers see.
    "gcsfuse": 'echo "$*" >> "$CLOUD/mounts"; mount=${*: -1}; rmdir "$mount" && ln -s "$CLOUD/bucket" "$mount"',
    "ssh-add": '[ -e "$CLOUD/agent" ] && cat "$CLOUD/agent"',
    "ssh-keygen": 'echo "256 SHA256:mine a@b (RSA)"',
    "mountpoint": '[ -L "$2" ]',
    "curl": 'echo "$*" >> "$CLOUD/curl"; case "$*" in */health) [ -e "$CLOUD/answers" ] ;; esac',
    "hostname": f'echo "{GPU} 172.17.0.1 "',
    "sleep": 'case $1 in 0.2) pause=0.05 ;; *) pause=0.01 ;; esac; read -rt $pause <> "$CLOUD/pipe"; true',
    "tail": f'case " $* " in *" -s "*) set -- "$@" -s 0.02 ;; esac; exec {shutil.which("tail")} "$@"',
}


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)


def until(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Desk:
    """A checkout with the launch scripts, a cloud without machines, and what asks both."""

    def __init__(self, root: Path):
        # A path may well have a blank.
        self.checkout, self.cloud = root / "my checkout", root / "cloud"
        self.bin, self.bucket, self.fetched = self.cloud / "bin", self.cloud / "bucket", self.checkout / "runs" / "tpu"
        for folder in (self.checkout / "jaxrl_llm", self.checkout / "configs", self.bin, self.bucket):
            folder.mkdir(parents=True)
        shutil.copytree(LAUNCH, self.checkout / "launch")
        executable(self.checkout / "launch" / "vllm_gpu.sh", SERVER)
        for file in (self.checkout / "configs" / "grpo.py", self.checkout / "pyproject.toml"):
            file.touch()
        (self.checkout / ".gitignore").write_text("runs/\n.venv/\n")
        subprocess.run(["git", "init", "-q", "--template=", self.checkout], check=True)
        (root / ".ssh").mkdir()
        (root / ".ssh" / "google_compute_engine.pub").touch()
        os.mkfifo(self.cloud / "pipe")
        for name, text in PROGRAMS.items():
            executable(self.bin / name, text)
        self.remote = self.cloud / "w0" / "jaxrl_llm" / "runs" / "tpu"
        names = {"CLOUD": self.cloud, "HOME": root, "GPU": GPU, "TPU": TPU, "WORKERS": WORKERS}
        self.env = {name: str(value) for name, value in names.items()} | {"PATH": f"{self.bin}:{os.environ['PATH']}"}

    def start(self, command, **env: str) -> subprocess.Popen:
        # Output goes to a file: what outlives the command (as a remote log reader may) holds no pipe open.
        out = self.cloud / f"out{len(list(self.cloud.glob('out*')))}"
        with out.open("w") as sink:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, cwd=self.cloud,
                env=self.env | env,
            )  # fmt: skip
        process.out = out
        return process

    def run(self, *command, **env: str) -> tuple[int, str]:
        process = self.start(command, **env)
        return process.wait(120), process.out.read_text()

    def words(self, script: str, *options: str, trainer=()) -> list:
        return [self.checkout / "launch" / f"{script}.sh", *OPTIONS[script], *options, "--", *trainer]

    def launch(self, script: str, *options: str, trainer=(), **env: str) -> tuple[int, str]:
        return self.run(*self.words(script, *options, trainer=trainer), **env)

    def plan(self, script: str, *options: str, trainer=()) -> list[str]:
        """The lines of a dry run."""
        status, out = self.launch(script, *options, "--dry-run", trainer=trainer)
        assert status == 0, out
        return out.splitlines()

    def follow(self, script: str, *options: str) -> subprocess.Popen:
        """A launch whose run lasts, once all its processes train."""
        self.ask("hold")
        process = self.start(self.words(script, *options))
        until(lambda: "worker 0 resuming" in process.out.read_text())
        until(lambda: len(list(self.workdir(script).glob("argv*"))) == (WORKERS if script == "tpu_pod" else 1))
        return process

    def workdir(self, script: str) -> Path:
        return self.bucket / "tpu" if script == "tpu_pod" else self.remote

    def argv(self, folder: Path) -> list[list[str]]:
        """The arguments of each process of a run."""
        return [file.read_text().split("\0")[:-1] for file in sorted(folder.glob("argv*"))]

    def ask(self, fault: str, text: str = "") -> None:
        (self.cloud / fault).write_text(text)

    def lines(self, name: str) -> list[str]:
        path = self.cloud / name
        return path.read_text().splitlines() if path.exists() else []

    def asked(self) -> str:
        """What was asked of gcloud for machines, such as "gpu-create create delete"."""
        found = (re.match(r"gcloud --quiet compute (\S+ )*?(create|start|delete) ", line) for line in self.lines("log"))
        return " ".join(("gpu-" if "instances" in match[0] else "") + match[2] for match in found if match)

    def starts(self) -> list[int]:
        """How often each process of the run was started."""
        return [len(file.read_text().split()) for file in sorted(self.cloud.glob("starts*"))]

    def kill(self) -> None:
        """Kills the processes of a run, as the end of their machines does."""
        for file in self.cloud.glob("starts*"):
            os.kill(int(file.read_text().split()[-1]), signal.SIGKILL)


@pytest.fixture(name="desk")
def make_desk(tmp_path):
    yield (desk := Desk(tmp_path))
    for name in ("hold", "breaks"):  # lets a detached trainer end
        (desk.cloud / name).unlink(missing_ok=True)
    desk.ask("over")  # and the server
