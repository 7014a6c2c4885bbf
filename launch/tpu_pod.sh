#!/usr/bin/env bash
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/library.sh"

usage() {
  cat <<'END'
Train on a Google Cloud TPU slice of several hosts (v5litepod-16, v5litepod-256, v6e-16, ...), or on several slices.

  launch/tpu_pod.sh --name NAME --zone ZONE --type TYPE --bucket BUCKET [options] [-- trainer arguments]

  --name NAME      name of the slice, and of the queued resource that asks for it
  --zone ZONE      zone of Google Cloud, e.g. us-central1-a
  --type TYPE      accelerator type, e.g. v5litepod-16
  --slices N       number of slices, joined by a network. Only mesh.data may use it: --config.mesh.data=N [1]
  --version IMAGE  TPU runtime [the usual one for TYPE]
  --project ID     Google Cloud project [gcloud's own]
  --bucket BUCKET  Cloud Storage bucket that each worker mounts at ~/jaxrl_llm/runs, with gcsfuse
  --nfs HOST:/DIR  NFS share, such as Filestore, that each worker mounts there instead of a bucket
  --env-file FILE  file of lines NAME=VALUE for the trainer, such as HF_TOKEN and WANDB_API_KEY; a shell reads them
  --workdir DIR    work directory on all workers: absolute, or below ~/jaxrl_llm [runs/NAME]. Without --bucket
                   and --nfs it must be absolute, on a disk that the workers already share, or gs://BUCKET/DIR,
                   which the trainer writes itself
  --gcsfuse-sha256 SUM  with --bucket: SHA-256 of the gcsfuse package that a worker without gcsfuse installs;
                   without this option the package is not checked beyond HTTPS
  --spot           use a spot slice, which is cheap and may be preempted
  --restarts N     how many times in a row a failed run is restarted [3]
  --delete         delete the slice once the run has ended
  --dry-run        print the commands of a first launch, one per line, and run nothing

This command waits in the queue until the slice is there. It copies the checkout to all workers and installs it;
uncommitted work is copied too, ignored files are not. It starts the training detached on all workers [--config
configs/grpo.py], and follows the log of worker 0.

While this command runs, it handles three cases:
  preemption   The slice is deleted and requested again, any number of times. The run resumes from its last checkpoint.
  failed run   The run is restarted on its slice from its last checkpoint, at most --restarts times in a row. A failure
               after an hour of training counts as the first one.
  final error  A user error (exit status 2), a stop by a health rule (3), and a request that is refused for permissions
               or quota end the command.

Ctrl-C only stops following; the same command then follows or resumes the run. The exit status is that of worker 0. It
is 75 if no slice was available or the connection was lost. To repeat the command in these cases:
  until launch/tpu_pod.sh --spot ...; [ $? != 75 ]; do sleep 60; done

To stop a run, send SIGTERM to the trainer on any one worker. All workers then save and end with 0. This command ends
as well, after a minute in which it makes sure that the slice was not preempted:
  gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=0 --command='kill $(cat jaxrl_llm/launch.pid)'
To print the log of worker N:
  gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=N --command='cat jaxrl_llm/launch.log'
With --slices, write NAME-0, NAME-1 ... in these two commands; worker 0 is that of NAME-0.

A bucket needs a hierarchical namespace, because no checkpoint can be saved without renaming a folder. To make one:
  gcloud storage buckets create gs://BUCKET --location=REGION --uniform-bucket-level-access \
    --enable-hierarchical-namespace
A bucket has two limits that NFS does not have. It was not tried whether the lock of a work directory on a bucket stops
a run on another slice, so give each run its own --name or --workdir. And gcsfuse uploads a log file only when the run
closes it: a slice that is lost without warning loses the log lines since the start of its run, but no checkpoint.
END
}

name='' zone='' type='' slices=1 version='' project='' bucket='' gcsfuse_sha256='' nfs='' workdir='' spot='' env_file=''
restarts=3 delete='' dry_run=''
options="--name --zone --type --slices --version --project --bucket --gcsfuse-sha256 --nfs --workdir --restarts --env-file"
read_options "$options" "--spot --delete --dry-run" "$@"
shift "$words_read"
[ "$name" ] || die "--name is missing: name the slice, e.g. --name grpo"
[ "$zone" ] || die "--zone is missing: say where, e.g. --zone us-central1-a"
[ "$type" ] || die "--type is missing: say which slice, e.g. --type v5litepod-16"
case $slices in '' | 0* | *[!0-9]*) die "--slices '$slices' is not a number of slices: e.g. --slices 2" ;; esac
case $slices:${type##*-} in 1:[148]) die "--type '$type' is one host: take launch/tpu_vm.sh" ;; esac
case $restarts in *[!0-9]*) die "--restarts '$restarts' is not a number: e.g. --restarts 3" ;; esac
case "${bucket:+b}${nfs:+n}:$workdir" in
  bn:*) die "--bucket and --nfs are both given: give one" ;;
  :/* | :gs://* | [bn]: | [bn]:runs/*) ;;
  :*) die "the workers share no disk: give --bucket, --nfs, or a --workdir at gs:// or on a disk that they share" ;;
  *) die "--workdir '$workdir' is not on the mounted disk: give one below runs/, e.g. --workdir runs/$name" ;;
esac
[[ -z $gcsfuse_sha256 || $gcsfuse_sha256 =~ ^[0-9a-f]{64}$ ]] ||
  die "--gcsfuse-sha256 '$gcsfuse_sha256' is no SHA-256: give 64 hexadecimal digits"
check_env_file "$env_file"
check_type "$type"
[ "$version" ] || version=$(tpu_runtime "$type")
bucket=${bucket#gs://} bucket=${bucket%/}
[ $# -gt 0 ] || set -- --config configs/grpo.py
check_words "$@"
check_slices "$slices" "$@"
check_config "$@"

where() { quote "$@" --zone="$zone" ${project:+--project="$project"}; }
tpus() { where gcloud --quiet compute tpus "$@"; }
# The slices of one request are its nodes 0, 1 ... Worker 0 of node 0 is process 0 of the run.
slice=(--node-id="$name") reach=tpu-vm
[ "$slices" = 1 ] || slice=(--node-count="$slices" --node-prefix="$name") reach=queued-resources
workers() { [ "$slices" = 1 ] || printf %s "--node=$1 "; printf %s "--worker=$1"; } # "all", or 0
on() { remote "$(tpus "$reach" ssh "$name") $(workers "$1")" "$2"; } # worker, command
workdir=${workdir:-runs/$name}
train=$(quote .venv/bin/python -m jaxrl_llm.train --workdir "$workdir" --distributed auto "$@")
run=$(printf %s "$train" | cksum | cut -d ' ' -f 1)

describe=$(tpus queued-resources describe "$name" --format='value(state.state)')
create=$(tpus queued-resources create "$name" "${slice[@]}" --accelerator-type="$type" \
  --runtime-version="$version" ${spot:+--spot})
remove=$(tpus queued-resources delete "$name" --force)
# All processes of a run end together, so worker 0 answers for all. A lock is asked, because a pid file outlives a
# crash.
probe=$(on 0 "flock -n launch.lock echo idle || echo busy")
# gcsfuse caches no metadata here: the workers must see at once what another one writes.
apt="sudo apt-get -o DPkg::Lock::Timeout=300 -qq"
deb=https://github.com/GoogleCloudPlatform/gcsfuse/releases/download/v3.0.0/gcsfuse_3.0.0_amd64.deb
mount=''
[ ! "$bucket" ] || mount=$(on all "mountpoint -q runs || { { command -v gcsfuse > /dev/null || \
{ curl -fsSLo gcsfuse.deb $deb && ${gcsfuse_sha256:+echo $gcsfuse_sha256 gcsfuse.deb | sha256sum --check --quiet && }$apt -y install ./gcsfuse.deb; }; } && \
mkdir -p runs && gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 \
$(quote "$bucket") runs; }")
[ ! "$nfs" ] || mount=$(on all "mountpoint -q runs || { $apt update && $apt -y install nfs-common && mkdir -p runs && \
sudo mount -t nfs $(quote "$nfs") runs && { [ -w runs ] || sudo chmod 1777 runs; }; }")
# All workers cannot read one stream, so they get a file.
tar="\"\$(git rev-parse --git-path launch.tar)\""
copy="($pack_checkout -o $tar \$(git write-tree)) && $(tpus "$reach" scp) $tar $(quote "$name:launch.tar") $(workers all)"
secrets=${env_file:+"$(tpus "$reach" scp) $(quote "$env_file" "$name:launch.env") $(workers all) && \
$(on all "chmod 600 ../launch.env")"}
# The processes of a run that was lost may take a minute to end: their code must not change before.
install=$(on all "flock -w 120 launch.lock tar -xf ../launch.tar && $install_packages")
# A lock that this same command holds is no error: gcloud repeats a command if its connection breaks. Of two launches
# at the same time, only the one that gets the lock of worker 0 starts the other workers. Worker 0 is marked, so that
# the command to all workers does not start it again, alone, if its run has failed by then.
start="exec 9> launch.lock && { flock -n 9 || exec grep -qx $run launch.run; } && echo $run > launch.run && \
rm -f launch.exit && { [ ! -e launch.log ] || mv launch.log launch.log.old; } && \
{ (trap \"\" HUP; (echo \$BASHPID > launch.pid; ${env_file:+set -a; . ../launch.env; }exec $train); echo \$? > launch.exit) \
>> launch.log 2>&1 < /dev/null & }"
first=$(on 0 "touch launch.first; $start") all=$(on all "[ -e launch.first ] || { $start }")
follow=$(on 0 "flock -s launch.lock true & tail -n 200 -s 0.2 -F --pid=\$! launch.log")
result=$(on 0 "[ -s launch.exit ] && cat launch.exit && { tail -n 20 launch.log | grep -o ^done: || true; }")

cd "$root"
begin_launch "$describe" "$create" "$probe" "$mount" "$copy" "$secrets" "$install" "$first" "$all" "$follow" \
  "$result" "${delete:+$remove}"
check_agent
follower='' failed=0 began=0
trap '[ ! "$follower" ] || kill "$follower" 2> /dev/null || true' EXIT
trap 'say "no longer following $name; the same command again does"; exit 130' INT TERM HUP

end() { # exit status
  if [ "$delete" ] && [ "$1" != 75 ]; then eval "$remove"; fi
  exit "$1"
}
again() { # what happened, exit status if no restart is left
  [ $((SECONDS - began)) -lt 3600 ] || failed=0
  failed=$((failed + 1)) began=$SECONDS
  if [ "$failed" -gt "$restarts" ]; then say "$1; no restart is left"; end "$2"; fi
  say "$1; restart $failed of $restarts"
  sleep 30
}
state() { eval "$describe" 2> /dev/null || true; }
obtain() { # returns when the slice is there
  local now said=''
  while :; do
    now=$(state)
    case $now in
      ACTIVE) return ;;
      '') request "$create" || again "$name could not be requested" 75 ;;
      SUSPENDED) say "$name was preempted: requesting it anew"; eval "$remove" || again "$name cannot be deleted" 75 ;;
      FAILED) eval "$remove" || true; again "the request for $name failed" 75 ;;
      *) [ "$now" = "$said" ] || say "$name is $now: waiting for it"; said=$now; sleep 30 ;;
    esac
  done
}
reach() { # prints the answer of worker 0, which may take a minute to boot
  local try
  for try in 1 2 3 4 5 6; do eval "$probe" && return; [ "$try" = 6 ] || sleep 10; done
  return 1
}
preempted() { # the state changes a while after the workers are lost
  local _
  for _ in 1 2 3 4 5 6; do [ "$(state)" = ACTIVE ] || return 0; sleep 10; done
  return 1
}

while :; do
  obtain
  if ! found=$(reach); then again "$name does not answer" 75; continue; fi
  if [ "$found" = busy ]; then
    failed=0 # only the connection was lost
    say "already training on $name: following its log"
  elif ! eval "${mount:-true} && $copy && ${secrets:-true} && $install && $first && $all"; then
    again "$name could not be set up" 75
    continue
  fi
  began=$SECONDS
  eval "exec $follow" &
  follower=$!
  wait "$follower" || true
  follower=''
  ended=$(eval "$result") || ended=''
  case $ended in
    0*done:*) end 0 ;;
    *) if preempted; then say "$name was preempted"; continue; fi ;;
  esac
  case $ended in
    0) end 0 ;;
    '') again "lost sight of the run on $name" 75 ;;
    # A user error or a health rule is final, because the same command would end in the same way.
    [23] | [23]$'\n'*) say "the run ended with exit status ${ended%%$'\n'*}, which no restart can mend"; end "${ended%%$'\n'*}" ;;
    *) again "the run ended with exit status $ended" "${ended%%$'\n'*}" ;;
  esac
done
