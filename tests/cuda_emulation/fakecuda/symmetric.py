"""Emulation of symmetric memory between local processes with files in /dev/shm."""

from __future__ import annotations

import mmap
import os
import time
from math import prod
from pathlib import Path

import torch

_CHANNELS = 8


class Handle:
    """Result of `_SymmetricMemory.rendezvous`, with the methods that operators of torch use."""

    def __init__(self, group: str, rank: int, world_size: int, size: int, number: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._group, self._size = group, size
        self._files = [self._open(peer, number) for peer in range(world_size)]
        self._buffers = [_device_tensor(m, size) for m in self._files]
        self._counters = [
            torch.frombuffer(m, dtype=torch.int64, offset=size, count=_CHANNELS)
            for m in self._files
        ]

    def _open(self, peer: int, number: int) -> mmap.mmap:
        run = f"{os.environ.get('MASTER_PORT', '0')}-{os.environ.get('TORCHELASTIC_RUN_ID', '0')}"
        path = Path(f"/dev/shm/fakecuda-{run}-{self._group}-{number}-{peer}")
        length = self._size + 8 * _CHANNELS
        if peer == self.rank:
            hidden = path.with_suffix(".new")
            hidden.write_bytes(bytes(length))
            hidden.rename(path)
        while not path.exists():
            time.sleep(1e-3)
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), length)

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        nbytes = prod(sizes) * dtype.itemsize
        begin = storage_offset * dtype.itemsize
        if begin + nbytes > self._size:
            raise RuntimeError(f"get_buffer: {begin} + {nbytes} bytes of {self._size}")
        return self._buffers[rank][begin : begin + nbytes].view(dtype).view(tuple(sizes))

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait on the host, because copies are synchronous. A GPU waits in a stream."""
        from fakecuda import ext

        ext.note("comm", "symm_barrier", f"symm-{self._group}-{channel}|")
        local = self._counters[self.rank]
        local[channel] += 1
        expected = int(local[channel])
        begin = time.monotonic()
        while any(int(c[channel]) < expected for c in self._counters):
            time.sleep(0)
            if time.monotonic() - begin > 120:
                raise RuntimeError(
                    f"symmetric memory barrier, channel {channel}: a rank did not arrive"
                )


def _device_tensor(memory: mmap.mmap, size: int):
    from fakecuda import ext

    host = torch.frombuffer(memory, dtype=torch.uint8, count=size)
    return ext.on_device(host)


def install() -> None:
    import torch.distributed._symmetric_memory as symmetric
    from torch.distributed import distributed_c10d as c10d

    workspaces: dict[str, Handle] = {}
    sizes: dict[str, int] = {}

    def get_symm_mem_workspace(group_name, min_size):
        from fakecuda import ext

        if sizes.get(group_name, 0) < min_size:
            group = c10d._resolve_process_group(group_name)
            size = (max(min_size, sizes.get(group_name, 0)) + 4095) // 4096 * 4096
            number = sizes.get(f"{group_name} number", 0) + 1
            ext.note("symm_workspace", "new workspace", str(size))
            workspaces[group_name] = Handle(group_name, group.rank(), group.size(), size, number)
            sizes[group_name], sizes[f"{group_name} number"] = size, number
        return workspaces[group_name]

    symmetric.get_symm_mem_workspace = get_symm_mem_workspace
    symmetric.rendezvous = lambda tensor, group: None  # no tensor of a run is in symmetric memory
    torch.cuda._sleep = lambda cycles: None
