# shellcheck shell=bash disable=SC2034,SC2154 # the scripts read these variables, and set dry_run
# Functions that the other scripts of this folder share. Each script sources this file, which runs nothing by itself.
# slurm.sbatch does not source it, because Slurm copies only slurm.sbatch to its hosts.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) # root of the checkout

say() { echo "${0##*/}: $*" >&2; }
die() { say "$*"; exit 2; }
lost() { say "$*; the same command again goes on from here"; exit 75; }
# Prints the comment at the head of a script, which is its help, if the first word asks for it.
help_of_head() {
  case ${1-} in -h | --help) sed -n '2,/^[^#]/s/^#\( \|$\)//p' "$0"; exit ;; esac
}
need() { # program, page that tells how to install the program
  command -v "$1" > /dev/null || die "$1 is missing: install it, $2"
}

# Prints words as a line that a shell reads as these words.
quote() { local line; printf -v line '%q ' "$@"; printf %s "${line% }"; }

# Reads the options of a command up to --: --gpu-zone VALUE sets the variable gpu_zone, and --spot sets spot to 1.
# `shift "$words_read"` then leaves the trainer arguments.
read_options() { # options that have a value, options without a value, words of the command
  local valued=" $1 " flags=" $2 " word variable
  shift 2
  words_read=$#
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage; exit ;;
      --) shift; break ;;
    esac
    word=" ${1// /?} " # without blanks, so that it is one word of a list
    variable=${1#--} variable=${variable//-/_}
    if [[ $valued = *"$word"* ]]; then
      case ${2:-"--"} in --*) die "$1 needs a value: $1 VALUE" ;; esac
      printf -v "$variable" %s "$2"
      shift
    elif [[ $flags = *"$word"* ]]; then
      printf -v "$variable" 1
    else
      unknown_option "$1"
    fi
    shift
  done
  words_read=$((words_read - $#))
}
unknown_option() { die "unknown option '$1': trainer arguments go after --, and --help lists the options"; }

check_type() { # of --type; with --version too, no runtime helps a type that the Cloud TPU API lacks
  case $1 in
    tpu7x-* | v7x-*) die "--type '$1': the Cloud TPU API has no TPU7x, but GKE has: take launch/gke_jobset.sh" ;;
  esac
}
# Only mesh.data goes over the network between slices: the trainer would refuse other meshes once it has the slices.
check_words() { # trainer arguments
  local word
  for word; do
    case $word in --workdir | --workdir=*) die "--workdir stands behind --, but the launcher sets it: give it before --" ;; esac
  done
}
check_slices() { # slices, trainer arguments
  local slices=$1 data='' before='' word
  shift
  for word; do
    case $before$word in --config.mesh.data=*) data=${word#*=} ;; --config.mesh.data[!=]*) data=$word ;; esac
    case $word in --config.mesh.data) before=$word ;; *) before='' ;; esac
  done
  if [ "$slices" = 1 ] || [ "$data" = -1 ]; then return; fi
  [[ $data =~ ^[1-9][0-9]*$ ]] && [ $((data % slices)) = 0 ] ||
    die "--slices $slices needs --config.mesh.data=$slices, or a multiple, behind --: only mesh.data goes over the network between slices"
}
# Checks the trainer arguments before machines are requested, if the package is installed in .venv of the checkout.
# What only this machine lacks, such as rows on another disk, is no error (exit code 3 of the doctor).
check_config() { # trainer arguments
  local words=() word wants_value='' errors status=0
  for word; do
    if [ "$wants_value" ]; then words+=("$word") wants_value=''; continue; fi
    case $word in
      --config=* | --config.*=*) words+=("$word") ;;
      --config | --config.*) words+=("$word") wants_value=1 ;;
    esac
  done
  case " ${words[*]-} " in *" --config"[\ =]*) ;; *) die "--config is missing behind --: give the config, e.g. --config configs/grpo.py" ;; esac
  if [ "${config_is_checked-}" ] || [ ! -x "$root/.venv/bin/python" ]; then return; fi
  errors=$(cd "$root" && .venv/bin/python -m jaxrl_llm.tools doctor "${words[@]}" 2>&1 > /dev/null) || status=$?
  [ "$status" != 2 ] || die "the trainer would refuse this config: ${errors#error: }"
  export config_is_checked=1 # for tpu_vm.sh, if tpu_vm_vllm.sh runs it
}
# Prints the usual TPU runtime of an accelerator type.
tpu_runtime() {
  case $1 in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v[234]-*) echo tpu-ubuntu2204-base ;;
    v5e-*) die "--type '$1' is v5litepod-${1#v5e-} for Google Cloud: give that" ;;
    *) die "--type '$1' is not known here: give --version too, the runtime of that type" ;;
  esac
}

