#!/usr/bin/env bash
# From a fresh machine to a trained vision-language model: environment, real data, training, result.
# Needs Python >= 3.11 with pip. A second run reuses the environment and the data.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ]; then
    echo "quickstart: making a virtual environment in .venv"
    "$python" -c 'import sys; sys.exit("Python >= 3.11 is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
    "$python" -m venv .venv
fi
if [ ! -e .venv/.installed ] || [ pyproject.toml -nt .venv/.installed ]; then
    echo "quickstart: installing torchmm (a few minutes the first time)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check 'torch>=2.11,<2.14'
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable .
    touch .venv/.installed
fi
.venv/bin/python scripts/prepare_data.py tuxpaint_stamps

# One process per GPU; two on a machine without.
gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
processes=$((gpus > 0 ? gpus : 2))
if [ "$gpus" -eq 0 ]; then
    cores=$(nproc 2>/dev/null || echo 2)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 2 ? cores / 2 : 1))}
fi
# Without this, restarted workers would look for a dead rank's address in torchrun's own store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
.venv/bin/torchrun --nproc-per-node "$processes" train.py --config recipes/quickstart.toml "$@"
.venv/bin/python scripts/show_run.py outputs/quickstart
