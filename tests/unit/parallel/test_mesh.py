"""What no mesh may be, with whatever sizes modules have."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from torchmm.parallel.mesh import ModuleMesh
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
