#!/usr/bin/env bash
# One race per learning rate, one seed each: tables and figures in outputs/race-RATE.
set -euo pipefail
for rate in 3e-4 7e-4 1.5e-3; do
  rlhf-trl race --algorithms reinforce,rloo,grpo,drgrpo,gspo,cispo_window,sapo,dapo,maxrl --seeds 1 \
    --learning_rate "$rate" --eval_steps 50 --output_dir "outputs/race-$rate" "$@"
done
