"""Verify a checkpoint and load it into any parallelism config.

Everything is compared before anything is loaded: names, shapes and dtypes of the tensors of all
ranks, and the set of trained parameters. All differences are reported together.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torchmm.common.errors import CheckpointError
from torchmm.parallel.attention_kernels import describe_image_kernels
from torchmm.parallel.health.peers import SideGroup
from torchmm.recipe.changes import changes
from torchmm.recipe.explain import upgrade_recipe
from torchmm.training.checkpoint.manifest import read_json, read_manifest
from torchmm.training.checkpoint.state import (
    AVERAGE_PREFIX,
    OptimizerState,
    average_tensors,
    empty_optimizer_state,
    find_mismatches,
    model_tensors,
    optimizer_tensors,
    trainable_names,
)
from torchmm.training.checkpoint.storage import SafetensorsReader, read_index
from torchmm.training.optimizers.weight_average import WeightAverage

STATE_NAME = "state.json"
PACKAGES = ("transformers", "tokenizers", "numpy", "pillow", "av", "soundfile", "scipy")
"""Packages that samples and random numbers depend on, besides torch. Some may be missing."""
IMAGE_KERNELS = "attention of images"
"""Entry for the attention kernels of encoders with images of one size, which torchmm implements."""
_MAX_SHOWN_PROBLEMS = 20
_SKIPPED_AVERAGES = "averaged weights, which are not loaded because training.ema_decay is not set"
_MISSING_AVERAGES = "no averaged weights; they are initialized from the weights after the next step"


@dataclass(frozen=True)
class RestoredRun:
    """Content of a loaded checkpoint other than model and optimizer tensors."""

    path: Path
    step: int
    state: dict[str, Any]
    """The JSON object that was passed to `save`."""
    rng: dict[str, Tensor] | None
    """Random state of this rank for `restore_rng`.

    Restore it after the iterator of the data loader exists, because its creation samples random
    numbers. None if the checkpoint is from a different number of ranks or parallelism config. Then
    seed again, with `step` as a coordinate.
    """
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe of the run that saved the checkpoint. Empty in checkpoints of old versions."""


def load_verified(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: SideGroup,
    facts: dict[str, Any],
    logger: logging.Logger,
    average: WeightAverage | None = None,
) -> RestoredRun:
    """Load a checkpoint in place. Collective.

    Args:
        path: The checkpoint.
        model: Model with the stages of this rank.
        optimizer: Optimizer whose state is replaced. If None, load only the model.
        group: All ranks.
        facts: Facts of a manifest of this run. Differences are logged.
        logger: Logger of the run.
        average: Averages to replace. They are initialized again if the checkpoint has none.

    Raises:
        CheckpointError: The checkpoint does not match the model. Nothing was loaded.
    """
    prefix = rng_prefix(group)
    manifest = read_manifest(path)
    index = read_index(path)
    saved = read_json(path / STATE_NAME)
    kinds = {"state": dict, "trainable": list}
    if not isinstance(saved, dict) or any(
        not isinstance(saved.get(key), kind) for key, kind in kinds.items()
    ):
        raise CheckpointError(f"{path / STATE_NAME} is not a valid run state")
    tensors = model_tensors(model)
    optimizer_state: OptimizerState = {}
    trainable: list[str] | None = None
    if optimizer is not None:
        optimizer_state = empty_optimizer_state(model, optimizer, index)
        tensors |= optimizer_tensors(model, optimizer_state)
        trainable = trainable_names(model, optimizer)
    has_averages = any(name.startswith(AVERAGE_PREFIX) for name in index)
    averages = average.zeros() if average is not None and has_averages else None
    tensors |= average_tensors(model, averages or {})
    with_averages = averages is not None
    problems = find_mismatches(index, saved["trainable"], tensors, trainable, with_averages, group)
    if problems:
        raise CheckpointError(
            f"{path} does not match the model or its trainable "
            f"modules:\n{format_bullet_list(problems)}\nRestore [model] and [freeze] of the "
            'recipe, or start a new run with another name or checkpoint.resume = "none"'
        )
    same_layout = _sizes_above_one(manifest["layout"]) == _sizes_above_one(facts["layout"])
    rng = {
        name: torch.empty(entry["shape"], dtype=torch.uint8)
        for name, entry in index.items()
        if name.startswith(prefix) and same_layout
    }
    try:
        dcp.load(
            tensors | rng,
            storage_reader=SafetensorsReader(path),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group.group,
            no_dist=group.group is None,
        )
    except CheckpointException as error:
        raise as_checkpoint_error(f"cannot load {path}", error) from error
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(optimizer_state)
    if average is not None:
        average.restore(averages or {})
    if has_averages != (average is not None):
        logger.warning("%s has %s", path, _SKIPPED_AVERAGES if has_averages else _MISSING_AVERAGES)
    _log_differences(path, manifest, facts, saved["state"], bool(rng), logger)
    rng = {name.removeprefix(prefix): value for name, value in rng.items()}
    return RestoredRun(
        path, manifest["step"], saved["state"], rng or None, manifest.get("recipe") or {}
    )