# These errors of gcloud are final, because the same request would be refused again.
lasting='PERMISSION_DENIED|UNAUTHENTICATED|INVALID_ARGUMENT|NOT_FOUND|Quota|quota|not enabled|reauthenticat|does not have permission'
lasting+='|active account|Failed to find attribute|required property|unrecognized arguments' # no account, or no project
# Runs a line of gcloud that asks for machines. Ends the launch at a final error; else returns the line's status.
request() {
  local status=0 errors
  errors=$(mktemp)
  eval "$1" 2> "$errors" || status=$?
  cat "$errors" >&2
  if [ "$status" != 0 ] && grep -Eq "$lasting" "$errors"; then
    rm "$errors"
    die "$name cannot be requested, for the reason above: the same command would fail again"
  fi
  rm "$errors"
  return "$status"
}
# gcloud refuses to reach several workers if an agent for ssh is running and does not have its key.
check_agent() {
  local key=.ssh/google_compute_engine keys mark
  keys=$(ssh-add -l 2> /dev/null) || return 0 # no agent, or an empty one
  [ -f ~/"$key.pub" ] || die "there is no ~/$key, which your ssh-agent must have: gcloud compute config-ssh; ssh-add ~/$key"
  mark=$(ssh-keygen -lf ~/"$key.pub")
  mark=${mark#* }
  [[ $keys == *"${mark%% *}"* ]] || die "your ssh-agent does not have gcloud's key: ssh-add ~/$key"
}

# The scripts for Google Cloud build each step as one line of shell. It is printed or evaluated, so the dry run always
# equals the launch. gcloud repairs a broken connection by running the command again, so each line must be repeatable.
# The keep-alive detects that a machine is gone.
remote() { # line that connects to a machine, line of shell that runs there in ~/jaxrl_llm
  local text="mkdir -p jaxrl_llm && cd jaxrl_llm || exit; $2"
  case $text in *\'*) text=$(quote "$text") ;; *) text="'$text'" ;; esac # so the dry run is easy to read
  printf %s "$1 --ssh-flag=-oServerAliveInterval=15 --command=$text"
}
# A private index packs the checkout as it is on disk, and leaves the user's staging area as it is.
pack_checkout="export GIT_INDEX_FILE=\$(git rev-parse --git-path launch.index) && git add --all && git archive"
# This uses uv, because the Python of the usual TPU images is older than 3.11.
install_packages="export PATH=\$HOME/.local/bin:\$PATH && \
{ command -v uv > /dev/null || python3 -m pip install --quiet --user uv; } && \
{ [ -x .venv/bin/python ] || uv venv --python 3.12; } && uv pip install -c constraints.txt -e \".[tpu]\" && \
{ [ ! -e mine/requirements.txt ] || uv pip install -c constraints.txt -r mine/requirements.txt; }"
check_env_file() { # file of --env-file
  [ -z "$1" ] || { [ -f "$1" ] && ! grep -Evq '^([A-Za-z_][A-Za-z0-9_]*=.*|#.*|)$' "$1"; } ||
    die "--env-file '$1' is no file of lines NAME=VALUE"
}
# A dry run prints its lines, of which some may be empty, and ends. A launch needs gcloud, which reads no input.
begin_launch() { # lines of a first launch
  if [ "$dry_run" ]; then
    printf '%s\n' "cd $(quote "$root")" "$@" | grep .
    exit
  fi
  need gcloud https://cloud.google.com/sdk/docs/install
  exec < /dev/null
}
