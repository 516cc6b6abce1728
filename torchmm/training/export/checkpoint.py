"""Convert a checkpoint to a Hugging Face directory, on one process with any amount of memory.

    export_checkpoint(Path("outputs/mine/checkpoints/step-400"), Path("exports/mine"))

The manifest of a checkpoint has the recipe, from which the model is built. A checkpoint has chunks
of tensors, by rank, in the dtype of training. Each tensor is assembled, in the requested dtype, in
an unnamed file that is mapped into memory. The operating system writes and reads its pages as
required, so a model may be larger than the memory. Chunks are read in blocks.

The loader of DCP is not used, because it loads all tensors into memory. The classes of Hugging Face
write the files, because a separate writer would have to repeat their changes of names and shapes.

A run does not export from its checkpoints in a child process. Most runs would write a checkpoint
only for the export and need disk space for three copies of the weights. With
`checkpoint.staging_dir` on local disks, no process can read a complete checkpoint.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import CheckpointError, UploadError
from torchmm.data.tokenizer import load_tokenizer
from torchmm.models.hf.adapter_files import save_adapters
from torchmm.models.hf.export import check_range, named_full_tensors
from torchmm.models.layered import LayeredModule
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.explain import upgrade_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.checkpoint.manifest import find_problems, read_manifest, step_of
from torchmm.training.checkpoint.state import AVERAGE_PREFIX, MODEL_PREFIX
from torchmm.training.checkpoint.storage import chunk_name, dtype_from_name, read_index
from torchmm.training.export.atomic_directory import (
    reject_existing,
    scratch_directory,
    write_directory_atomically,
)
from torchmm.training.export.model_files import TrainingSummary, write_files

SHARD_BYTES = 5 * 10**9
"""Maximum size of a weight file, similar to that of other tools."""
BLOCK_BYTES = 16 << 20
_ALIGNED = 64
HUB_ERRORS: tuple[type[Exception], ...] = (
    HFValidationError,
    *(error for error in HfHubHTTPError.__mro__ if error not in (Exception, BaseException, object)),
)
"""Errors of the Hub client and of its HTTP library, which differs between versions."""


def export_checkpoint(
    path: Path,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    separate: bool = False,
    averaged: bool = False,
) -> None:
    """Write the model of a checkpoint in Hugging Face format.

    Args:
        path: Checkpoint directory named "step-N".
        directory: Directory to create. It must not exist.
        dtype: Dtype of the weights. If None, use the dtype of the parameters in the checkpoint.
        shard_bytes: Maximum size of a weight file.
        separate: Whether to write only the adapters, in PEFT format, instead of merging them.
        averaged: Whether to export the weights averaged over steps.

    Raises:
        CheckpointError: The checkpoint is damaged or does not match its recipe, or the disk is
            full.
        ConfigError: The directory exists, another process writes it, the model of the recipe
            cannot be built, or a weight is out of the range of `dtype`.
    """
    reject_existing(directory)
    if problems := find_problems(path):
        raise CheckpointError(f"{path} is corrupt: {'; '.join(problems[:3])}")
    recipe = read_checkpoint_recipe(path)
    model = recipe_model(recipe, dtype or DTYPES[recipe.training.parameter_dtype])
    tokenizer = load_tokenizer(recipe.model)
    trained = TrainingSummary(recipe, step_of(path) or 0, path.parent.parent / "metrics.jsonl")
    try:
        with (
            write_directory_atomically(directory, replaces=False) as output,
            scratch_directory(directory.parent) as scratch,
        ):
            weights = CheckpointWeights(path, scratch, averaged)
            if separate:
                save_adapters(model, output, weights)
            else:
                write_files(model, output, tokenizer, trained, weights, shard_bytes)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot write {directory}: {reason}; an export requires free space for two "
            "copies of the model weights"
        ) from error


def push(directory: Path, name: str, private: bool) -> str:
    """Upload an export to the Hugging Face Hub, and return its URL.

    Args:
        directory: Directory of the export.
        name: Repository as OWNER/NAME. It is created if it does not exist.
        private: Whether a new repository is private.

    Raises:
        UploadError: The Hub rejected the export or cannot be reached.
    """
    api = HfApi()
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=directory, commit_message="Export of torchmm"
        )
    except HUB_ERRORS as error:
        text = str(error).strip().partition("\n")[0]
        raise UploadError(
            f"{directory} was not uploaded to {name}: {text}. The local directory is "
            f"complete; set HF_TOKEN to a token with write access, and run `hf upload {name} "
            f"{shlex.quote(str(directory))}`"
        ) from error
    return str(repository)


def read_checkpoint_recipe(path: Path) -> Recipe:
    """Return the recipe of the run that saved a checkpoint.

    Raises:
        CheckpointError: The checkpoint has no recipe, or a recipe of another version of torchmm.
    """
    table = read_manifest(path).get("recipe")
    if not table:
        raise CheckpointError(
            f"{path} contains no recipe, because an older version of torchmm saved it"
        )
    try:
        return Recipe.model_validate(upgrade_recipe(table))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path} was saved with a recipe of another version: {key}: {first['msg']}; "
            "export it with that version"
        ) from error


class _ChunkLocation(NamedTuple):
    """Location of a chunk of a tensor in a file of the checkpoint."""

    start: int
    """Offset in bytes."""
    dtype: torch.dtype
    shape: list[int]


class CheckpointWeights:
    """Weights of a checkpoint, an implementation of `torchmm.models.hf.export.WeightSource`.

    Args:
        path: Checkpoint whose files match its manifest.
        scratch: Existing directory with space for the weights of the model.
        averaged: Whether to use moving averages for all weights that have one.

    Raises:
        CheckpointError: The index cannot be read, or has no averages.
    """

    def __init__(self, path: Path, scratch: Path, averaged: bool = False) -> None:
        self._averaged = averaged
        self._path = path
        self._scratch = scratch
        self._index = read_index(path)
        self._chunk_locations = cache(lambda name: _read_chunk_locations(path / name))
        if averaged and not any(name.startswith(AVERAGE_PREFIX) for name in self._index):
            raise CheckpointError(
                f"{path} has no averaged weights, because training.ema_decay was not set"
            )

    def __call__(
        self, model: MultimodalModel, is_selected: Callable[[str], bool]
    ) -> Iterator[tuple[LayeredModule, str, Tensor]]:
        """Yield every tensor whose name `is_selected` accepts.

        Raises:
            CheckpointError: A tensor is missing, or has a different shape.
        """
        for prefix, module, name, example in named_full_tensors(model):
            if is_selected(name):
                entry = f"{AVERAGE_PREFIX}{prefix}.{name}"
                if not self._averaged or entry not in self._index:
                    entry = f"{MODEL_PREFIX}{prefix}.{name}"
                yield module, name, self._assemble_tensor(entry, example)

    def _assemble_tensor(self, name: str, example: Tensor) -> Tensor:
        """Assemble a tensor from its chunks in a mapped file and return it."""
        shape = example.shape
        entry = self._index.get(name)
        if entry is None or entry["shape"] != list(shape):
            has = "lacks it" if entry is None else f"has it as {entry['shape']}"
            raise CheckpointError(
                f"{self._path} {has}: {name} of shape {list(shape)}; its recipe describes a "
                "different model"
            )
        stored = dtype_from_name(entry["dtype"])
        mapped_file, tensor = self._new_mapped_tensor(
            shape, example.dtype if stored.is_floating_point else stored
        )
        for chunk in entry["chunks"]:
            window = tuple(
                slice(start, start + size)
                for start, size in zip(chunk["offsets"], chunk["sizes"], strict=True)
            )
            location = self._chunk_locations(chunk["file"])[chunk_name(name, chunk["offsets"])]
            with (self._path / chunk["file"]).open("rb") as file:
                _read_chunk(tensor[window], file, location, name)
        if mapped_file is not None:
            mapped_file.madvise(
                mmap.MADV_DONTNEED
            )  # `save_pretrained` reads the pages from the file
        return tensor

    def clone_tensors(self, values: list[Tensor]) -> list[Tensor]:
        """Return copies of tensors in one mapped file.

        A process can map about 65,000 files, which is less than the number of experts of some
        models.
        """
        stops = list(accumulate(-(-value.nbytes // _ALIGNED) * _ALIGNED for value in values))
        mapped_file = self._new_mapped_file(stops[-1]) if values else None
        copies = []
        for value, start in zip(values, [0, *stops], strict=False):
            count = value.numel()
            copied = torch.frombuffer(mapped_file, dtype=value.dtype, count=count, offset=start)
            copies.append(copied.view(value.shape).copy_(value))
        return copies

    def _new_mapped_tensor(
        self, shape: torch.Size, dtype: torch.dtype
    ) -> tuple[mmap.mmap | None, Tensor]:
        """Return a mapped file, which exists as long as it is used, and a zero tensor in it."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes == 0:
            return None, torch.empty(shape, dtype=dtype)
        mapped_file = self._new_mapped_file(size_bytes)
        return mapped_file, torch.frombuffer(mapped_file, dtype=dtype).view(shape)

    def _new_mapped_file(self, size_bytes: int) -> mmap.mmap:
        """Return a new mapped file without a name."""
        with tempfile.TemporaryFile(dir=self._scratch) as file:
            # Writing to a page without a disk block would kill the process.
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            return mmap.mmap(file.fileno(), size_bytes)


