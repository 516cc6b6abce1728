"""Loading a checkpoint whose bytes have been compared with its manifest: into any layout.

Everything is compared before anything is loaded: names, shapes and dtypes of all ranks' tensors,
and what of them is trained. What does not fit is listed as a whole.
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
from torchmm.training.checkpoint.manifest import read_json, read_manifest
from torchmm.training.checkpoint.state import (
    AVERAGE_PREFIX,
    OptimizerState,
    Wish,
    average_tensors,
    empty_optimizer_state,
    find_misfits,
    find_mismatches,
    model_tensors,
    optimizer_tensors,
    trainable_names,
)
from torchmm.training.checkpoint.storage import SafetensorsReader, read_index
from torchmm.training.optimizers.average import WeightAverage

STATE_NAME = "state.json"
PACKAGES = ("transformers", "tokenizers", "numpy", "pillow", "av", "soundfile", "scipy")
"""Packages, besides torch, that samples and random numbers depend on; some may be missing."""
IMAGE_KERNELS = "attention of images"
"""Entry for the attention kernels of encoders with images of one size, a part of torchmm."""
_SHOWN_PROBLEMS = 20
_LEFT_OUT = "averages of weights, which are left out: training.ema_decay is not set"
_BEGUN = "no averages of weights; they begin as the weights after the next step"


@dataclass(frozen=True)
class Restored:
    """What a load found besides the tensors it put in place."""

    path: Path
    step: int
    state: dict[str, Any]
    """The JSON given to `save`."""
    rng: dict[str, Tensor] | None
    """This rank's random state for `restore_rng`, to be put back after the data loader's
    iterator exists (creating it draws random numbers). None if the checkpoint was saved by
    another number of ranks or in another layout, in which ranks that must draw alike were others;
    seed again, with `step` as a coordinate."""
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
) -> Restored:
    """Loads a checkpoint in place; collective.

    Args:
        optimizer: its state is replaced; None loads the model only.
        facts: what a manifest of this run would say, to tell what is another.
        average: is replaced; begins anew if the checkpoint has none.

    Raises:
        CheckpointError: it does not fit; nothing was loaded.
    """
    prefix = rng_prefix(group)
    manifest = read_manifest(path)
    index = read_index(path)
    saved = _read_state(path)
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
    mismatches = find_mismatches(index, tensors)
    wish = Wish(mismatches, list(tensors), trainable, averages is not None)
    problems = find_misfits(index, saved["trainable"], group.gather(wish))
    if problems:
        raise CheckpointError(
            f"{path} does not fit the model or what of it is trained:\n{bullets(problems)}\n"
            "Restore [model] and [freeze] of the recipe, or start another run: with another "
            'name, or checkpoint.resume = "none"'
        )
    same_layout = _sizes(manifest["layout"]) == _sizes(facts["layout"])
    rng = {
        name: torch.empty(entry["shape"], dtype=torch.uint8)
        for name, entry in index.items()
        if name.startswith(prefix) and same_layout
    }
    _read(path, tensors | rng, group)
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update(optimizer_state)
    if average is not None:
        average.restore(averages or {})
    if has_averages != (average is not None):
        logger.warning("%s has %s", path, _LEFT_OUT if has_averages else _BEGUN)
    _tell_what_is_another(path, manifest, facts, bool(rng), logger)
    if others := find_other_versions(manifest, saved["state"]):
        logger.warning(
            "%s was saved with other versions of packages (%s): samples and results may differ "
            "from those of an uninterrupted run. Install the saved versions to get the same bits",
            path,
            ", ".join(others),
        )
    rng = {name.removeprefix(prefix): value for name, value in rng.items()}
    return Restored(
        path, manifest["step"], saved["state"], rng or None, manifest.get("recipe") or {}
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of `PACKAGES` that are installed, and on a GPU `IMAGE_KERNELS`."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.cuda.is_available():
        found[IMAGE_KERNELS] = describe_image_kernels(torch.device("cuda"))
    return found


def find_other_versions(manifest: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Return "NAME SAVED -> NOW" for packages whose version differs from that of a checkpoint.

    Args:
        state: State of the run. Checkpoints of older versions of torchmm have the version of
            transformers in their data position, and no other but that of torch.
    """
    now = {"torch": str(torch.__version__), **installed_versions()}
    if "versions" in manifest:
        saved = {name: manifest["versions"].get(name, "not installed") for name in PACKAGES}
        if IMAGE_KERNELS in now and IMAGE_KERNELS in manifest["versions"]:
            saved[IMAGE_KERNELS] = manifest["versions"][IMAGE_KERNELS]
    else:
        saved = {}
        with suppress(KeyError, TypeError):
            saved["transformers"] = str(state["data"]["content"]["settings"]["transformers"])
    saved["torch"] = manifest["torch"]
    pairs = ((name, saved[name], now.get(name, "not installed")) for name in sorted(saved))
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]


def _read_state(path: Path) -> dict[str, Any]:
    """Return state.json; raise CheckpointError if it is not that of a checkpoint."""
    saved = read_json(path / STATE_NAME)
    kinds = {"state": dict, "trainable": list}
    if not isinstance(saved, dict) or any(
        not isinstance(saved.get(key), kind) for key, kind in kinds.items()
    ):
        raise CheckpointError(f"{path / STATE_NAME} is not the state of a run")
    return saved


def _tell_what_is_another(
    path: Path,
    manifest: dict[str, Any],
    facts: dict[str, Any],
    has_rng: bool,
    logger: logging.Logger,
) -> None:
    if manifest["recipe_sha256"] != facts["recipe_sha256"]:
        saved = manifest.get("recipe")  # checkpoints of older versions have only the digest
        changed = changes(saved or {}, facts["recipe"])
        if not saved:
            logger.warning("%s was saved under another recipe, which it does not hold", path)
        elif changed:  # otherwise only the order of keys is different
            logger.warning("%s was saved under another recipe: %s", path, "; ".join(changed))
    if not has_rng:
        logger.warning(
            "%s was saved by %s ranks in layout %s, now there are %s in %s: random streams "
            "start anew",
            path,
            manifest["world_size"],
            _sizes(manifest["layout"]),
            facts["world_size"],
            _sizes(facts["layout"]),
        )


def _read(path: Path, tensors: dict[str, Tensor], group: SideGroup) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.load(
            tensors,
            storage_reader=SafetensorsReader(path),
            planner=planner,
            process_group=group.group,
            no_dist=group.group is None,
        )
    except CheckpointException as error:
        raise as_checkpoint_error(f"cannot load {path}", error) from error


def rng_prefix(group: SideGroup) -> str:
    """Of the names of this rank's random states."""
    return f"rng.rank-{group.rank}-of-{group.size}."


def _sizes(layout: dict[str, int]) -> dict[str, int]:
    """The dimensions that a layout has: size 1 is none."""
    return {name: size for name, size in layout.items() if size != 1}


def as_checkpoint_error(what: str, error: CheckpointException) -> CheckpointError:
    """One line per failed rank; DCP's own text is a page of tracebacks."""
    lines = [f"rank {rank}: {_describe(e)}" for rank, (e, _) in sorted(error.failures.items())]
    return CheckpointError(f"{what}:\n{bullets(lines)}")


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError | CheckpointError) else repr(error)


def bullets(lines: list[str]) -> str:
    """The first lines, as a list."""
    shown = [f"  - {line}" for line in lines[:_SHOWN_PROBLEMS]]
    if len(lines) > _SHOWN_PROBLEMS:
        shown.append(f"  - and {len(lines) - _SHOWN_PROBLEMS} more")
    return "\n".join(shown)
