#!/usr/bin/env bash
# A run on several nodes of a Slurm cluster, one task for each GPU:
#
#     sbatch --nodes 4 scripts/launch/slurm.sh --config recipes/mine.toml --training.steps 10000
#
# Five minutes before its time is over, or when it has to make room (`scancel --signal=USR1 JOB`), the run
# saves its last step and ends with exit code 75; the job is queued again and goes on from there. It is also
# queued again, up to RETRIES times, if a rank or node was lost (6). docs/guides/cluster.md says more.
#
# Environment: PYTHON (default .venv/bin/python), RETRIES (3), MASTER_ADDR (the first node), SRUN_OPTIONS:
# SRUN_OPTIONS="--container-image=$PWD/torchmm.sqsh --container-mounts=$PWD --container-workdir=$PWD" with Pyxis.
#SBATCH --job-name=torchmm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"

export PYTHON=${PYTHON:-.venv/bin/python}
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # data workers have processes of their own

# Signals go to the tasks themselves, and their exit codes come back: hence no torchrun in between. Ranks
# notice a lost peer within seconds and end; --wait is for those that do not.
# shellcheck disable=SC2016,SC2086  # the tasks' own variables; several options in one variable
srun --kill-on-bad-exit=0 --wait=120 ${SRUN_OPTIONS:-} bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec "$PYTHON" train.py "$@"' train.py "$@"
code=$?

preempted=75 peer_lost=6
if [ "$code" -eq "$preempted" ] ||
    { [ "$code" -eq "$peer_lost" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${RETRIES:-3}" ]; }; then
    echo "exit code $code: queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
