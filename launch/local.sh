#!/usr/bin/env bash
# Trains on this machine, in the virtual environment .venv of the checkout:
#
#   launch/local.sh [--dry-run] [trainer arguments; default: --config configs/grpo.py]
#
#   EXTRA=cuda      extra of the package to install as well (cuda, tpu, test, parity)
#   PYTHON=python3  interpreter for a new environment (3.11 or newer)
#
# Paths are relative to the checkout. With --workdir, the same command resumes the run.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/library.sh"
help_of_head "$@"
cd "$root"

dry=
if [ "${1-}" = --dry-run ]; then
  dry=1
  shift
fi
[ $# -gt 0 ] || set -- --config configs/grpo.py

# Only this function decides whether a command is printed or run, so a dry run prints the commands of a real run.
run() {
  if [ "$dry" ]; then
    quote "$@"
    echo
  else
    "$@"
  fi
}

run cd "$root"
[ -x .venv/bin/python ] || run "${PYTHON:-python3}" -m venv .venv

# If the stamp is newer than pyproject.toml, nothing is installed. Another EXTRA has another stamp.
stamp=.venv/.installed-${EXTRA:-plain}
if ! [ "$stamp" -nt pyproject.toml ]; then
  run .venv/bin/python -m pip install -c constraints.txt -e ".${EXTRA:+[$EXTRA]}"
  run touch "$stamp"
fi

run exec .venv/bin/python -m jaxrl_llm.train "$@" # exec: a SIGTERM goes to the trainer itself
