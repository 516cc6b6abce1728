"""Files of a checkpoint: written through DCP, listed in a manifest, without pickles.

    step-N/
      rank-00000.safetensors ...  the tensor chunks each rank wrote, key "NAME[offset,offset]"
      index.json                  tensor name -> dtype, shape and the file of each chunk
      state.json                  all values that are not tensors
      MANIFEST.json               size and SHA-256 of each file above; written last

torch.distributed.checkpoint (DCP) assigns chunks to ranks for writing and reading, so a checkpoint
can be loaded with any parallelism config. This module is the storage layer of DCP.

The file formats of DCP are not used. `.metadata` and its object entries are pickles that run code
when loaded. The Hugging Face writer of DCP avoids pickles, but it serializes all chunks of a rank
in memory, computes no hashes and writes no index. Every rank then has to open every file and infers
tensor sizes from the chunks, so that a missing file is not detected.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from torchmm.common.errors import CheckpointError
from torchmm.common.files import add_path_to_os_errors, canonical_json, write_synced
from torchmm.training.checkpoint.manifest import (
    MANIFEST_NAME,
    WrittenFile,
    read_json,
    read_manifest,
)

INDEX_NAME = "index.json"
_BLOCK_BYTES = 16 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _SingleUseStorage:
    """Methods of DCP for a storage object of one save or load, which is not selected by path."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True for paths."""
        return isinstance(checkpoint_id, Path)