def installed_versions() -> dict[str, str]:
    """Return the installed versions of `PACKAGES`, and on a GPU the `IMAGE_KERNELS`."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    if torch.cuda.is_available():
        versions[IMAGE_KERNELS] = describe_image_kernels(torch.device("cuda"))
    return versions


def _log_differences(
    path: Path,
    manifest: dict[str, Any],
    facts: dict[str, Any],
    state: dict[str, Any],
    has_rng: bool,
    logger: logging.Logger,
) -> None:
    """Log that recipe, parallelism or packages of a checkpoint differ from those of this run."""
    if manifest["recipe_sha256"] != facts["recipe_sha256"]:
        recipe = manifest.get("recipe")  # checkpoints of older versions have only the digest
        changed = changes(upgrade_recipe(recipe or {}), facts["recipe"])
        if not recipe:
            logger.warning(
                "%s was saved with a different recipe, which the checkpoint does not contain", path
            )
        elif changed:  # otherwise only the order of keys is different
            logger.warning("%s was saved with a different recipe: %s", path, "; ".join(changed))
    if not has_rng:
        logger.warning(
            "%s was saved by %s ranks with layout %s, and this run has %s ranks with layout "
            "%s: random number generators are seeded again",
            path,
            manifest["world_size"],
            _sizes_above_one(manifest["layout"]),
            facts["world_size"],
            _sizes_above_one(facts["layout"]),
        )
    now = {"torch": str(torch.__version__), **installed_versions()}
    saved = {}
    if "versions" in manifest:
        saved = {name: manifest["versions"].get(name, "not installed") for name in PACKAGES}
        if IMAGE_KERNELS in now and IMAGE_KERNELS in manifest["versions"]:
            saved[IMAGE_KERNELS] = manifest["versions"][IMAGE_KERNELS]
    else:
        # Older checkpoints store the version of transformers in the loader state.
        with suppress(KeyError, TypeError):
            saved["transformers"] = str(state["data"]["content"]["settings"]["transformers"])
    saved["torch"] = manifest["torch"]
    pairs = ((name, saved[name], now.get(name, "not installed")) for name in sorted(saved))
    if version_changes := [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]:
        logger.warning(
            "%s was saved with different package versions (%s): samples and results may "
            "differ from an uninterrupted run. Install the saved versions for bitwise "
            "identical results",
            path,
            ", ".join(version_changes),
        )


def rng_prefix(group: SideGroup) -> str:
    """Return the prefix of the names of the random states of this rank."""
    return f"rng.rank-{group.rank}-of-{group.size}."


def _sizes_above_one(layout: dict[str, int]) -> dict[str, int]:
    """Return the parallel dimensions with a size above 1."""
    return {name: size for name, size in layout.items() if size != 1}


def as_checkpoint_error(what: str, error: CheckpointException) -> CheckpointError:
    """Return an error with one line per failed rank instead of the tracebacks of DCP."""
    lines = []
    for rank, (cause, _) in sorted(error.failures.items()):
        is_readable = isinstance(cause, OSError | CheckpointError)
        lines.append(f"rank {rank}: {cause if is_readable else repr(cause)}")
    return CheckpointError(f"{what}:\n{format_bullet_list(lines)}")


def format_bullet_list(lines: list[str]) -> str:
    """Return the first lines as a list."""
    shown = [f"  - {line}" for line in lines[:_MAX_SHOWN_PROBLEMS]]
    if len(lines) > _MAX_SHOWN_PROBLEMS:
        shown.append(f"  - and {len(lines) - _MAX_SHOWN_PROBLEMS} more")
    return "\n".join(shown)
