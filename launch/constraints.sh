#!/usr/bin/env bash
# Writes constraints.txt: the version of every package that an installation of this checkout gets.
#
#   launch/constraints.sh [--upgrade]
#
#   --upgrade             take the newest versions; without it, the versions in constraints.txt stay
#   PYTHON311, PYTHON312  interpreters (default: python3.11, python3.12)
#   EXTRAS311, EXTRAS312  extras to install (default: ci,parity,reasoning,tpu and ci,tpu: torch for 3.12 takes gigabytes)
#
# This script makes two virtual environments in a temporary folder and asks pip for their packages. Run the tests
# afterwards.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/library.sh"
cd "$root"

keep=(-c constraints.txt)
case "${1-}" in
  "") ;;
  --upgrade) keep=() ;;
  --help | -h)
    sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0"
    exit
    ;;
  *)
    die "unknown argument $1 (see --help)"
    ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Writes the names and versions of a fresh environment to a file: INTERPRETER EXTRAS FILE
packages() {
  "$1" -m venv "$work/$3"
  "$work/$3/bin/python" -m pip install --quiet --editable ".[$2]" "${keep[@]}"
  # A local version such as +cpu names one build of a release.
  "$work/$3/bin/python" -m pip list --format=freeze --exclude-editable --exclude pip --exclude setuptools |
    sed 's/+.*//' > "$work/$3.txt"
}

packages "${PYTHON311:-python3.11}" "${EXTRAS311:-ci,parity,reasoning,tpu}" 3.11
packages "${PYTHON312:-python3.12}" "${EXTRAS312:-ci,tpu}" 3.12

"$work/3.11/bin/python" - "$work/3.11.txt" "$work/3.12.txt" > "$work/constraints.txt" << 'END'
import re
import sys
from pathlib import Path

older, newer = (
    {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (x.split("==") for x in Path(file).read_text().split())}
    for file in sys.argv[1:]
)
print("# Every package that was installed when this version was tested: pip install -c constraints.txt …")
print("# Written by launch/constraints.sh. A line without a marker holds for each Python that installs the package.")
for name in sorted(older | newer):
    if older.get(name) == newer.get(name) or name not in older or name not in newer:
        print(f"{name}=={older.get(name, newer.get(name))}")
    else:
        print(f'{name}=={older[name]}; python_version < "3.12"')
        print(f'{name}=={newer[name]}; python_version >= "3.12"')
END
mv "$work/constraints.txt" constraints.txt
echo "constraints.txt: $(grep -c == constraints.txt) versions"
