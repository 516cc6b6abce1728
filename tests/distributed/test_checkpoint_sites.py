"""Nodes that share no directory: each writes and copies its own files, and all resume the same.

A rank with a directory of its own stands for a node: nothing else tells where ranks are.
"""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import run_distributed
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.extensions.remote.checkpoints.remote import RemoteCheckpoints
from torchmm.parallel.health.peers import SideGroup
from torchmm.recipe.training_section import CheckpointConfig
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.checkpoint.shared_filesystem import DirectoryGroup
from torchmm.training.checkpoint.store import step_of_upload_folder

logger = logging.getLogger("test_checkpoint_sites")


def build(seed: int):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    if dist.is_initialized():
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def train(model, optimizer) -> None:
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model, optimizer) -> list[np.ndarray]:
    """Every value, gathered."""
    values = [p.detach() for p in model.parameters()]
    values += [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    full = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in values]
    return [v.numpy().copy() for v in full]


def open_manager(place: Path, nodes: int, run: str = "run", **config) -> CheckpointManager:
    """Of a run on `nodes` nodes, whose disks are folders of `place`."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    node = rank * nodes // ranks
    settings = CheckpointConfig(
        remote_dir=str(place / "store"),
        staging_dir=str(place / f"{run}-disk{node}"),
        **{"async_save": False, **config},
    )
    run_dir = place / f"{run}-out{node}" / "run"
    return CheckpointManager(settings, run_dir, logger, {"shard": ranks}, "recipe")


def start(ranks: int) -> None:
    if ranks > 1:
        dist.init_process_group("gloo")


def save(
    place: Path, ranks: int, nodes: int, steps: list[int], asynchronous: bool = False
) -> list[np.ndarray]:
    """Trains and saves, each step copied before the next; the last state."""
    start(ranks)
    model, optimizer = build(seed=1)
    with open_manager(place, nodes, async_save=asynchronous) as manager:
        for step in steps:
            train(model, optimizer)
            manager.save(step, model, optimizer, {"position": step})
            manager.wait()
            manager._uploads.wait()
            assert manager.status_warning == ""
    return whole(model, optimizer)


def resume(place: Path, ranks: int, nodes: int, run: str):
    """Step and state that a start finds."""
    start(ranks)
    model, optimizer = build(seed=2)
    with open_manager(place, nodes, run) as manager:
        restored = manager.resume(model, optimizer)
    return restored.step, restored.state, whole(model, optimizer), restored.rng is not None


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(map(np.array_equal, a, b))


def committed(place: Path) -> list[str]:
    return RemoteCheckpoints(f"{place}/store/run", 1.0, logger).committed()


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_what_two_nodes_saved_is_resumed_by_others(tmp_path, asynchronous):
    states = run_distributed(save, 2, tmp_path, 2, 2, [1, 2], asynchronous)
    assert equal(*states)
    disks = [{p.name for p in (tmp_path / f"run-disk{n}/run/step-2").iterdir()} for n in (0, 1)]
    assert "rank-00001.safetensors" not in disks[0] and "rank-00000.safetensors" not in disks[1]
    assert "rank-00001.safetensors" in disks[1] and "rank-00000.safetensors" in disks[0]
    for run, nodes in (("run", 2), ("others", 2), ("one", 1)):
        for step, state, found, has_rng in run_distributed(resume, 2, tmp_path, 2, nodes, run):
            assert (step, state) == (2, {"position": 2}) and has_rng
            assert equal(found, states[0])
    step, _, found, has_rng = run_distributed(resume, 1, tmp_path, 1, 1, "single")[0]
    assert step == 2 and equal(found, states[0]) and not has_rng


def test_all_nodes_take_the_older_one_where_the_newest_is_damaged(tmp_path):
    older = run_distributed(save, 2, tmp_path, 2, 2, [1, 2])[0]
    newest = tmp_path / "store/run" / committed(tmp_path)[0]
    file = newest / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = run_distributed(resume, 2, tmp_path, 2, 2, "others")
    assert [step for step, *_ in found] == [1, 1]
    assert equal(found[0][2], found[1][2]) and not equal(found[0][2], older)


def save_and_lose_a_copy(place: Path) -> list[str]:
    """Rank 1's file of step 2 does not get there; that of step 3 does."""
    start(2)
    real = RemoteCheckpoints.put
    model, optimizer = build(seed=1)
    complaints = []
    with open_manager(place, 2, keep_latest=3) as manager:
        for step in (1, 2, 3):
            RemoteCheckpoints.put = real
            if step == 2 and dist.get_rank() == 1:
                RemoteCheckpoints.put = fail
            train(model, optimizer)
            manager.save(step, model, optimizer, {})
            manager._uploads.wait()
            complaints.append(manager.status_warning)
    return complaints


def fail(remote: RemoteCheckpoints, folder: str, file: Path) -> int:
    raise OSError("the cable is out")


def test_a_copy_that_fails_on_one_node_fails_on_all_and_the_next_is_made(tmp_path):
    for complaints in run_distributed(save_and_lose_a_copy, 2, tmp_path):
        assert complaints[0] == complaints[2] == ""
        assert "step-2 was not uploaded to" in complaints[1]
        assert "rank 1: the cable is out" in complaints[1]
    assert [step_of_upload_folder(folder) for folder in committed(tmp_path)] == [3, 1]


def sites(place: Path) -> tuple[int, int, bool]:
    """This rank's in three layouts of directories, the last of which cannot be."""
    start(4)
    group = SideGroup.create()
    rank = dist.get_rank()
    together = DirectoryGroup.find(group, place / "all")
    assert (together.rank, together.size, together.is_leader) == (rank, 4, rank == 0)
    apart = DirectoryGroup.find(group, place / f"node{rank // 2}")
    group.gather(None)
    assert not any(p.name.startswith(".rank") for p in (place / f"node{rank // 2}").iterdir())
    (place / "file").touch()
    with pytest.raises(ConfigError, match="rank 3 cannot write"):
        DirectoryGroup.find(group, place / "all" if rank < 3 else place / "file" / "below")
    with pytest.raises(CheckpointError, match="of rank 2"):
        apart.run_on_local_leaders(lambda: complain(rank))
    return apart.rank, apart.size, apart.is_leader


def complain(rank: int) -> None:
    if rank == 2:
        raise CheckpointError("of rank 2")


def test_sites_are_found_by_what_ranks_see(tmp_path):
    found = run_distributed(sites, 4, tmp_path)
    assert found == [(0, 2, True), (1, 2, False), (0, 2, True), (1, 2, False)]
