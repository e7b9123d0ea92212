#!/bin/bash
# A recipe as a Slurm job, which saves before its time is over and goes on in the next job:
#
#   sbatch --nodes 2 --gpus-per-node 8 scripts/slurm.sh grpo --config my.yaml --output_dir my-run
#
# Submit it from the project's folder; its words are a recipe and that recipe's options, and those of
# sbatch come before. With several processes, ACCELERATE_CONFIG names another config than that for
# many machines.
#SBATCH --job-name=rlhf_trl
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
# ten minutes before the end; B: to this script alone
#SBATCH --signal=B:USR1@600
set -u

# A launcher forwards these, and gives its workers five minutes to save.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGUSR1 PET_SHUTDOWN_TIMEOUT=300
export CONFIG=${ACCELERATE_CONFIG:-configs/accelerate/multi_node.yaml}
PROCESSES=$((SLURM_NNODES * ${SLURM_GPUS_ON_NODE:-1}))
ADDRESS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PROCESSES ADDRESS

recipe=recipes/$1.py
shift
if [ "$PROCESSES" -eq 1 ]; then # whose launcher would die of the signal
    command='exec .venv/bin/python "$@"'
else # one launcher on each machine
    command='exec .venv/bin/accelerate launch --quiet --config_file "$CONFIG" \
        --num_machines "$SLURM_NNODES" --num_processes "$PROCESSES" \
        --machine_rank "$SLURM_NODEID" --main_process_ip "$ADDRESS" "$@"'
fi
srun --kill-on-bad-exit=1 bash -c "$command" job "$recipe" "$@" --resume_from_checkpoint auto &
step=$!

warned=no
trap 'warned=yes; kill -USR1 "$step"' USR1 # srun hands it on
wait "$step"
code=$?
if [ "$warned" = yes ]; then # it was the signal that ended the waiting
    wait "$step"
    code=$?
    [ "$code" -eq 0 ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
