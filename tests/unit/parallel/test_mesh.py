"""What no mesh may be, with whatever sizes modules have, and which ranks do not even meet."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from torchmm.common.errors import ConfigError
from torchmm.parallel.mesh import ModuleMesh, start_process_group
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.sizes import AXES


@pytest.mark.parametrize(
    ("ranks", "wrong"),
    [
        ([[[[0], [2], [1], [3]]]], "shard"),
        ([[[[0]], [[3]], [[1]], [[2]]]], "replicate"),
        ([[[[1]]], [[[0]]]], "pipeline"),
        ([[[[0, 1]], [[3, 2]]]], "tensor"),
        ([[[[0], [1]], [[2], [3]]]], None),
    ],
)
def test_coordinates_follow_the_order_of_process_groups(ranks: list, wrong: str | None) -> None:
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=AXES, _init_backend=False, _rank=0)
    if wrong is None:
        assert ModuleMesh(mesh).mesh is mesh
    else:
        with pytest.raises(AssertionError, match=f"along {wrong} do not ascend"):
            ModuleMesh(mesh)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "nccl"), ("cuda", "gloo")])
def test_a_backend_that_does_not_carry_the_devices_tensors_is_refused(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo, a tensor-parallel step on CUDA ends with a segmentation fault."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=f'parallel.backend = "{backend}".*{device} devices'):
        start_process_group(ParallelConfig(backend=backend), torch.device(device))
