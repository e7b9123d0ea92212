#!/usr/bin/env bash
# Set up, lint, run the short demo, run the tests. Arguments go to pytest: -m promise runs the tests
# that are left out here because they train for minutes to check a number of the documentation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

ruff check .
ruff format --check .
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
scripts/demo.sh --max_steps 10 --output_dir "$out/demo" | tee "$out/log"
tail -n 1 "$out/log" | grep -Eqx \
  'exact match [01]\.[0-9]{3} -> [01]\.[0-9]{3} \(greedy, 256 held-out words, seed 0\)' || {
  echo "error: the demo's last line is not the expected one" >&2
  exit 1
}
pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not promise" "$@"
