#!/usr/bin/env bash
# Train a small vision-language model on a fresh machine: create the environment, prepare the data, train, and
# score captions of held-out images, with the correct and with exchanged images.
# Needs Python >= 3.11 with pip. A second run reuses the environment and the data.
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/environment.sh
. scripts/environment.sh
prepare_environment
.venv/bin/python scripts/prepare_data.py emoji_scenes

# Two processes on a machine without GPUs; otherwise one per GPU, of as many as divide the batch.
gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
recipe=quickstart processes=2 pipeline=()
if [ "$gpus" -gt 0 ]; then
    recipe=quickstart_gpu processes=1
    while [ $((processes * 2)) -le "$gpus" ]; do processes=$((processes * 2)); done
    # The recipe's pipeline has two ranks.
    [ "$processes" -gt 1 ] || pipeline=(--parallel.pipeline 1)
else
    cores=$(nproc 2>/dev/null || echo 2)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 2 ? cores / 2 : 1))}
fi
# Without this, restarted workers would look for a dead rank's address in torchrun's own store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
.venv/bin/torchrun --nproc-per-node "$processes" train.py --config "recipes/$recipe.toml" \
    ${pipeline[@]+"${pipeline[@]}"} "$@"
# Score the export on held-out images and on exchanged images, with `generate` of Hugging Face.
if [ -d "outputs/$recipe/hf" ]; then
    .venv/bin/python scripts/evaluate.py "outputs/$recipe" --scores exact_match --samples 400 \
        --max-new-tokens 12 --batch-size 50 \
        --data data/emoji_scenes/validation data/emoji_scenes/exchanged
fi
.venv/bin/python scripts/show_run.py "outputs/$recipe"
cat <<'END'

The model generates correct captions for combinations of objects that it was not trained on. With the image of
another sample it generates another caption. It was not trained on photographs or free descriptions. For those,
start from pretrained weights: docs/get_started/own_model.md.
END
