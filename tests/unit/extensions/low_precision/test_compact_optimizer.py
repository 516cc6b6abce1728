"""AdamW and Muon on compact tensors: values, rounding, states, offload."""

import math
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from update_cases import BAD_STEPS, Trained, assert_equal, check_non_finite_step

from torchmm.extensions.low_precision import fused_update, low_precision_optimizer, state_formats
from torchmm.extensions.low_precision.low_precision_optimizer import LowPrecisionOptimizer
from torchmm.extensions.low_precision.state_formats import (
    BLOCK,
    Int8BlockFormat,
    RandomBits,
    ShardPositions,
    dynamic_map,
)
from torchmm.recipe.training_section import OptimizerConfig
from torchmm.training.optim import build_optimizer, set_learning_rate
from torchmm.training.optimizers.muon import LocalMuon

FAST = {"lr": 1e-2, "lr_schedule": "constant"}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 64), nn.LayerNorm(64), nn.Linear(64, 130, bias=False))
    return model.to(dtype)


def optimizer_of(model: nn.Module, **settings) -> torch.optim.Optimizer:
    config = OptimizerConfig(**{**FAST, **settings})
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return build_optimizer(model, lambda _: "llm", config, matrices=matrices)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        for p in model.parameters():
            # Gradient sizes differ by column, as in real training.
            sizes = torch.logspace(-3, 0, p.shape[-1])
            p.grad = (torch.randn(p.shape, generator=generator) * sizes).to(p.dtype)
        optimizer.step()


def distance(a: nn.Module, b: nn.Module) -> float:
    """Return the distance of weights, relative to their distance from `net`."""
    pairs = [*zip(a.parameters(), b.parameters(), net().parameters(), strict=True)]
    difference = sum((x.double() - y.double()).square().sum() for x, y, _ in pairs)
    moved = sum((y.double() - z.double()).square().sum() for _, y, z in pairs)
    return math.sqrt(difference / moved)


def test_offloaded_states_are_bitwise_equal(monkeypatch):
    monkeypatch.setattr(low_precision_optimizer, "CHUNK_ELEMENTS", 1000)
    plain, offloaded = net(), net()
    steps(plain, optimizer_of(plain), 3)
    optimizer = optimizer_of(offloaded, offload=True)
    assert isinstance(optimizer, LowPrecisionOptimizer)
    steps(offloaded, optimizer, 3)
    assert all(map(torch.equal, plain.parameters(), offloaded.parameters()))


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.01), ("int8", 0.08)])
def test_narrow_states_reach_similar_weights(dtype, bound):
    plain, narrow = net(), net()
    steps(plain, optimizer_of(plain), 20)
    steps(narrow, optimizer_of(narrow, state_dtype=dtype), 20)
    assert 1e-5 < distance(narrow, plain) < bound


def state_bytes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    return sum(v.nbytes for k, v in optimizer.state[parameter].items() if k != "step")


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({"state_dtype": "bfloat16"}, 4),
        ({"state_dtype": "int8"}, 2 + 8 / BLOCK),
        ({"name": "muon", "state_dtype": "int8"}, 1 + 4 / BLOCK),
    ],
)
def test_state_bytes_match_plan(settings, each):
    model = net()
    optimizer = optimizer_of(model, **settings)
    steps(model, optimizer, 1)
    assert state_bytes(optimizer, model[2].weight) == each * model[2].weight.numel()


def test_stochastic_rounding_is_unbiased():
    value = torch.full((512, 512), 1.0 + 2**-10)  # an eighth of the way to the next bfloat16
    places = ShardPositions(torch.arange(512), torch.arange(512))
    rounded = RandomBits(places, torch.tensor(5)).rounded(value).float()
    up = (rounded > 1).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert up.mean().item() == pytest.approx(1 / 8, abs=0.004)  # five standard deviations
    # Rows, columns and adjacent elements are independent.
    assert up.mean(0).std().item() == pytest.approx(math.sqrt(7 / 64 / 512), rel=0.2)
    assert up.mean(1).std().item() == pytest.approx(math.sqrt(7 / 64 / 512), rel=0.2)
    for other in (up.roll(1, 0), up.roll(1, 1), up.T):
        assert abs(torch.corrcoef(torch.stack([up.flatten(), other.flatten()]))[0, 1]) < 0.015


