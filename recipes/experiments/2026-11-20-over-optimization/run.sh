#!/usr/bin/env bash
# Three seeds, two runs side by side: table, answers and figure in outputs/overoptimization.
rlhf-trl overoptimize --seeds 3 --jobs 2 --output_dir outputs/overoptimization "$@"
