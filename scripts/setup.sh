#!/usr/bin/env bash
# Make .venv and install the pinned versions into it. Usage: scripts/setup.sh [extra,...]
# Does nothing when .venv already holds exactly this. PYTHON chooses the interpreter (3.11 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:-}
python=${PYTHON:-python3}

wanted=$(cat constraints.txt pyproject.toml | cksum | tr -d ' ')
stamp=".venv/.installed-$extras"
grep -qsx "$wanted" "$stamp"* && exit 0 # an installation with more extras will do

if [ ! -x .venv/bin/python ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version 2>&1) is too old; set PYTHON to a Python 3.11 or newer." >&2
    exit 1
  }
  "$python" -m venv .venv
fi
echo "installing into .venv (a minute or two; on a machine with CUDA several GB)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
  --constraint constraints.txt "torch" --editable ".${extras:+[$extras]}"
# on all cores, where pip takes one; some packages have files that are no Python 3
.venv/bin/python -m compileall -qq -j 0 .venv/lib >/dev/null 2>&1 || true
echo "$wanted" >"$stamp"