class SafetensorsWriter(_SingleUseStorage, StorageWriter):
    """DCP storage that writes one file per rank into a new directory next to `target`.

    No process reads the directory until `commit` renames it, so an interrupted save leaves no
    directory with the name of a checkpoint. The coordinator (rank 0) generates the unique name of
    the directory and sends it with the plan. No name is used twice. If nodes write to local disks,
    each node has a directory of that name.

    Args:
        target: Name of the complete directory, on the node of this rank.
        rank: This rank.
        note: JSON object that the coordinator receives from every rank before any file is written.
        commit: Function that the coordinator calls with (temporary directory, all notes, all files)
            when every rank has written and synced its file.
    """

    def __init__(
        self,
        target: Path,
        rank: int,
        note: dict[str, Any],
        commit: Callable[[Path, list[dict[str, Any]], list[WrittenFile]], None],
    ) -> None:
        self.target = target
        self._rank = rank
        self.note = note
        self.commit = commit
        self.temporary: Path | None = None
        """Directory that is being written. None until this rank has received its name."""
        self._notes: list[dict[str, Any]] = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Send the note of this rank to the coordinator."""
        return replace(plan, storage_data=self.note)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the directory and send its name to all ranks."""
        self._notes = [plan.storage_data for plan in plans]
        self.temporary = self.target.with_name(f"{self.target.name}.tmp-{uuid4().hex}")
        self.temporary.mkdir(parents=True)
        return [replace(plan, storage_data=self.temporary.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the chunks of this rank. The storage data of each chunk is the written file."""
        future: Future[list[WriteResult]] = Future()
        results = []
        self.temporary = self.target.with_name(plan.storage_data)
        self.temporary.mkdir(parents=True, exist_ok=True)
        if plan.items:
            file = _write_chunks(self.temporary / rank_file_name(self._rank), plan.items, planner)
            results = [WriteResult(i.index, _size_bytes(i), file) for i in plan.items]
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and commit, on the coordinator, after all ranks have written."""
        assert self.temporary is not None
        written = [result for of_rank in results for result in of_rank]
        file_of_chunk = {
            (result.index.fqn, tuple(result.index.offset or ())): result.storage_data.name
            for result in written
        }
        index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), name
            chunks = [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": file_of_chunk[name, tuple(chunk.offsets)],
                }
                for chunk in tensor.chunks
            ]
            dtype = _DTYPE_NAMES[tensor.properties.dtype]
            index[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
        data = canonical_json(index)
        write_synced(self.temporary / INDEX_NAME, data)
        files = {result.storage_data for result in written}
        files.add(WrittenFile(INDEX_NAME, len(data), hashlib.sha256(data).hexdigest()))
        self.commit(self.temporary, self._notes, sorted(files, key=lambda f: f.name))

    def discard(self) -> None:
        """Remove the directory of a save that failed."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)


class SafetensorsReader(_SingleUseStorage, StorageReader):
    """DCP storage that reads checkpoints of `SafetensorsWriter`. `path` must have been verified."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[MetadataIndex, str] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return tensor sizes and chunks, from the index."""
        tensors = {}
        for name, entry in read_index(self.path).items():
            chunks = [
                ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"]))
                for c in entry["chunks"]
            ]
            properties = TensorProperties(dtype=_DTYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
            for chunk in entry["chunks"]:
                self._files[MetadataIndex(name, chunk["offsets"])] = chunk["file"]
        return Metadata(cast(dict[str, Any], tensors), storage_data=self._files)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the requested slices into the tensors of the planner. Files are memory-mapped."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._files[item.storage_index]].append(item)
        for name, items in by_file.items():
            with safe_open(self.path / name, framework="pt") as file:
                for item in items:
                    chunk = chunk_name(item.storage_index.fqn, item.storage_index.offset or ())
                    window = zip(item.storage_offsets, item.lengths, strict=True)
                    slices = tuple(slice(start, start + length) for start, length in window)
                    source = file.get_slice(chunk)[slices]
                    target = planner.resolve_tensor(item).detach()
                    matches = source.shape == target.shape and source.dtype == target.dtype
                    assert matches, item.storage_index
                    target.copy_(source)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def rank_file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05}.safetensors"


def read_index(path: Path) -> dict[str, Any]:
    """Return tensor name -> {"dtype", "shape", "chunks": [{"offsets", "sizes", "file"}]}.

    Raises:
        CheckpointError: The index cannot be read, is not valid, or names a file that is not listed
            in the manifest of the checkpoint.
    """
    file = path / INDEX_NAME
    files = read_manifest(path)["files"]
    index = read_json(file)
    try:
        for name, entry in index.items():
            valid = entry["dtype"] in _DTYPES and _is_shape(entry["shape"])
            for chunk in entry["chunks"]:
                if chunk["file"] not in files:
                    raise CheckpointError(
                        f"{file}: {name} is in {chunk['file']!a}, which {MANIFEST_NAME} does "
                        "not list; use another checkpoint"
                    )
                valid = valid and _is_shape(chunk["offsets"]) and _is_shape(chunk["sizes"])
            if not valid:
                raise CheckpointError(f"{file}: the entry of {name} does not describe a tensor")
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not a valid checkpoint index: {error!r}") from None
    return index


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of a name in safetensors files and in the index."""
    return _DTYPES[name]


def _write_chunks(path: Path, items: list[WriteItem], planner: SavePlanner) -> WrittenFile:
    """Write chunks into a new safetensors file, hash it during the write, and sync it.

    Only one chunk at a time is copied from the device. Chunks with larger element types are first,
    so that every chunk is aligned.
    """
    items = sorted(items, key=lambda item: -_tensor(item).properties.dtype.itemsize)

    # Length and JSON header, padded to 8 bytes.
    entries: dict[str, Any] = {}
    data_bytes = 0
    for item in items:
        chunk = _tensor(item).chunk
        name = chunk_name(item.index.fqn, chunk.offsets)
        assert name not in entries, name
        dtype = _DTYPE_NAMES[_tensor(item).properties.dtype]
        offsets = [data_bytes, data_bytes + _size_bytes(item)]
        entries[name] = {"dtype": dtype, "shape": list(chunk.sizes), "data_offsets": offsets}
        data_bytes = offsets[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text

    digest = hashlib.sha256(header)
    size_bytes = len(header) + data_bytes
    with add_path_to_os_errors(path, size_bytes), path.open("xb") as file:
        file.write(header)
        for item in items:
            tensor = cast(Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
            data = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
            for start in range(0, len(data), _BLOCK_BYTES):
                block = data[start : start + _BLOCK_BYTES]
                digest.update(block)
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written_bytes = file.tell()
    assert written_bytes == size_bytes, f"{path}: {written_bytes=} {size_bytes=}"
    return WrittenFile(path.name, size_bytes, digest.hexdigest())


def chunk_name(name: str, offsets: Iterable[int]) -> str:
    """Return the name of a chunk of a tensor in its file."""
    return f"{name}[{','.join(map(str, offsets))}]"


def _tensor(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
    return item.tensor_data


def _size_bytes(item: WriteItem) -> int:
    return math.prod(_tensor(item).chunk.sizes) * _tensor(item).properties.dtype.itemsize
