#!/usr/bin/env bash
# Run TRL's own trainer tests on TRL's trainers and on ours, and print a table of both.
# usage: scripts/trl_suite.sh TRL_CHECKOUT RESULTS_FOLDER [which tests, as "dpo and not streaming"]
# Nothing is fetched: tiny models, a tokenizer and data stand in for the hub's. It takes an hour.
set -euo pipefail
[ $# -ge 2 ] && [ $# -le 3 ] || { sed -n 2,4p "$0" >&2; exit 2; }
checkout=$(realpath "$1") results=$(realpath -m "$2") only=${3:-test}
here=$(realpath "$(dirname "$0")")
python=$here/../.venv/bin/python; [ -x "$python" ] || python=python
mkdir -p "$results/stand-ins" "$results/copy"
export HF_HOME=$results/stand-ins HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TRL_EXPERIMENTAL_SILENCE=1
export PYTHONPATH=$here:$here/..${PYTHONPATH:+:$PYTHONPATH}
"$python" "$here/trl_suite.py" prepare "$HF_HOME" "$checkout"
cp -r "$checkout/tests" "$results/copy/"  # beside the checkout's own trl, Python would take that one
files=(tests/test_{dpo,grpo,kto,reward,rloo,sft}_trainer.py tests/experimental/test_orpo_trainer.py)
cd "$results/copy"
for mode in ${TRL_SUITE_MODES:-stock trl chapter}; do
    TRL_SUITE=$mode "$python" -m pytest -q -p trl_suite -p no:cacheprovider -m "not slow" \
        -k "not (vlm or vision or image or vllm or liger or multimodal) and ($only)" \
        --junitxml "$results/$mode.xml" "${files[@]}" >"$results/$mode.log" 2>&1 || true
    tail -n 1 "$results/$mode.log"
done
"$python" "$here/trl_suite.py" report "$results"
