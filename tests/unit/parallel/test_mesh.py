"""Tests of meshes: rank order, communication backends and allocator settings."""

import logging
import os

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from torchmm.common.errors import ConfigError
from torchmm.parallel.mesh import (
    ALLOCATOR_VARIABLES,
    ModuleMesh,
    start_process_group,
    use_expandable_segments,
)
from torchmm.recipe.mesh_sizes import AXES
from torchmm.recipe.parallel_section import ParallelConfig


@pytest.mark.parametrize(
    ("ranks", "axis"),
    [
        ([[[[0], [2], [1], [3]]]], "shard"),
        ([[[[0]], [[3]], [[1]], [[2]]]], "replicate"),
        ([[[[1]]], [[[0]]]], "pipeline"),
        ([[[[0, 1]], [[3, 2]]]], "tensor"),
        ([[[[0], [1]], [[2], [3]]]], None),
    ],
)
def test_mesh_coordinates_follow_process_groups(ranks: list, axis: str | None) -> None:
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=AXES, _init_backend=False, _rank=0)
    if axis is None:
        assert ModuleMesh(mesh).mesh is mesh
    else:
        with pytest.raises(AssertionError, match=f"along {axis} are not in increasing order"):
            ModuleMesh(mesh)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "nccl"), ("cuda", "gloo")])
def test_backend_must_support_the_device(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the error, because a tensor-parallel step with gloo on CUDA causes a crash."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=f'parallel.backend = "{backend}".*{device} devices'):
        start_process_group(ParallelConfig(backend=backend), torch.device(device))


@pytest.mark.parametrize(
    ("device", "parallel", "environment", "expected"),
    [
        ("cuda", {}, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("cpu", {}, {}, {}),
        ("cuda", {}, {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
        ("cuda", {}, {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}),
        ("cuda", {"async_tensor_parallel": True}, {}, {}),
        (
            "cuda",
            {"async_tensor_parallel": True, "async_tensor_backend": "ring"},
            {},
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        ),
    ],
)
def test_expandable_segments_are_set_unless_excluded(
    device: str,
    parallel: dict,
    environment: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "environ", dict(environment))
    config = ParallelConfig(tensor=2, sequence_parallel=True, **parallel)
    with caplog.at_level(logging.INFO, logger="torchmm"):
        use_expandable_segments(torch.device(device), config)
    assert {k: v for k, v in os.environ.items() if k in ALLOCATOR_VARIABLES} == expected
    assert ("CUDA allocator" in caplog.text) == (device == "cuda")
    for name, value in expected.items():
        assert f"{name} = {value}" in caplog.text
