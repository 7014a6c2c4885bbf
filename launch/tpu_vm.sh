#!/usr/bin/env bash
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/library.sh"

usage() {
  cat <<'END'
Train on one Google Cloud TPU VM (a single host: v5litepod-8, v6e-8, ...).

  launch/tpu_vm.sh --name NAME --zone ZONE [options] [-- trainer arguments]

  --name NAME      name of the VM, and of ./runs/NAME, to which the work directory is copied
  --zone ZONE      zone of Google Cloud, e.g. us-central1-a
  --type TYPE      accelerator type [v5litepod-8]
  --version IMAGE  TPU runtime [the usual one for TYPE]
  --project ID     Google Cloud project [gcloud's own]
  --workdir DIR    work directory on the VM: absolute, or below ~/jaxrl_llm [runs/NAME]
  --env-file FILE  file of lines NAME=VALUE for the trainer, such as HF_TOKEN and WANDB_API_KEY; a shell reads them
  --spot           use a spot VM, which is cheap and may be preempted
  --sync SECONDS   seconds between copies of the work directory to this machine; 0: only at the end
                   [--spot: 900, else 0]
  --delete         delete the VM once the run has ended and its work directory is copied
  --dry-run        print the commands of a first launch, one per line, and run nothing

This command makes or reuses the VM, copies the checkout and installs it. Uncommitted work is copied
too, ignored files are not. It starts the training detached [--config configs/grpo.py], follows the
log, and copies the work directory to this machine.

Ctrl-C only stops following. What the same command does when it is repeated depends on the run:
  the run is going on    it follows the run, and never starts a second one
  the run has ended      it resumes the run from the work directory
  the VM was preempted   it makes a new VM, sends ./runs/NAME there and resumes. Training since the
                         last --sync is lost with the old VM's disk
Files that you add to ./runs/NAME yourself, such as report.html, stay there.

The exit status is the trainer's. It is 75 if there was no capacity, or if the VM or the connection
was lost. To repeat the command in these cases:
  until launch/tpu_vm.sh --spot ...; [ $? != 75 ]; do sleep 60; done
To save and stop a run: gcloud compute tpus tpu-vm ssh NAME --zone=ZONE \
  --command='cd jaxrl_llm && kill $(cat WORKDIR/launch.pid)'
END
}

name='' zone='' type=v5litepod-8 version='' project='' workdir='' spot='' sync='' delete='' dry_run='' env_file=''
read_options "--name --zone --type --version --project --workdir --sync --env-file" "--spot --delete --dry-run" "$@"
shift "$words_read"
[ "$name" ] || die "--name is missing: name the VM, e.g. --name grpo"
[ "$zone" ] || die "--zone is missing: say where, e.g. --zone us-central1-a"
case ${type##*-} in 1 | 4 | 8) ;; *) die "--type '$type' is not one host: take one ending in -1, -4 or -8" ;; esac
case ${sync:=$((spot ? 900 : 0))} in *[!0-9]*) die "--sync '$sync' is not whole seconds: e.g. --sync 900" ;; esac
check_env_file "$env_file"
check_type "$type"
[ "$version" ] || version=$(tpu_runtime "$type")
[ $# -gt 0 ] || set -- --config configs/grpo.py

tpu() { # verb, its options
  quote gcloud --quiet compute tpus tpu-vm "$1" "$name" --zone="$zone" ${project:+--project="$project"} "${@:2}"
}
vm() { remote "$(tpu ssh)" "$1"; }
check_words "$@"
case $workdir in gs:*) die "--workdir '$workdir' is in a bucket: give a folder of the VM, which is copied to runs/$name" ;; esac
check_config "$@"
workdir=${workdir:-runs/$name}
here=$(quote "runs/$name") there=$(quote "$workdir")
train=$(quote .venv/bin/python -m jaxrl_llm.train --workdir "$workdir" "$@")

describe=$(tpu describe --format='value(state)')
create=$(tpu create --accelerator-type="$type" --version="$version" ${spot:+--spot})
remove=$(tpu delete)
# A run holds a lock until it ends. The lock is asked, because a pid file outlives a crash or reboot.
probe=$(vm "[ -e $there ] || { echo new; exit; }; flock -n $there/launch.lock echo idle || echo busy")
# A complete copy has the name .new, and replaces the last copy only by renames. So a complete copy is here whenever
# this script is killed. This line runs first and finishes renames that were interrupted.
settle="{ [ ! -d $here.new ] || { rm -rf $here.old && { [ ! -d $here ] || mv $here $here.old; } && \
mv $here.new $here; }; } && rm -rf $here.old"
# launch.synced lists the files that the VM has had. All other files were added on this machine, and are kept in the
# next copy.
add="(cd $here.part && ls -A > launch.synced) && for file in $here/* $here/.[!.]*; do \
case \${file##*/} in launch.* | lock) continue ;; esac; \
[ ! -e \"\$file\" ] || [ -e $here.part/\"\${file##*/}\" ] || \
grep -qsxF -e \"\${file##*/}\" $here/launch.synced || cp -Rp \"\$file\" $here.part/ || exit; done"
# A stream that is cut or missing must not become a work directory, because the run would start from step 0. The lock
# is left out, because it belongs to a run on a VM that is gone.
send="$settle && (cd $here && ls -A > launch.synced) && tar -C $here --exclude=./lock -cf - . | \
$(vm "rm -rf $there.part && mkdir -p $there.part && tar -C $there.part -xf - && mv $there.part $there")"
copy="($pack_checkout \$(git write-tree)) | $(vm "tar -xf -")"
secrets=${env_file:+"$(vm "umask 077 && cat > launch.env") < $(quote "$env_file")"}
install=$(vm "$install_packages")
start=$(vm "mkdir -p $there && exec 9> $there/launch.lock && { flock -n 9 || exit 0; } && rm -f $there/launch.exit && \
{ (trap \"\" HUP; (echo \$BASHPID > $there/launch.pid; ${env_file:+set -a; . ./launch.env; }exec $train); echo \$? > $there/launch.exit) \
>> $there/launch.log 2>&1 < /dev/null & }")
follow=$(vm "flock -s $there/launch.lock true & tail -n 200 -s 0.2 -F --pid=\$! $there/launch.log")
# Hard links take a snapshot of the directory at once. So a checkpoint that is deleted meanwhile still arrives complete.
# Each copy has its own snapshot, because the snapshot of a killed launch may still be read and removed.
# Status 1 of tar only means that the log grew. Only a complete copy replaces the last one.
fetch="$settle && rm -rf $here.part && mkdir -p $here.part && $(vm "for old in $there.snap.*; do \
kill -0 \"\${old##*.}\" 2> /dev/null || rm -rf \"\$old\"; done; snap=$there.snap.\$\$; cp -al $there \"\$snap\" && \
{ tar -C \"\$snap\" -cf - . || [ \$? = 1 ]; }; status=\$?; rm -rf \"\$snap\"; exit \$status") | \
tar -C $here.part -xf - && ($add) && mv $here.part $here.new && $settle"

