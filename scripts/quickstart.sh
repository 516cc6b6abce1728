#!/usr/bin/env bash
# From a fresh machine to a trained vision-language model: environment, real data, training, result.
# Needs Python >= 3.11 with pip. A second run reuses the environment and the data.
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/environment.sh
. scripts/environment.sh
prepare_environment
.venv/bin/python scripts/prepare_data.py tuxpaint_stamps

# One process per GPU; two on a machine without.
gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
processes=$((gpus > 0 ? gpus : 2))
if [ "$gpus" -eq 0 ]; then
    cores=$(nproc 2>/dev/null || echo 2)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 2 ? cores / 2 : 1))}
fi
# The recipe's pipeline has two ranks.
pipeline=()
if [ $((processes % 2)) -eq 1 ]; then
    pipeline=(--parallel.pipeline 1)
fi
# Without this, restarted workers would look for a dead rank's address in torchrun's own store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
.venv/bin/torchrun --nproc-per-node "$processes" train.py --config recipes/quickstart.toml \
    ${pipeline[@]+"${pipeline[@]}"} "$@"
.venv/bin/python scripts/show_run.py outputs/quickstart
