#!/usr/bin/env bash
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/library.sh"

usage() {
  cat <<'END'
Train on one Google Cloud TPU VM, with rollouts from a vLLM server on a GPU VM beside it (docs/vllm.md).

  launch/tpu_vm_vllm.sh --name NAME --zone ZONE --model DIR [options] [options of tpu_vm.sh] [-- trainer arguments]

  --name NAME           name of the TPU VM; the GPU VM is NAME-vllm
  --zone ZONE           zone of the TPU VM, e.g. us-central1-a
  --model DIR           model of the run: a hub id, or a folder of the checkout
  --dtype DTYPE         model.dtype of the run [float32, as in configs/grpo_vllm.py]
  --max-model-len N     limit of prompt and completion together, in tokens [the model's]
  --gpu-zone ZONE       zone of the GPU VM [--zone]
  --machine TYPE        machine type with GPUs [g2-standard-8]
  --image PROJECT/NAME  image family with NVIDIA's driver and Python 3.11 or newer
                        [ubuntu-os-accelerator-images/ubuntu-accelerator-2404-amd64-with-nvidia-580]
  --project ID          Google Cloud project [gcloud's own]
  --delete              delete both VMs once the run has ended and its work directory is copied
  --dry-run             print the commands of a first launch, one per line, and run nothing

This command makes or reuses both VMs, installs and starts the server, and waits until it answers. It then runs
launch/tpu_vm.sh, whose --help describes its other options, preemption, and how to stop a run. The config must be one
for vLLM [--config configs/grpo_vllm.py]; this command sets engine.managed, servers, push and push_address. If a VM was
preempted, repeat the command to continue. The exit status is that of tpu_vm.sh.

The server listens at the internal address of its VM, port 8000. Anyone who reaches this port can replace the server's
weights, so the network must admit only your machines there. Google's default network admits only its own machines.
A run on several hosts (launch/tpu_pod.sh) cannot use the server: each of its processes needs a server of its own.
END
}

name='' zone='' model='' dtype=float32 max_model_len='' gpu_zone='' machine=g2-standard-8 project='' delete=''
dry_run='' image=ubuntu-os-accelerator-images/ubuntu-accelerator-2404-amd64-with-nvidia-580
own=() # options of tpu_vm.sh
unknown_option() { own+=("$1"); }
options="--name --zone --project --model --dtype --max-model-len --gpu-zone --machine --image"
read_options "$options" "--delete --dry-run" "$@"
shift "$words_read"
own=(${name:+--name "$name"} ${zone:+--zone "$zone"} ${project:+--project "$project"} ${own[@]+"${own[@]}"}
  ${delete:+--delete})
[ "$model" ] || die "--model is missing: give the model of the run, e.g. --model jaxrl_llm/assets/arithmetic"
case $image in */*) ;; *) die "--image '$image' is not PROJECT/FAMILY" ;; esac
[ $# -gt 0 ] || set -- --config configs/grpo_vllm.py
check_config "$@"
cd "$root"

compute() { quote gcloud --quiet compute "$@" --zone="${gpu_zone:-$zone}" ${project:+--project="$project"}; }
gpu() { remote "$(compute ssh "$name-vllm")" "$1"; }
# tpu_vm.sh knows how to describe, make and delete its VM.
plan=$(launch/tpu_vm.sh ${own[@]+"${own[@]}"} --delete --dry-run) || exit
vm() { printf '%s\n' "$plan" | grep -m 1 -- "tpus tpu-vm $1 "; }
vm_describe=$(vm describe) vm_create=$(vm create) vm_remove=$(vm delete)
serve=$(quote launch/vllm_gpu.sh --model "$model" --dtype "$dtype" ${max_model_len:+--max-model-len "$max_model_len"})

describe=$(compute instances describe "$name-vllm" --format='value(status)')
create=$(compute instances create "$name-vllm" --machine-type="$machine" --image-project="${image%%/*}" \
  --image-family="${image#*/}" --maintenance-policy=TERMINATE --boot-disk-size=200GB)
start=$(compute instances start "$name-vllm")
remove=$(compute instances delete "$name-vllm")
boot="for try in 1 2 3 4 5 6 7 8 9; do $(gpu true) && break; sleep 10; done"
probe=$(gpu "flock -n launch.lock echo idle || echo busy")
copy="($pack_checkout \$(git write-tree)) | $(gpu "tar -xf - && { python3 -c \"import ensurepip\" || \
{ sudo apt-get -qq update && sudo apt-get -qq -y install python3-venv; }; }")"
here="\$(hostname -I | cut -d \" \" -f 1)" # the internal address
serve=$(gpu "exec 9> launch.lock && { flock -n 9 || exit 0; } && \
{ (trap \"\" HUP; exec $serve --host $here --port 8000 --public) >> launch.log 2>&1 < /dev/null & }")
wait=$(gpu "until curl -fs http://$here:8000/health; do if flock -n launch.lock true; then tail -n 20 launch.log; \
exit 1; fi; sleep 5; done")
# The server belongs to one run, and a run on a new TPU VM counts as another one.
free=$(gpu "curl -fs http://$here:8000/update_weight_version -H \"content-type: application/json\" \
-d \"{\\\"new_version\\\": \\\"default\\\"}\"")
addresses="server=\$($(compute instances describe "$name-vllm" --format='value(networkInterfaces[0].networkIP)')) && \
trainer=\$($(quote gcloud --quiet compute tpus tpu-vm describe "$name" --zone="$zone" ${project:+--project="$project"} \
  --format='value(networkEndpoints[0].ipAddress)'))"
train="$(quote launch/tpu_vm.sh ${own[@]+"${own[@]}"} -- "$@" --config.engine.managed=false --config.engine.push=http) \
--config.engine.servers=http://\$server:8000 --config.engine.push_address=\$trainer"

begin_launch "$describe" "$create" "$boot" "$probe" "$copy" "$serve" "$wait" "$vm_describe" \
  "$vm_create" "$free" "$addresses" "$train" "${delete:+$remove}"
state=$(eval "$describe" 2> /dev/null || true)
case $state in
  RUNNING) ;;
  '') request "$create" || lost "$name-vllm could not be made" ;;
  TERMINATED) eval "$start" || lost "$name-vllm could not be started" ;;
  *) lost "$name-vllm is $state: wait until it is RUNNING, or delete it" ;;
esac
eval "$boot"
found=$(eval "$probe") || lost "$name-vllm does not answer"
if [ "$found" != busy ]; then eval "$copy && $serve" || lost "$name-vllm could not be set up"; fi
eval "$wait" || lost "vLLM did not start on $name-vllm"

state=$(eval "$vm_describe" 2> /dev/null || true)
case $state in
  '' | PREEMPTED | TERMINATED)
    if [ "$state" ]; then eval "$vm_remove"; fi
    request "$vm_create" || lost "$name could not be made"
    eval "$free" || lost "the server on $name-vllm cannot be freed for the run" ;;
esac
eval "$addresses" || lost "the addresses of the VMs are not known"
status=0
eval "$train" || status=$?
if [ "$delete" ]; then case $status in 75 | 130) ;; *) eval "$remove" ;; esac; fi
exit "$status"
