"""The pods of GKE, the jobs of Slurm and the image, run here against stand-ins for their clusters."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from fake_cloud import LAUNCH, executable, make_desk, until  # noqa: F401

JOBSET = ["--name", "grpo", "--image", "host/jaxrl_llm:1", "--accelerator", "tpu-v5-lite-podslice",
          "--topology", "4x4", "--nodes", "4"]  # fmt: skip
DISKS = (
    "--bucket gs://b/", "--pvc claim --spot",
    "--bucket b --service-account sa --spot --slices 2 -- --config c.py --config.mesh.data=2",
)  # fmt: skip


@cache
def manifest_text(options):
    return subprocess.check_output([LAUNCH / "gke_jobset.sh", *JOBSET, "--dry-run", *options], text=True)


def manifest(disk=DISKS[0], *options):
    return yaml.safe_load(manifest_text((*disk.split(), *options)))


def job_of(jobset):
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_of(jobset):
    return job_of(jobset)["template"]["spec"]


@pytest.mark.needs("kubeflow_trainer_api")
def test_the_manifest_is_a_jobset_as_its_published_schema_says():
    from kubeflow_trainer_api import models

    for jobset in map(manifest, DISKS):
        for port in pod_of(jobset)["containers"][0]["ports"]:
            port["protocol"] = "TCP"  # the schema's default
        # A field that the schema does not have is dropped here, and a wrong type or a missing field is an error.
        assert jobset == models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict()
        assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        actions = models.JobsetV1alpha2FailurePolicyRule.model_fields["action"].description
        assert all(rule["action"] in actions for rule in jobset["spec"]["failurePolicy"]["rules"])
    # The check finds an unknown field and a wrong type.
    pod_of(jobset)["restartPolicyy"] = "Never"
    assert jobset != models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict()
    pod_of(jobset)["terminationGracePeriodSeconds"] = "long"
    with pytest.raises(ValueError, match="terminationGracePeriodSeconds"):
        models.JobsetV1alpha2JobSet.from_dict(jobset)


def test_the_manifest_asks_for_the_whole_slice_and_the_shared_disk():
    bucket, pvc, both = map(manifest, DISKS)
    job, pod = job_of(bucket), pod_of(bucket)
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    assert job["completionMode"] == "Indexed"
    # A trainer that has saved, was aborted or was killed is restarted, and not counted.
    exits = {"containerName": "trainer", "operator": "In", "values": [2, 3, 75, 134, 137]}
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"] == exits
    # An error of the user and a stop by a health rule are final.
    final, preempted = bucket["spec"]["failurePolicy"]["rules"]
    assert (final["action"], preempted["action"]) == ("FailJobSet", "RestartJobSetAndIgnoreMaxRestarts")
    message = (
        "Container trainer for pod default/grpo-slice-0-1 failed with exit code {} matching FailJob rule at index 1"
    )
    (pattern,) = final["onJobFailureMessagePatterns"]
    ends = {code: bool(re.search(pattern, message.format(code))) for code in exits["values"]}
    assert ends == {2: True, 3: True, 75: False, 134: False, 137: False}
    kind = {"gke-tpu-accelerator": "tpu-v5-lite-podslice", "gke-tpu-topology": "4x4"}
    for jobset, selected in ((bucket, kind), (pvc, kind | {"gke-spot": "true"})):
        assert pod_of(jobset)["nodeSelector"] == {f"cloud.google.com/{key}": x for key, x in selected.items()}
    assert "tolerations" not in pod and pod_of(pvc)["tolerations"]
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "b"
    assert pod_of(pvc)["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "claim"}}]
    assert "metadata" not in job_of(pvc)["template"]
    assert pod_of(both)["serviceAccountName"] == "sa" and "serviceAccountName" not in pod


def test_jax_numbers_the_hosts_of_several_slices_by_the_variables_of_their_pods(monkeypatch):
    from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster

    monkeypatch.setattr(GkeTpuCluster, "wait_for_coordinator", lambda *_: None)
    one, several = manifest(DISKS[0]), manifest(DISKS[2])
    assert "env" not in pod_of(one)["containers"][0] and one["spec"]["replicatedJobs"][0]["replicas"] == 1
    slices, hosts = several["spec"]["replicatedJobs"][0]["replicas"], job_of(several)["completions"]
    found = []
    for slice_, host in itertools.product(range(slices), range(hosts)):
        labels = {"metadata.labels['jobset.sigs.k8s.io/job-index']": str(slice_)}  # as JobSet writes them
        # GKE gives a pod those of its slice.
        monkeypatch.setenv("TPU_WORKER_ID", str(host))
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", ",".join(f"grpo-slice-{slice_}-{i}.grpo" for i in range(hosts)))
        for entry in pod_of(several)["containers"][0]["env"]:
            value = entry.get("value") or labels[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            monkeypatch.setenv(entry["name"], value)
        found.append(GkeTpuCluster.get_process_id())
        assert GkeTpuCluster.get_process_count() == slices * hosts == 8
        assert GkeTpuCluster.get_coordinator_address(1, None) == "grpo-slice-0-0.grpo:8482"
    assert found == [*range(8)]


def test_a_pod_is_not_privileged_and_has_time_and_room_for_a_checkpoint():
    jobset = manifest()
    (container,) = pod_of(jobset)["containers"]
    profiles = {name: {"type": "Unconfined"} for name in ("seccompProfile", "appArmorProfile")}
    assert container["securityContext"] == {"runAsUser": 0, "capabilities": {"add": ["SYS_RESOURCE"]}} | profiles
    limits = {f"gke-gcsfuse/{name}-limit": "0" for name in ("ephemeral-storage", "memory", "cpu")}
    assert job_of(jobset)["template"]["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"} | limits
    signals = (LAUNCH.parent / "jaxrl_llm" / "session" / "signals.py").read_text()
    seconds = float(next(line for line in signals.splitlines() if line.startswith("PREEMPTION_SECONDS = ")).split()[2])
    assert pod_of(jobset)["terminationGracePeriodSeconds"] > 2 * seconds
    assert pod_of(manifest(DISKS[0], "--grace", "99"))["terminationGracePeriodSeconds"] == 99


def start_pod(folder, python, *options, **env):
    """Starts the command of a pod with a fake python, as Kubernetes does."""
    executable(folder / "python", python)
    container = pod_of(manifest(DISKS[0], *options))["containers"][0]
    words = [word.replace("$$", "$") for word in [*container["command"], *container["args"]]]
    path = f"{folder}:{os.environ['PATH']}"
    with (folder / "out").open("w") as out:
        return subprocess.Popen(words, env=os.environ | {"PATH": path} | env, stdout=out)


def test_every_character_of_a_trainer_argument_reaches_the_trainer_in_a_pod(tmp_path):
    hard = ["--config", "a (b).py", 'it\'s "$HOME" `id` $(HOME) \\ * ; & # ! @NAME@ $$', "two\nlines\t", "", "é"]
    assert start_pod(tmp_path, "printf '%s\\0' \"$@\"", "--", *hard).wait(120) == 0
    words = ["-m", "jaxrl_llm.train", "--workdir", "/runs/grpo", "--distributed", "auto", *hard]
    assert (tmp_path / "out").read_text().split("\0")[:-1] == words


@pytest.mark.parametrize(("of_trainer", "of_pod"), [(0, 75), (2, 2)])
def test_a_pod_that_kubernetes_ends_saves_and_asks_for_a_restart(tmp_path, of_trainer, of_pod):
    trainer = f"trap 'sleep 0.1; echo saved; exit {of_trainer}' TERM\necho trains\nwhile sleep 0.02; do :; done"
    pod = start_pod(tmp_path, trainer)
    until(lambda: (tmp_path / "out").read_text() == "trains\n")
    status = Path(f"/proc/{pod.pid}/status")
    until(lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) >> 14 & 1)  # the trap of the pod
    pod.terminate()
    assert pod.wait(120) == of_pod and (tmp_path / "out").read_text().endswith("saved\n")


@pytest.mark.parametrize(
    ("trainer", "settled", "status"),
    [("exit 0", 0, 0), ("exit 1", 0, 1), ("exit 2", 0, 2)]
    # An abort or a kill is restarted uncounted, but not soon after the start.
    + [(f"kill -{signal} $$", settled, status) for signal in (6, 9) for settled, status in ((0, 75), (900, 1))],
)
def test_a_pod_has_the_exit_status_of_its_trainer_or_75(tmp_path, trainer, settled, status):
    assert start_pod(tmp_path, trainer, SETTLED=str(settled)).wait(120) == status


def test_kubectl_gets_the_manifest_of_the_dry_run_and_a_file_as_a_secret(desk):
    kubectl = 'echo "$*" >> "$CLOUD/kubectl"; case "$1" in create) echo "kind: Secret" ;; *) cat ;; esac'
    executable(desk.bin / "kubectl", kubectl)
    command = [LAUNCH / "gke_jobset.sh", *JOBSET, *DISKS[0].split()]
    # `desk.run` gives no input: the manifest must come from the script.
    assert desk.run(*command) == (0, manifest_text(tuple(DISKS[0].split())))
    assert desk.lines("kubectl") == ["apply -f -"]
    file = desk.checkout / "mine.env"
    file.write_text("HF_TOKEN=hf_1\n")
    status, out = desk.run(*command, "--env-file", file)
    assert status == 0 and out.startswith("kind: Secret\n") and "hf_1" not in out
    (trainer,) = pod_of(yaml.safe_load(out.removeprefix("kind: Secret\n")))["containers"]
    assert trainer["envFrom"] == [{"secretRef": {"name": "grpo-env"}}]
    assert "envFrom" not in pod_of(manifest())["containers"][0]
    assert f"--from-env-file={file}" in (desk.cloud / "kubectl").read_text()


SLURM = LAUNCH / "slurm.sbatch"
# Runs two tasks, as srun on two hosts with one GPU each would.
SRUN = r"""
printf '%s\n' "$*" >> "$CLOUD/srun"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" & wait -n && wait -n
"""
TASK = r"""
[ "$SLURM_PROCID" = 0 ] || exit "$STATUS"
echo "step 1"
echo "    done: in a sample"
[ "$STATUS$LAST" != 0yes ] || echo "done: the trained model"
exit "$STATUS"
"""
JOBS = {  # exit status of the trainer, whether it did its last step, Requeue of the job; exit status, what was asked
    "the last step": (0, "yes", 1, 0, []),
    "saved before the last step": (0, "no", 1, 0, ["show job 7", "requeue 7"]),
    "stopped by its user": (0, "no", 0, 0, ["show job 7"]),
    "hung": (75, "no", 1, 0, ["show job 7", "requeue 7"]),
    "an error": (2, "no", 1, 2, []),
}


@pytest.mark.parametrize("end", JOBS)
def test_a_slurm_job_is_requeued_if_its_run_may_resume(desk, end, wording):
    status, last, requeue, ended, asked = JOBS[end]
    executable(desk.bin / "srun", SRUN)
    executable(desk.bin / "scontrol", 'echo "$*" >> "$CLOUD/scontrol"; echo "  Requeue=$REQUEUE Restarts=0"')
    (desk.checkout / ".venv" / "bin").mkdir(parents=True)
    executable(desk.checkout / ".venv" / "bin" / "python", TASK)
    spool = desk.cloud / "slurm_script"  # Slurm runs a copy
    spool.write_text(SLURM.read_text())
    job = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(desk.checkout)}
    words = ["--workdir", "runs/mine", "--config", "a b.py"]
    env = job | {"STATUS": str(status), "LAST": last, "REQUEUE": str(requeue)}
    code, out = desk.run("bash", spool, *words, **env)
    assert (code, desk.lines("scontrol")) == (ended, asked)
    assert out.startswith("step 1\n    done: in a sample\n") and ("done: the" in out) == (last == "yes")
    wording("\n".join(line for line in out.splitlines() if line.startswith("slurm.sbatch")))
    printed = subprocess.check_output([SLURM, "--dry-run", *words], text=True)
    assert desk.run("bash", "-c", f'srun() {{ echo "$@"; }}; {printed}')[1] == (desk.cloud / "srun").read_text()
    assert "-m jaxrl_llm.train --distributed auto --workdir runs/mine" in printed


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


def test_a_slurm_script_outside_of_a_job_exits_2(wording):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [SLURM, "--workdir", "w"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "") and "sbatch launch/slurm.sbatch" in done.stderr
    wording(done.stderr)


def test_the_image_gets_what_the_dockerfile_copies_and_nothing_else():
    root = LAUNCH.parent
    copied = {word for line in (root / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")
              for word in line.split()[1:-1]}  # fmt: skip
    kept = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {word.split("/")[0] for word in copied - {"min[e]"}} | {"mine"} == kept
    # A pattern, because a checkout need not have what is the user's.
    assert all((root / word).exists() for word in copied - {"min[e]"})
