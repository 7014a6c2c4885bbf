#!/usr/bin/env bash
# shellcheck disable=SC2034 # options are also read by their names
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/library.sh"

usage() {
  cat <<'END'
Train on a TPU slice of a GKE cluster, or on several, as a JobSet.

  launch/gke_jobset.sh --name NAME --image IMAGE --accelerator TYPE --topology 4x4 --nodes 4 --bucket BUCKET
                       [options] [-- trainer arguments]

  --name NAME             name of the JobSet, and of the work directory /runs/NAME
  --image IMAGE           image in a registry, built from the Dockerfile of the checkout with EXTRA=tpu
  --accelerator TYPE      cloud.google.com/gke-tpu-accelerator of the node pool, e.g. tpu-v5-lite-podslice or tpu7x
  --topology AxB          cloud.google.com/gke-tpu-topology of the node pool, e.g. 4x4
  --nodes N               number of hosts of the slice: 4x4 chips of v5e are 4 hosts
  --slices N              number of slices, each a node pool of several hosts, joined by a network. Only mesh.data may
                          use it: --config.mesh.data=N [1]
  --bucket BUCKET         Cloud Storage bucket to mount at /runs; launch/tpu_pod.sh --help says what it needs
  --pvc CLAIM             PersistentVolumeClaim to use instead of a bucket, such as Filestore; all pods must be able
                          to write to it (ReadWriteMany)
  --workdir DIR           work directory below /runs [/runs/NAME]
  --service-account NAME  Kubernetes service account of the pods; with --bucket it needs access to the bucket
  --env-file FILE         file of lines NAME=VALUE for the trainer, such as HF_TOKEN and WANDB_API_KEY; it becomes the
                          secret NAME-env
  --spot                  use spot nodes
  --restarts N            how many times a failed run is restarted in all [20]. Restarts after a preemption do not
                          count, nor after an abort or a kill 15 minutes or more after the start
  --grace SECONDS         time from SIGTERM to SIGKILL [300]. It must be longer than the rollout or the updates of a
                          step, and 30 s to save. Spot nodes give less time
  --dry-run               print the manifest, ready for kubectl apply -f -, and apply nothing

This command applies the manifest with kubectl [trainer arguments: --config configs/grpo.py]. The cluster needs GKE
1.30 and JobSet 0.10.1, or newer.
The log:      kubectl logs -f \
  -l jobset.sigs.k8s.io/jobset-name=NAME,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0
To stop it:   kubectl delete jobset NAME   All pods save. Repeat this command to resume.
END
}

name='' image='' accelerator='' topology='' nodes='' slices=1 bucket='' pvc='' workdir='' service_account='' env_file='' spot='' restarts=20
grace=300 dry_run=''
options="--name --image --accelerator --topology --nodes --slices --bucket --pvc --workdir --service-account --env-file --restarts --grace"
read_options "$options" "--spot --dry-run" "$@"
shift "$words_read"
for field in name image accelerator topology nodes; do
  [ "${!field}" ] || die "--$field is missing: --help has an example"
done
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
  die "--name '$name' is no name for Kubernetes: give at most 40 small letters, digits and -, e.g. --name grpo"
[[ $topology =~ ^[0-9]+(x[0-9]+)+$ ]] || die "--topology '$topology' is not like 4x4"
for field in nodes slices restarts grace; do
  [[ ${!field} =~ ^(0|[1-9][0-9]*)$ ]] || die "--$field '${!field}' is not a number"
done
[ "$slices" != 0 ] || die "--slices 0 is no slice: e.g. --slices 2"
all=$((${topology//x/ * }))
if [ "$nodes" = 0 ] || [ $((all % nodes)) != 0 ]; then
  die "--nodes $nodes cannot share the $all chips of --topology $topology evenly: give the slice's number of hosts"
fi
chips=$((all / nodes))
if [ "$slices" -gt 1 ] && [ "$nodes" = 1 ]; then
  die "--slices $slices needs slices of several hosts, because GKE joins no others: give a larger --topology"
fi
bucket=${bucket#gs://} bucket=${bucket%/}
case ${bucket:+b}${pvc:+p} in b | p) ;; *) die "the pods need one shared disk: give --bucket or --pvc" ;; esac
check_env_file "$env_file"
case ${workdir:=/runs/$name} in /runs/*) ;; *) die "--workdir '$workdir' is not below /runs, the shared disk" ;; esac
[ $# -gt 0 ] || set -- --config configs/grpo.py
check_words "$@"
check_slices "$slices" "$@"

# A JSON string is also a YAML string. Kubernetes would replace $(NAME) in an argument, and reads $$ as $.
json() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"} text=${text//$'\n'/\\n} text=${text//$'\t'/\\t} text=${text//\$/\$\$}
  printf '"%s"' "$text"
}
args=''
for word in --workdir "$workdir" --distributed auto "$@"; do args+="${args:+, }$(json "$word")"; done

template=$(dirname "${BASH_SOURCE[0]}")/gke_jobset.yaml
drop=()
[ "$slices" -gt 1 ] || drop+=(-e '/ #slices$/d')
[ "$spot" ] || drop+=(-e '/ #spot$/d')
[ "$bucket" ] || drop+=(-e '/ #bucket$/d')
[ "$pvc" ] || drop+=(-e '/ #pvc$/d')
[ "$env_file" ] || drop+=(-e '/ #env-file$/d')
[ "$service_account" ] || drop+=(-e '/ #service-account$/d')
text=$(sed -e 1,2d "${drop[@]}" -e 's/ #[a-z-]*$//' "$template")
for field in NAME RESTARTS SLICES NODES GRACE SERVICE_ACCOUNT ACCELERATOR TOPOLOGY IMAGE CHIPS PVC BUCKET ARGS; do
  value=$(printf %s "$field" | tr '[:upper:]' '[:lower:]')
  text=${text//@"$field"@/"${!value}"} # ARGS is the last: what a user writes is not filled in again
done

if [ "$dry_run" ]; then
  printf '%s\n' "$text"
  exit
fi
need kubectl https://kubernetes.io/docs/tasks/tools
if [ "$env_file" ]; then
  kubectl create secret generic "$name-env" --from-env-file="$env_file" --dry-run=client -o yaml | kubectl apply -f -
fi
printf '%s\n' "$text" | kubectl apply -f -
