#!/usr/bin/env bash
# Three seeds, two runs side by side: table, answers and figure in outputs/overoptimisation.
rlhf-trl overoptimise --seeds 3 --jobs 2 --output_dir outputs/overoptimisation "$@"
