"""Measured and predicted peak memory of short runs.

`train.py` runs the quickstart recipe once per setting, on GPUs or on emulated GPUs
(`tests/cuda_emulation/emulate.py`), whose allocator counts the same tensors. The measured peak is
that of two steps in `metrics.jsonl`. The predicted peak is that of `--dry-run` for the first step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.run_costs import load_simulated_profile
from torchmm.recipe.read import load_recipe
from torchmm.recipe.training_section import UPDATE_CHUNK

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart.toml"
LIMIT_S = 1200
SETTINGS: Mapping[str, object] = {
    "training.steps": 2,
    "training.dtype": "bfloat16",
    "training.device": "cuda",
    "training.global_batch_size": 8,
    "training.microbatch_size": 4,
    "model.llm.config.num_hidden_layers": 8,
    "optimizer.lr_schedule": "constant",
    "optimizer.warmup_steps": 1,
    "parallel.pipeline": 1,
    "parallel.slow_rank_threshold": 0,  # its matrices would determine the peak
    "parallel.vision.sub_microbatch_images": 64,
    "validation.interval": 0,
    "checkpoint.interval": 0,
    "checkpoint.export_hf": "false",
    "checkpoint.resume": "none",
    "data.workers": 0,
}


class Switch(NamedTuple):
    """Recipe changes of one measurement.

    Attributes:
        changes: Maps recipe keys to values.
        ranks: Number of devices.
    """

    changes: Mapping[str, object]
    ranks: int = 1


TUNED = {"activation_checkpoint.mode": "auto", "activation_checkpoint.memory_limit": "130 MiB"}
SWITCHES = {
    "none": Switch({}),
    "adapters": Switch({"adapters.small": '{modules = ["llm"], rank = 8}'}),
    "recomputation full": Switch({"activation_checkpoint.mode": "full"}),
    "recomputation auto": Switch(TUNED | {"activation_checkpoint.offload": "false"}),
    "recomputation auto with offload": Switch(TUNED),
    "chunked loss": Switch({"model.chunked_loss": "true"}),
    "optimizer states on the host": Switch({"optimizer.offload": "true"}),
    "parameters and states bfloat16": Switch(
        {"training.parameter_dtype": "bfloat16", "optimizer.state_dtype": "bfloat16"}
    ),
    "fsdp2, 2 ranks": Switch({}, ranks=2),
    "images balanced, 2 ranks": Switch({"data.balance": "images"}, ranks=2),
    "context 2, 2 ranks": Switch({"parallel.llm.context": 2}, ranks=2),
}


class Peak(NamedTuple):
    """Peak memory in bytes of the rank with the highest memory use."""

    measured: int
    predicted: int


def device_peaks(through: Path | None, names: list[str]) -> Iterator[tuple[str, Peak]]:
    """Yield the name and the peak memory of each switch.

    Args:
        through: Script that starts train.py on emulated devices. If None, the local GPUs are used.
        names: Keys of `SWITCHES`.

    Raises:
        RuntimeError: A run failed, or its step cannot be planned.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            switch = SWITCHES[name]
            settings = {
                **SETTINGS,
                "name": name.replace(" ", "_").replace(",", ""),
                "output_dir": folder,
                "data.index_cache_dir": Path(folder) / "index",
                **switch.changes,
            }
            overrides = [f"--{key}={value}" for key, value in settings.items()]
            measured = _measured(
                Path(folder) / str(settings["name"]), overrides, switch.ranks, through
            )
            recipe = load_recipe(RECIPE, overrides, switch.ranks).recipe
            forecaster = StepSimulator(recipe, switch.ranks, load_simulated_profile(recipe))
            step = forecaster.simulate_parallel(recipe.parallel).step
            if step is None:
                raise RuntimeError(f"{name} cannot be planned")
            yield name, Peak(measured, max(step.peak_bytes))


def _measured(run: Path, overrides: list[str], ranks: int, through: Path | None) -> int:
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    start += [str(through)] if through else []
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*start, str(ROOT / "train.py"), "--config", str(RECIPE), *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "FAKECUDA_PORTION": str(UPDATE_CHUNK)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{run.name}: {(done.stdout + done.stderr)[-2000:]}")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["peak_memory_bytes"])
