#!/usr/bin/env bash
# Train the embedded speller with GRPO on one CPU thread, in about a minute, into a new folder.
# Every argument goes to the recipe: scripts/demo.sh --seed 1 --max_steps 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1

n=1
while [ -e "outputs/demo-$n" ]; do n=$((n + 1)); done
[[ " $*" == *" --output_dir"* ]] || set -- --output_dir "outputs/demo-$n" "$@"
exec accelerate launch --quiet --config_file configs/accelerate/cpu.yaml \
  recipes/grpo.py --config configs/tiny/grpo.yaml "$@"