cd "$root"
[ -d "runs/$name" ] || [ -d "runs/$name.new" ] || send=''
begin_launch "$describe" "$create" "$probe" "$send" "$copy" "$secrets" "$install" "$start" "$follow" "$fetch" \
  "${delete:+$remove}"
state=$(eval "$describe" 2> /dev/null || true)
case $state in
  READY) ;;
  '') request "$create" || lost "$name could not be made" ;;
  PREEMPTED | TERMINATED) { eval "$remove" && request "$create"; } || lost "$name was preempted and could not be made anew" ;;
  *) lost "$name is $state: wait until it is READY, or delete it" ;;
esac
found=$(eval "$probe") || lost "$name does not answer"
if [ "$found" = busy ]; then
  say "already training on $name: following its log"
else
  [ "$found" = new ] || send=''
  eval "${send:-true} && $copy && ${secrets:-true} && $install && $start" || lost "$name could not be set up"
fi

eval "exec $follow" &
follower=$!
trap 'kill "$follower" 2> /dev/null || true' EXIT
trap 'say "no longer following $name; the same command again does"; exit 130' INT TERM HUP
next=$sync
SECONDS=0
while sleep 0.2 && kill -0 "$follower" 2> /dev/null; do
  if [ "$sync" -gt 0 ] && [ "$SECONDS" -ge "$next" ]; then
    eval "$fetch" || say "no copy this time"
    next=$((SECONDS + sync))
  fi
done
eval "$fetch" || lost "the work directory did not come back from $name"
[ -s "runs/$name/launch.exit" ] || lost "lost sight of the run on $name"
if [ "$delete" ]; then eval "$remove"; fi
exit "$(cat "runs/$name/launch.exit")"