def _read_chunk(target: Tensor, file: BinaryIO, location: _ChunkLocation, name: str) -> None:
    """Copy a stored chunk into its slice of the tensor `name`, in blocks of rows."""
    rows_RN = target.view(1) if target.ndim == 0 else target
    row_bytes = math.prod(location.shape[1:]) * location.dtype.itemsize
    count = max(1, BLOCK_BYTES // max(1, row_bytes))
    file.seek(location.start)
    for first in range(0, len(rows_RN), count):
        block = rows_RN[first : first + count]
        data = bytearray(block.numel() * location.dtype.itemsize)
        if not data:
            continue
        if file.readinto(data) < len(data):  # type: ignore[attr-defined]
            raise CheckpointError(f"{file.name} is truncated; verify the checkpoint")
        values = torch.frombuffer(data, dtype=location.dtype).view(block.shape)
        block.copy_(values)
        if block.dtype != values.dtype:
            parameter = name.removeprefix(MODEL_PREFIX).removeprefix(AVERAGE_PREFIX)
            check_range(block, values, parameter)


def _read_chunk_locations(file: Path) -> dict[str, _ChunkLocation]:
    """Return the locations of the tensors of a safetensors file, from its header.

    Raises:
        CheckpointError: The header is damaged.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise CheckpointError(
                f"{file} has a header of {length} bytes, which is larger than the file"
            )
        text = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        return {
            name: _ChunkLocation(
                8 + length + entry["data_offsets"][0],
                dtype_from_name(entry["dtype"]),
                entry["shape"],
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{file} has no valid safetensors header: {error!r}") from None
