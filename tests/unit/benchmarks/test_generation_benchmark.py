"""The text generation benchmark: both programs generate the same tokens, or it fails."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from torchmm.parallel.mesh import ParallelMesh, build_mesh, start_process_group
from torchmm.recipe.parallel_section import ParallelConfig


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("generation")


@pytest.fixture
def mesh(benchmark_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ParallelMesh]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    start_process_group(ParallelConfig(backend="gloo"), benchmark_module.CPU)
    yield build_mesh(ParallelConfig(), benchmark_module.CPU)
    dist.destroy_process_group()


def test_generation_programs_generate_same_tokens(
    benchmark_module: ModuleType, mesh: ParallelMesh
) -> None:
    for name in benchmark_module.WORKLOADS:
        rows = benchmark_module.case_rows(name, "tiny", mesh)
        assert {row.case for row in rows} == {f"{name}, 6 new tokens"}
        assert all(row.ours > 0 for row in rows)
        assert [row.goal for row in rows] == [None, 1.0, None, None, 1.0]


def test_different_tokens_stop_benchmark(
    benchmark_module: ModuleType, mesh: ParallelMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_module, "written_by", lambda *_: [[1] * 6])
    with pytest.raises(
        ValueError, match="one prompt: torchmm and the baseline generate different tokens"
    ):
        benchmark_module.case_rows("one prompt", "tiny", mesh)
