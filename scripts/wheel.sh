#!/usr/bin/env bash
# Install the package into a fresh environment, import all its modules and run its command from
# another folder: first as a wheel, then editable. Takes some minutes and 2 GB of the temporary
# folder. PYTHON as in setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/project" "$work/elsewhere" # a copy: a build leaves files beside the sources
cp -r pyproject.toml constraints.txt README.md LICENSE rlhf_trl recipes configs "$work/project"
"${PYTHON:-python3}" -m venv "$work/venv"
export PATH="$work/venv/bin:$PATH"
cd "$work/project"
# of the sources: a package that pyproject.toml does not list is not in the wheel
find rlhf_trl recipes -name '*.py' ! -path '*/experiments/*' |
  sed -e 's|^recipes|rlhf_trl/recipes|' -e 's|/__init__\.py$||' -e 's|\.py$||' |
  tr / . | sort > "$work/modules"
install=(python -m pip install --quiet --disable-pip-version-check)
python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" .
"${install[@]}" --constraint constraints.txt torch "$work"/rlhf_trl-*.whl

race() {
  rlhf-trl race --algorithms grpo --seeds 1 --max_steps 5 --output_dir "$1"
  test -f "$1/race.png"
}
mv "$work/project" "$work/away" # nothing but the wheel is left
cd "$work/elsewhere"
python -W ignore - "$work/modules" << 'END'
import sys
from importlib import import_module
from pathlib import Path

names = Path(sys.argv[1]).read_text().split()
for name in names:
    import_module(name)
print(f"{len(names)} modules of the wheel are imported")
END
rlhf-trl algorithms
rlhf-trl compare --algorithms cispo
rlhf-trl drift
race outputs/wheel
rlhf-trl rollouts outputs/wheel/grpo/seed-0
for recipe in grpo dpo sft; do
  rlhf-trl configs copy "tiny/$recipe" "$recipe.yaml"
  rlhf-trl train "$recipe" --config "$recipe.yaml" --max_steps 3
done
rlhf-trl train grpo --config grpo.yaml --max_steps 3 --processes 2 --output_dir outputs/two
rlhf-trl doctor

mv "$work/away" "$work/project"
"${install[@]}" --no-deps --editable "$work/project"
race outputs/editable
echo "the wheel and the editable installation run from another folder"
