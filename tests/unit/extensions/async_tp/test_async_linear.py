"""Overlapped linear layers in one process: shapes, opcheck, saved tensors and misuse."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.nn import functional

from torchmm.common.errors import ConfigError
from torchmm.extensions.async_tp import selection as overlap_choice
from torchmm.extensions.async_tp.backends import (
    BACKENDS,
    CollectiveBackend,
    RingBackend,
    SymmetricMemoryBackend,
)
from torchmm.extensions.async_tp.linear import (
    Overlap,
    gather_linear,
    gather_slices,
    linear_scatter,
)
from torchmm.extensions.async_tp.styles import PrecomputedColumn, ScopeInput
from torchmm.parallel import torch_compat
from torchmm.recipe.parallel_section import ParallelConfig

NAMES = ["gather_linear", "linear_scatter", "gather_slices", "take_slice"]


@pytest.fixture
def group(request):
    """Yield a fake process group of `request.param` ranks. The test process is rank 0."""
    ranks = request.param
    dist.init_process_group("fake", rank=0, world_size=ranks)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("group", [1, 8, 64], indirect=True)
@pytest.mark.parametrize("rows", [1, 7, 64, 100])
@pytest.mark.parametrize("backend", ["ring", "collective"])
def test_async_linear_has_shapes_for_many_ranks(group, rows, backend):
    size = -(-rows // group.size())
    overlap = Overlap(backend, group.group_name, 3)
    x_SD = torch.randn(size, 6, requires_grad=True)
    weights = [torch.randn(f, 6, requires_grad=True) for f in (4, 2)]
    bias = torch.randn(4, requires_grad=True)
    outputs = gather_linear(x_SD, weights, [bias, None], rows, overlap)
    assert [p.shape for p in outputs] == [(rows, 4), (rows, 2)]
    down_DF = torch.randn(6, 4, requires_grad=True)
    out_SD = linear_scatter(outputs[0] * outputs[1].sum(), down_DF, None, size, overlap)
    assert out_SD.shape == (size, 6)
    full_TD = gather_slices(out_SD, rows, overlap)
    assert full_TD.shape == (rows, 6)
    full_TD.sum().backward()
    for tensor in (x_SD, *weights, bias, down_DF):
        assert tensor.grad.shape == tensor.shape


@pytest.mark.parametrize("group", [16], indirect=True)
@pytest.mark.parametrize("rows", [5, 32, 33])
def test_collective_backend_matches_matmul_on_sixteen_ranks(group, rows):
    """Check with LocalTensor, which runs the collectives of all ranks in one process."""
    ranks, size = group.size(), -(-rows // group.size())
    generator = torch.Generator().manual_seed(rows)
    x_TD = torch.randn(rows, 6, generator=generator)
    up_FD = torch.randn(ranks * 2, 6, generator=generator)
    down_DF = torch.randn(6, ranks * 2, generator=generator)
    padded = functional.pad(x_TD, (0, 0, 0, size * ranks - rows))

    def local(shards):
        return LocalTensor({rank: shard.clone() for rank, shard in enumerate(shards)})

    with LocalTensorMode(ranks):
        backend = CollectiveBackend(group, 1)
        x_SD = local(padded.split(size))
        (up_TF,) = backend.gather_linear(x_SD, [local(up_FD.chunk(ranks))], [None], rows)
        down = local(down_DF.chunk(ranks, dim=1))
        out_SD = backend.start_linear_scatter([up_TF], [down], size).wait()
    out = torch.cat([out_SD._local_tensors[rank] for rank in range(ranks)])
    torch.testing.assert_close(out[:rows], x_TD @ up_FD.T @ down_DF.T, rtol=1e-5, atol=1e-4)
    assert not out[rows:].any()


@pytest.mark.parametrize("group", [1], indirect=True)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_fused_scatter_adds_products_of_all_inputs(group, count, monkeypatch):
    """Replace the fused operator of CUDA by a matmul on one rank, with a row of padding."""
    monkeypatch.setattr(torch_compat, "fused_matmul_scatter", lambda x, weight, _: x @ weight)
    inputs = [torch.randn(5, 4) for _ in range(count)]
    weights = [torch.randn(3, 4) for _ in range(count)]
    backend = SymmetricMemoryBackend(group, 1)
    out_SD = backend.start_linear_scatter(inputs, weights, 6)._started
    expected = sum(x @ weight.T for x, weight in zip(inputs, weights, strict=True))
    torch.testing.assert_close(out_SD[:5], expected)
    assert not out_SD[5:].any()


@pytest.mark.parametrize("group", [1], indirect=True)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["ring", "collective"])
def test_async_operators_pass_opcheck(group, name, backend):
    """Check shapes, strides, aliasing, mutation and gradients, with static and dynamic sizes."""
    where = (backend, group.group_name, 2)
    x = torch.randn(5, 6, requires_grad=True)
    weight, bias = torch.randn(4, 6, requires_grad=True), torch.randn(4, requires_grad=True)
    arguments = {
        "gather_linear": (x, [weight, weight], [bias, bias.new_empty(0)], 5),
        "linear_scatter": (x, weight, bias, 5),
        "gather_slices": (x, 5),
        "take_slice": (x, 5),
    }
    operator = getattr(torch.ops.torchmm, name).default
    result = torch.library.opcheck(operator, (*arguments[name], *where))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("group", [4], indirect=True)
@pytest.mark.parametrize("trained", [True, False])
def test_only_trained_weights_save_local_slice(group, trained):
    saved_shapes = []

    def record_shape(tensor):
        saved_shapes.append(tuple(tensor.shape))
        return tensor

    x_SD = torch.randn(3, 6, requires_grad=True)
    weight = torch.randn(4, 6, requires_grad=trained)
    with torch.autograd.graph.saved_tensors_hooks(record_shape, lambda tensor: tensor):
        gather_linear(x_SD, [weight], [None], 12, Overlap("ring", group.group_name))
    assert saved_shapes == [(4, 6), (3, 6)] if trained else [(4, 6)]


@pytest.mark.parametrize("group", [4], indirect=True)
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_ring_blocks_cover_local_slice(group, chunks):
    ring = RingBackend(group, chunks)
    for rows in (0, 1, 9):
        blocks = ring._blocks(5, 5 + rows)
        assert len(blocks) == chunks
        assert [row for start, stop in blocks for row in range(start, stop)] == [
            *range(5, 5 + rows)
        ]


def test_unsupported_operation_on_scope_input_raises():
    column = PrecomputedColumn(nn.Linear(3, 2), lambda parameter: parameter)
    output = torch.randn(4, 2)
    scope_input = ScopeInput(torch.Size((4, 3)), [output])
    assert column(scope_input) is output
    with pytest.raises(TypeError, match="async_tensor_parallel = false"):
        column(torch.randn(4, 3))
    with pytest.raises(TypeError):
        scope_input * 2


def test_recipe_accepts_all_backends():
    for name in BACKENDS:
        assert ParallelConfig(async_tensor_backend=name).async_tensor_backend == name


@pytest.mark.parametrize(
    ("trouble", "transport", "expected"),
    [
        (None, "nccl", "symmetric_memory"),
        ("no peers", "nccl", "ring"),
        ("no peers", "gloo", "ring"),
        ("no peers", "mpi", "collective"),
    ],
)
def test_backend_choice_follows_trial_and_transport(monkeypatch, trouble, transport, expected):
    monkeypatch.setattr(overlap_choice, "symmetric_memory_problem", lambda *_: trouble)
    monkeypatch.setattr(overlap_choice.dist, "get_backend", lambda _: transport)
    backend, reason = overlap_choice.choose_backend(None, torch.device("cpu"))
    assert backend == expected and (trouble or "correct values") in reason
    if trouble:
        with pytest.raises(ConfigError, match='async_tensor_backend = "symmetric_memory": no pee'):
            overlap_choice.choose_backend(None, torch.device("cpu"), "symmetric_memory")
