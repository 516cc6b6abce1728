"""The files of a checkpoint: written through DCP, described by a manifest, never unpickled.

    step-N/
      rank-00000.safetensors ...  the tensor chunks each rank wrote, key "NAME[offset,offset]"
      index.json                  tensor name -> dtype, shape and which file holds which chunk
      state.json                  everything that is not a tensor
      MANIFEST.json               size and SHA-256 of each file above; written last

torch.distributed.checkpoint (DCP) plans who writes and who reads which chunk, so a checkpoint
fits any layout; this module is its storage. Rejected: DCP's own formats. `.metadata` and its
object entries are pickles that run code when loaded. Its Hugging Face writer avoids that but
serializes a rank's whole share in memory before writing, hashes nothing, writes no index, so that
every rank has to open every file, and infers a tensor's size from the chunks it finds, so that a
missing file goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
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
from torchmm.common.files import canonical_json, naming_the_file, write_synced
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


class _GivenStorage:
    """What DCP asks of a storage that serves one save or load and is never picked by path."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to reset."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether a path could be one of this storage."""
        return isinstance(checkpoint_id, Path)


class SafetensorsWriter(_GivenStorage, StorageWriter):
    """DCP storage that writes one file per rank into a new directory next to `target`.

    Nobody reads a directory until `commit` renames it, so a save that dies leaves nothing that
    looks like a checkpoint. The coordinator (rank 0) picks the directory's unique name and hands
    it out with the plan: no name is ever used twice. Where nodes write to disks of their own, each
    of them has a directory of that name.

    Args:
        target: what the directory shall be called once it is complete; on this rank's node.
        rank: this one.
        note: JSON that the coordinator gets from every rank before anything is written.
        commit: called on the coordinator with (temporary directory, all notes, all files)
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
        """The directory being written, once this rank knows."""
        self._notes: list[dict[str, Any]] = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Sends this rank's note to the coordinator."""
        return replace(plan, storage_data=self.note)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Creates the directory and names each rank's file."""
        self._notes = [plan.storage_data for plan in plans]
        self.temporary = self.target.with_name(f"{self.target.name}.tmp-{uuid4().hex}")
        self.temporary.mkdir(parents=True)
        return [replace(plan, storage_data=self.temporary.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's chunks; returns the written file as each chunk's storage data."""
        future: Future[list[WriteResult]] = Future()
        results = []
        self.temporary = self.target.with_name(plan.storage_data)
        self.temporary.mkdir(parents=True, exist_ok=True)
        if plan.items:
            file = _write_chunks(self.temporary / file_of(self._rank), plan.items, planner)
            results = [WriteResult(i.index, _size_bytes(i), file) for i in plan.items]
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index and commits (coordinator only, after all ranks have written)."""
        assert self.temporary is not None
        written = [result for of_rank in results for result in of_rank]
        index = canonical_json(_index_of(metadata, written))
        write_synced(self.temporary / INDEX_NAME, index)
        files = {result.storage_data for result in written}
        files.add(WrittenFile(INDEX_NAME, len(index), hashlib.sha256(index).hexdigest()))
        self.commit(self.temporary, self._notes, sorted(files, key=lambda f: f.name))

    def discard(self) -> None:
        """Removes the directory of a save that failed."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)


class SafetensorsReader(_GivenStorage, StorageReader):
    """DCP storage that reads what `SafetensorsWriter` wrote; `path` must have been verified."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[MetadataIndex, str] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Tensor sizes and chunks, from the index."""
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
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan stays as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans stay as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies the requested slices into the planner's tensors; files are memory-mapped."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._files[item.storage_index]].append(item)
        for name, items in by_file.items():
            with safe_open(self.path / name, framework="pt") as file:
                for item in items:
                    _read_item(file, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def file_of(rank: int) -> str:
    """What the file is called that a rank writes."""
    return f"rank-{rank:05}.safetensors"


def read_index(path: Path) -> dict[str, Any]:
    """Return tensor name -> {"dtype", "shape", "chunks": [{"offsets", "sizes", "file"}]}.

    Raises:
        CheckpointError: The index cannot be read, is not one, or names a file that the manifest of
            the checkpoint does not list.
    """
    file = path / INDEX_NAME
    files = read_manifest(path)["files"]
    index = read_json(file)
    try:
        for name, entry in index.items():
            valid = entry["dtype"] in _DTYPES and _are_sizes(entry["shape"])
            for chunk in entry["chunks"]:
                if chunk["file"] not in files:
                    raise CheckpointError(
                        f"{file}: {name} is in {chunk['file']!a}, which {MANIFEST_NAME} does not "
                        "list; use another checkpoint"
                    )
                valid = valid and _are_sizes(chunk["offsets"]) and _are_sizes(chunk["sizes"])
            if not valid:
                raise CheckpointError(f"{file}: the entry of {name} is not that of a tensor")
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not the index of a checkpoint: {error!r}") from None
    return index


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def dtype_named(name: str) -> torch.dtype:
    """By its name in safetensors' files and in the index."""
    return _DTYPES[name]


def _index_of(metadata: Metadata, written: list[WriteResult]) -> dict[str, Any]:
    files = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data.name for r in written}
    index = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), name
        chunks = [
            {
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
                "file": files[name, tuple(chunk.offsets)],
            }
            for chunk in tensor.chunks
        ]
        dtype = _DTYPE_NAMES[tensor.properties.dtype]
        index[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
    return index


def _write_chunks(path: Path, items: list[WriteItem], planner: SavePlanner) -> WrittenFile:
    """Streams chunks into a new safetensors file, hashing on the way, and syncs it.

    Only one chunk at a time is copied from the device. Larger element types go first, which
    keeps every chunk aligned.
    """
    items = sorted(items, key=lambda item: -_tensor(item).properties.dtype.itemsize)
    header = _header(items)
    digest = hashlib.sha256()
    size_bytes = len(header) + sum(_size_bytes(item) for item in items)
    with naming_the_file(path, size_bytes), path.open("xb") as file:
        for block in _blocks(header, items, planner):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written_bytes = file.tell()
    assert written_bytes == size_bytes, f"{path}: {written_bytes=} {size_bytes=}"
    return WrittenFile(path.name, size_bytes, digest.hexdigest())


def _header(items: list[WriteItem]) -> bytes:
    """Length and JSON header of a safetensors file, padded to 8 bytes."""
    entries: dict[str, Any] = {}
    start = 0
    for item in items:
        end = start + _size_bytes(item)
        dtype = _DTYPE_NAMES[_tensor(item).properties.dtype]
        shape = list(_tensor(item).chunk.sizes)
        name = chunk_name(item.index.fqn, _tensor(item).chunk.offsets)
        assert name not in entries, name
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(header: bytes, items: list[WriteItem], planner: SavePlanner) -> Iterator[memoryview]:
    yield memoryview(header)
    for item in items:
        tensor = cast(Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
        data = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
        for start in range(0, len(data), _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]


def _read_item(file: Any, item: ReadItem, planner: LoadPlanner) -> None:
    offsets = item.storage_index.offset or ()
    window = zip(item.storage_offsets, item.lengths, strict=True)
    slices = tuple(slice(start, start + length) for start, length in window)
    source = file.get_slice(chunk_name(item.storage_index.fqn, offsets))[slices]
    target = planner.resolve_tensor(item).detach()
    assert source.shape == target.shape and source.dtype == target.dtype, item.storage_index
    target.copy_(source)
    planner.commit_tensor(item, target)


def chunk_name(name: str, offsets: Iterable[int]) -> str:
    """What a piece of a tensor is called in its file."""
    return f"{name}[{','.join(map(str, offsets))}]"


def _tensor(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
    return item.tensor_data


def _size_bytes(item: WriteItem) -> int:
    return math.prod(_tensor(item).chunk.sizes) * _tensor(item).properties.dtype.itemsize
