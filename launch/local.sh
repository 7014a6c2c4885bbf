#!/usr/bin/env bash
# Train on this machine, in a virtual environment of the checkout's own (.venv):
#
#   launch/local.sh [--dry-run] [trainer arguments; default: --config configs/grpo.py]
#
#   EXTRA=cuda      also install that extra of the package (cuda, tpu, test, parity)
#   PYTHON=python3  interpreter a new environment is made with (3.11 or newer)
#
# Paths are relative to the checkout. With --workdir, the same command again resumes the run.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

dry=
if [ "${1-}" = --dry-run ]; then
  dry=1
  shift
fi
[ $# -gt 0 ] || set -- --config configs/grpo.py

# One place decides between printing and doing, so what is printed is what is done.
run() {
  if [ "$dry" ]; then
    local line
    line=$(printf '%q ' "$@")
    echo "${line% }"
  else
    "$@"
  fi
}

run cd "$root"
[ -x .venv/bin/python ] || run "${PYTHON:-python3}" -m venv .venv

# The stamp makes a second start instant; a changed pyproject.toml or another EXTRA installs again.
stamp=.venv/.installed-${EXTRA:-plain}
if ! [ "$stamp" -nt pyproject.toml ]; then
  run .venv/bin/python -m pip install -c constraints.txt -e ".${EXTRA:+[$EXTRA]}"
  run touch "$stamp"
fi

run exec .venv/bin/python -m jaxrl_llm.train "$@" # exec: a SIGTERM reaches the trainer itself
