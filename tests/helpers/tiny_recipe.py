"""The recipe of the quickstart with a model and batch that train in a fraction of a second."""

import json
import os
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from train_server import TrainServer

from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.checkpoint.manifest import list_steps

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.toml"

SHARED_INDEX = "TORCHMM_TEST_INDEX"
"""Environment variable with the directory of data indexes that all tests of a pytest run share."""

LLM = "--model.llm.config."
VISION = "--model.encoders.vision.config."
ONLY_TRAINS = {
    "--optimizer.warmup_steps": 2,
    "--optimizer.lr_schedule": "constant",
    "--data.workers": 0,
    "--validation.interval": 0,
    "--validation.num_samples": 1,  # plots of samples take longer than steps
    "--checkpoint.interval": 0,
    "--checkpoint.export_hf": "false",
}
"""Overrides of a run of a few steps that neither validates nor saves."""
SIZES = {
    LLM + "hidden_size": 48,
    LLM + "intermediate_size": 64,
    LLM + "num_hidden_layers": 2,
    LLM + "num_attention_heads": 4,
    LLM + "num_key_value_heads": 2,
    VISION + "hidden_size": 48,
    VISION + "intermediate_size": 64,
    VISION + "num_hidden_layers": 2,
    VISION + "num_attention_heads": 4,
    VISION + "image_size": 32,
    VISION + "patch_size": 16,
    "--parallel.pipeline": 1,
    "--training.global_batch_size": 8,
    "--training.microbatch_size": 1,
    "--training.sequence_length": 128,
    "--metrics.peak_tflops": 0.1,  # not measured for 0.3 s
    **ONLY_TRAINS,
}


def overrides(run_dir: Path, data: Path, **changes: object) -> list[str]:
    """Return command-line overrides; `changes` are keys with "__" in place of the dot."""
    values = {
        **SIZES,
        "--name": run_dir.name,
        "--output_dir": run_dir.parent,
        "--data.index_cache_dir": os.environ.get(SHARED_INDEX, run_dir.parent / "index"),
        "--model.tokenizer": data / "tokenizer",
        **{f"--{k.replace('__', '.')}": v for k, v in changes.items()},
    }
    sources = [
        f'--data.sources=[{{path="{data}/tuxpaint_stamps/train"}}]',
        f'--data.validation=[{{path="{data}/tuxpaint_stamps/validation"}}]',
    ]
    return sources + [f"{key}={value}" for key, value in values.items()]


def new_index(run_dir: Path) -> dict[str, object]:
    """Return changes for a run that indexes its data, instead of reading the shared index."""
    return {"data__index_cache_dir": run_dir.parent / "index"}


def tiny_recipe(run_dir: Path, data: Path, world_size: int = 1, **changes: object) -> Recipe:
    """Return the recipe."""
    return load_recipe(QUICKSTART, overrides(run_dir, data, **changes), world_size).recipe


def arguments(run_dir: Path, data: Path, **changes: object) -> list[str]:
    """Return the command line of train.py for the recipe."""
    return ["--config", str(QUICKSTART), *overrides(run_dir, data, **changes)]


def records(run_dir: Path) -> list[dict]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train_records(server: TrainServer, run_dir: Path, command: list[str], ranks: int) -> list[dict]:
    """Run a training command on ranks of a server, and return the records of its steps."""
    codes, output = server.run(command, run_dir.parent / "log", ranks)
    assert codes == [0] * ranks, output
    return records(run_dir)


def weights(run_dir: Path) -> dict[str, Tensor]:
    """Return all tensors of the newest checkpoint: parameters, optimizer and random states."""
    files = sorted(list_steps(run_dir / "checkpoints")[0].glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}
