"""All-gather of small host values: numbers and strings."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist


def host_collective_device() -> torch.device:
    """Return the device for collectives of host values.

    It is the CPU if the process group supports it, so that the host does not wait for the GPU.
    """
    return torch.device("cpu" if "cpu" in dist.get_backend_config() else "cuda")


def gather_floats(values: Sequence[float]) -> list[list[float]]:
    """Return the values of all ranks, by rank. Collective.

    One call per step exchanges all values that ranks must agree on: loss, gradient norm, stop
    requests (`StopSignal`) and failed background saves.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [list(values)]
    mine_N = torch.tensor(values, dtype=torch.float64, device=host_collective_device())
    all_RN = mine_N.new_empty(dist.get_world_size() * len(values))
    dist.all_gather_into_tensor(all_RN, mine_N)
    return all_RN.view(-1, len(values)).tolist()


def gather_texts(text: str) -> list[str]:
    """Return the strings of all ranks, by rank. Collective."""
    data = text.encode()
    sizes = [int(size) for [size] in gather_floats([len(data)])]
    if len(sizes) == 1:
        return [text]
    device = host_collective_device()
    local = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    if data:
        local[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = local.new_empty(len(sizes) * len(local))
    dist.all_gather_into_tensor(gathered, local)
    rows = gathered.view(len(sizes), -1).cpu().numpy()
    return [rows[rank, :size].tobytes().decode() for rank, size in enumerate(sizes)]


def ranks_on_host() -> list[int]:
    """Return the ranks on this machine, or of this launcher if several share it. Collective."""
    machines = gather_texts(f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}")
    rank = dist.get_rank() if dist.is_initialized() else 0
    return [other for other, machine in enumerate(machines) if machine == machines[rank]]
