"""Checkpoints of nodes without a shared directory: each node uploads its files, and all resume.

Each node is simulated by ranks with a separate directory.
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
from torchmm.extensions.remote.checkpoints.remote_checkpoints import RemoteCheckpoints
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


def gather_values(model, optimizer) -> list[np.ndarray]:
    """Gather all values of the model and the optimizer."""
    values = [p.detach() for p in model.parameters()]
    values += [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    full = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in values]
    return [v.numpy().copy() for v in full]


def open_manager(root: Path, nodes: int, run: str = "run", **config) -> CheckpointManager:
    """Return the manager of a run on `nodes` nodes, whose disks are folders in `root`."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    node = rank * nodes // ranks
    settings = CheckpointConfig(
        remote_dir=str(root / "store"),
        staging_dir=str(root / f"{run}-disk{node}"),
        **{"async_save": False, **config},
    )
    run_dir = root / f"{run}-out{node}" / "run"
    return CheckpointManager(settings, run_dir, logger, {"shard": ranks}, "recipe")


def start(ranks: int) -> None:
    if ranks > 1:
        dist.init_process_group("gloo")


def save(
    root: Path, ranks: int, nodes: int, steps: list[int], asynchronous: bool = False
) -> list[np.ndarray]:
    """Train and save, upload each step before the next, and return the last state."""
    start(ranks)
    model, optimizer = build(seed=1)
    with open_manager(root, nodes, async_save=asynchronous) as manager:
        for step in steps:
            train(model, optimizer)
            manager.save(step, model, optimizer, {"position": step})
            manager.wait()
            manager._uploads.wait()
            assert manager.status_warning == ""
    return gather_values(model, optimizer)


def resume(root: Path, ranks: int, nodes: int, run: str):
    """Return the step, the loader state and the values that a start restores."""
    start(ranks)
    model, optimizer = build(seed=2)
    with open_manager(root, nodes, run) as manager:
        restored = manager.resume(model, optimizer)
    return restored.step, restored.state, gather_values(model, optimizer), restored.rng is not None


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(map(np.array_equal, a, b))


def committed(root: Path) -> list[str]:
    return RemoteCheckpoints(f"{root}/store/run", 1.0, logger).committed()


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_checkpoint_of_two_nodes_resumes_on_other_nodes(tmp_path, asynchronous):
    states = run_distributed(save, 2, tmp_path, 2, 2, [1, 2], asynchronous)
    assert equal(*states)
    disks = [{p.name for p in (tmp_path / f"run-disk{n}/run/step-2").iterdir()} for n in (0, 1)]
    assert "rank-00001.safetensors" not in disks[0] and "rank-00000.safetensors" not in disks[1]
    assert "rank-00001.safetensors" in disks[1] and "rank-00000.safetensors" in disks[0]
    for run, nodes in (("run", 2), ("others", 2), ("one", 1)):
        for step, state, values, has_rng in run_distributed(resume, 2, tmp_path, 2, nodes, run):
            assert (step, state) == (2, {"position": 2}) and has_rng
            assert equal(values, states[0])
    step, _, values, has_rng = run_distributed(resume, 1, tmp_path, 1, 1, "single")[0]
    assert step == 2 and equal(values, states[0]) and not has_rng


def test_damaged_upload_resumes_older_on_all_nodes(tmp_path):
    newest_values = run_distributed(save, 2, tmp_path, 2, 2, [1, 2])[0]
    newest = tmp_path / "store/run" / committed(tmp_path)[0]
    file = newest / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    resumed = run_distributed(resume, 2, tmp_path, 2, 2, "others")
    assert [step for step, *_ in resumed] == [1, 1]
    assert equal(resumed[0][2], resumed[1][2]) and not equal(resumed[0][2], newest_values)


def save_with_failed_upload(root: Path) -> list[str]:
    """Save three steps, and fail the upload of step 2 on rank 1."""
    start(2)
    real = RemoteCheckpoints.put
    model, optimizer = build(seed=1)
    complaints = []
    with open_manager(root, 2, keep_latest=3) as manager:
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
    raise OSError("cable disconnected")


def test_failed_upload_skips_checkpoint_on_all_nodes(tmp_path):
    for complaints in run_distributed(save_with_failed_upload, 2, tmp_path):
        assert complaints[0] == complaints[2] == ""
        assert "step-2 was not uploaded to" in complaints[1]
        assert "rank 1: cable disconnected" in complaints[1]
    assert [step_of_upload_folder(folder) for folder in committed(tmp_path)] == [3, 1]


def check_directory_groups(root: Path) -> tuple[int, int, bool]:
    """Return the directory group of this rank for valid directories, and check invalid ones."""
    start(4)
    group = SideGroup.create()
    rank = dist.get_rank()
    shared = DirectoryGroup.find(group, root / "all")
    assert (shared.rank, shared.size, shared.is_leader) == (rank, 4, rank == 0)
    per_node = DirectoryGroup.find(group, root / f"node{rank // 2}")
    group.gather(None)
    assert not any(p.name.startswith(".rank") for p in (root / f"node{rank // 2}").iterdir())
    (root / "file").touch()
    with pytest.raises(ConfigError, match="rank 3 cannot write"):
        DirectoryGroup.find(group, root / "all" if rank < 3 else root / "file" / "below")
    with pytest.raises(CheckpointError, match="of rank 2"):
        per_node.run_on_local_leaders(lambda: fail_on_rank_2(rank))
    return per_node.rank, per_node.size, per_node.is_leader


def fail_on_rank_2(rank: int) -> None:
    if rank == 2:
        raise CheckpointError("of rank 2")


def test_directory_groups_follow_shared_directories(tmp_path):
    groups = run_distributed(check_directory_groups, 4, tmp_path)
    assert groups == [(0, 2, True), (1, 2, False), (0, 2, True), (1, 2, False)]