def test_rounding_depends_on_step_and_tensor_only():
    value = torch.randn(64, 96)
    all_places = ShardPositions(torch.arange(64), torch.arange(96))
    part = ShardPositions(torch.arange(16, 32), torch.arange(32, 96))
    once, again = (RandomBits(all_places, torch.tensor(key)).rounded(value) for key in (5, 6))
    assert not torch.equal(once, again)
    rounded_part = RandomBits(part, torch.tensor(5)).rounded(value[16:32, 32:].contiguous())
    assert torch.equal(rounded_part, once[16:32, 32:])


def test_small_steps_require_stochastic_rounding():
    """Move weights of 1 by 1e-4 per step. The next smaller bfloat16 value is 1 - 0.004."""
    moved = {}
    for at_random in (True, False):
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        settings = {"lr": 1e-4, "weight_decay": 0.0, "stochastic_rounding": at_random}
        optimizer = optimizer_of(model, **settings)
        for _ in range(50):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        moved[at_random] = 1 - model.weight.float().mean().item()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(50e-4, rel=0.1)


def test_second_moment_is_zero_only_if_exact():
    value = torch.zeros(1, BLOCK)
    value[0, 0], value[0, 1] = 1.0, 1e-12
    form = Int8BlockFormat(signed=False)
    stored = form.encode(value, None)
    actual = form.read(stored)[0]
    assert actual[0] == 1 and 0 < actual[1] < 1e-6 and not actual[2:].any()


@pytest.mark.parametrize("signed", [True, False])
def test_int8_error_is_within_one_step(signed):
    torch.manual_seed(0)
    value = torch.randn(7, 150) * torch.logspace(-4, 4, 7)[:, None]
    value = value if signed else value.abs()
    form = Int8BlockFormat(signed)
    stored = form.encode(value, None)
    assert stored["_scale"].shape == (7, 3)
    blocks = torch.nn.functional.pad(value, (0, 42)).view(7, 3, 64).abs().amax(-1)
    error = (form.read(stored) - value).abs() / blocks.repeat_interleave(64, 1)[:, :150]
    assert error.max() < (0.008 if signed else 0.004)


@pytest.mark.parametrize("signed", [True, False])
def test_int8_map_matches_torchao(signed):
    utils = pytest.importorskip("torchao.optim.quant_utils")
    assert torch.allclose(dynamic_map(signed), torch.tensor(utils.create_dynamic_map(signed)))


def test_learning_rate_of_compact_optimizer_is_set():
    model = net()
    optimizer = optimizer_of(model, state_dtype="bfloat16")
    before = [p.clone() for p in model.parameters()]
    set_learning_rate(optimizer, 0.0)
    steps(model, optimizer, 1)
    assert all(map(torch.equal, before, model.parameters()))


def test_copies_of_parameter_are_rounded_equally():
    """Check that rounding depends on names, which are equal for originals and their copies."""
    a, b = net(torch.bfloat16), net(torch.bfloat16)
    for model in (a, b):
        steps(model, optimizer_of(model, state_dtype="bfloat16"), 3)
    assert all(map(torch.equal, a.parameters(), b.parameters()))
    assert state_formats.shard_positions(a[0].weight).rows_R.tolist() == [*range(64)]


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()


def run_fused_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the operators of the fused update separately, rounded as in compiled code."""
    square_root = torch.Tensor.sqrt
    monkeypatch.setattr(low_precision_optimizer, "uses_fused_update", lambda device: True)
    monkeypatch.setattr(fused_update, "_compiled", partial)
    monkeypatch.setattr(fused_update, "fused_multiply_add", multiply_add)
    # The square root of torch for CPUs is not rounded correctly in float32.
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: square_root(x.double()).to(x.dtype))


class Shapes(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        values = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        self.values = nn.ParameterList(values)


EVEN = [(64, 128), (8, 192), (128,), (48,), (16, 5, 64)]
"""Shapes of multiples of 16 elements, for which the CPU kernel of torch has no scalar loop."""
ODD = [(13, 70), (3, 4, 66), (1, 64), (33, 1), (5,), ()]


def train_shapes(shapes: list, dtype: torch.dtype, count: int = 3, **settings) -> dict:
    """Return parameters and states after some updates."""
    model = Shapes(shapes, dtype)
    optimizer = LowPrecisionOptimizer(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 1e-2}
            | {"weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 3e-3},
        ],
        OptimizerConfig(**settings),
        {id(p): name for name, p in model.named_parameters()},
        torch.float32,
    )
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        for p in model.parameters():
            p.grad = (torch.randn(p.shape, generator=generator) * 0.1).to(dtype)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
    return {
        f"{name}.{key}": value.clone()
        for name, p in model.named_parameters()
        for key, value in {"": p.detach(), **optimizer.state[p]}.items()
    }


def different(a: dict, b: dict) -> list[str]:
    return [name for name, value in a.items() if not torch.equal(value, b[name])]


DTYPES = [
    (dtype, state)
    for dtype in (torch.float32, torch.bfloat16)
    for state in ("float32", "bfloat16", "int8")
]


@pytest.mark.parametrize("small", [0, 2**20], ids=["separate", "joined"])
@pytest.mark.parametrize(("dtype", "state"), DTYPES)
def test_fused_update_equals_torch_kernel(monkeypatch, dtype, state, small):
    expected = train_shapes(EVEN, dtype, state_dtype=state)
    run_fused_without_compiler(monkeypatch)
    monkeypatch.setattr(fused_update, "MAX_SMALL_ELEMENTS", small)
    assert different(train_shapes(EVEN, dtype, state_dtype=state), expected) == []


@pytest.mark.parametrize(("dtype", "state"), DTYPES)
def test_fused_update_of_odd_shapes_rounds_equally(monkeypatch, dtype, state):
    expected = train_shapes(ODD, dtype, state_dtype=state)
    run_fused_without_compiler(monkeypatch)
    actual = train_shapes(ODD, dtype, state_dtype=state)
    for name, value in expected.items():
        if value.dtype == torch.float32:
            assert torch.allclose(actual[name], value, rtol=1e-6, atol=1e-8), name
        else:
            assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("defect", ["no fused multiplication", "different key"])
def test_fused_comparison_detects_defects(monkeypatch, defect):
    expected = train_shapes(EVEN, torch.bfloat16, state_dtype="bfloat16")
    run_fused_without_compiler(monkeypatch)
    if defect == "different key":
        monkeypatch.setattr(fused_update, "MOMENT_KEY", fused_update.MOMENT_KEY + 2)
        monkeypatch.setattr(fused_update, "STEP_KEY", fused_update.STEP_KEY + 2)
    else:
        monkeypatch.setattr(fused_update, "fused_multiply_add", lambda a, b, c: a * b + 1.001 * c)
    assert different(train_shapes(EVEN, torch.bfloat16, state_dtype="bfloat16"), expected)


def test_fused_joined_groups_equal_separate_calls(monkeypatch):
    run_fused_without_compiler(monkeypatch)
    joined = train_shapes(EVEN + ODD, torch.bfloat16, state_dtype="int8")
    monkeypatch.setattr(fused_update, "JOINED_ELEMENTS", 500)  # groups of few rows
    monkeypatch.setattr(fused_update, "MAX_SMALL_ELEMENTS", 0)
    assert different(train_shapes(EVEN + ODD, torch.bfloat16, state_dtype="int8"), joined) == []


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("fuses", [False, True])
def test_fused_offloaded_states_are_bitwise_equal(monkeypatch, fuses, offload):
    if fuses:
        run_fused_without_compiler(monkeypatch)
    plain = train_shapes(EVEN, torch.bfloat16, state_dtype="int8")
    monkeypatch.setattr(low_precision_optimizer, "CHUNK_ELEMENTS", 1000)
    assert (
        different(train_shapes(EVEN, torch.bfloat16, state_dtype="int8", offload=offload), plain)
        == []
    )


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "int8"])
def test_non_finite_gradients_change_nothing(monkeypatch, fuses, state, rule):
    if fuses:
        run_fused_without_compiler(monkeypatch)
    model = net(torch.bfloat16)
    optimizer = optimizer_of(model, name=rule, state_dtype=state)
    steps(model, optimizer, 2)
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    before = [t.clone() for t in tensors]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    optimizer.step()
    assert all(map(torch.equal, before, tensors))


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("fuses", [False, True])
def test_update_divides_gradients_by_grad_scale(monkeypatch, fuses, rule):
    if fuses:
        run_fused_without_compiler(monkeypatch)
    plain, scaled = net(), net()
    settings = {"name": rule, "state_dtype": "bfloat16"}
    steps(plain, optimizer_of(plain, **settings), 2)
    optimizer = optimizer_of(scaled, **settings)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(0.25), torch.tensor(0.0)
    for number in range(2):
        steps(scaled, ScaleGradients(scaled, 0.25), 1, number)
        optimizer.step()
    assert all(map(torch.equal, plain.parameters(), scaled.parameters()))


STORAGES = [
    ("bfloat16 states", {"state_dtype": "bfloat16"}, torch.float32),
    ("int8 states", {"state_dtype": "int8"}, torch.bfloat16),
    ("host states", {"state_dtype": "int8", "offload": True}, torch.bfloat16),
    ("muon, int8", {"name": "muon", "state_dtype": "int8"}, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("settings", "dtype"), [k[1:] for k in STORAGES], ids=[k[0] for k in STORAGES]
)
@pytest.mark.parametrize("bad", BAD_STEPS)
def test_non_finite_compact_step_changes_nothing(settings, dtype, bad):
    check_non_finite_step(settings, dtype, bad)


@pytest.mark.parametrize("skips", [False, True])
def test_float32_storage_equals_muon_of_core(skips):
    core = Trained(name="muon", max_grad_norm=0.1)
    assert isinstance(core.optimizer, LocalMuon)
    compact_muon = Trained(name="muon", max_grad_norm=0.1, offload=True)
    assert isinstance(compact_muon.optimizer, LowPrecisionOptimizer)
    for number in range(1, 4):
        loss = math.nan if skips and number == 2 else 1.0
        core.step(number, loss=loss)
        compact_muon.step(number, loss=loss)
    assert_equal(core.tensors(), compact_muon.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compact_optimizer_divides_by_grad_scale(dtype):
    scaled, plain = Trained(dtype, state_dtype="bfloat16"), Trained(dtype, state_dtype="bfloat16")
    for train_shapes, size in ((scaled, 4.0), (plain, 1.0)):
        train_shapes.net.set_gradients(1, size)
        train_shapes.optimizer.grad_scale = torch.tensor(size)
        train_shapes.optimizer.step()
    parameters = zip(scaled.net.parameters(), plain.net.parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in parameters)


class ScaleGradients:
    """An optimizer that multiplies gradients and updates no weights."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        self._model, self._factor = model, factor

    def step(self) -> None:
        for p in self._model.parameters():
            p.grad *= self._factor


def test_code_search_equals_bucketize(monkeypatch):
    limits = Int8BlockFormat(signed=True)._limits
    values = torch.cat([limits, torch.randn(1000), torch.tensor([math.nan, math.inf, -math.inf])])
    expected = state_formats._count_below(values, limits)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(state_formats._count_below(values, limits), expected)


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler for CPUs needs g++")
def test_compiled_update_equals_torch_kernel_without_recompilation(monkeypatch):
    expected = train_shapes(EVEN, torch.bfloat16, 50, state_dtype="bfloat16")
    monkeypatch.setattr(low_precision_optimizer, "uses_fused_update", lambda device: True)
    for small in (0, 2**20):
        monkeypatch.setattr(fused_update, "MAX_SMALL_ELEMENTS", small)
        train_shapes(EVEN, torch.bfloat16, 2, state_dtype="bfloat16")
        with torch._dynamo.config.patch(error_on_recompile=True):
            actual = train_shapes(EVEN, torch.bfloat16, 50, state_dtype="bfloat16")
        assert different(actual, expected) == []
