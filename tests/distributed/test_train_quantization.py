"""Runs with 4-bit frozen weights: layouts, resuming in other layouts, checkpoints and exports."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nf4_reference import NF4_LEVELS
from safetensors.torch import load_file
from tiny_recipe import LLM, arguments, records, weights
from torch import Tensor

from torchmm.training.export.checkpoint import export_checkpoint

pytestmark = pytest.mark.slow
QUANTIZED = {
    "adapters": '{low={modules=["llm"],rank=4,alpha=8.0}}',
    "quantization__quant_type": "nf4",
    "training__steps": 4,
    "training__global_batch_size": 4,
    "checkpoint__interval": 2,
    "optimizer__lr": 0.02,
    LLM.strip("-").replace(".", "__") + "hidden_size": 64,
    LLM.strip("-").replace(".", "__") + "intermediate_size": 128,
    LLM.strip("-").replace(".", "__") + "head_dim": 32,
}
LAYOUTS = {
    "sharded": (2, {}),
    "pipeline": (2, {"parallel__pipeline": 2}),
    "tensor": (2, {"parallel__tensor": 2}),
    "recomputed": (1, {"activation_checkpoint__mode": "selective"}),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory, real_data, train_server):
    """Return a function that runs a recipe and returns its directory."""
    directory = tmp_path_factory.mktemp("quantization")

    def run(name: str, ranks: int = 1, **changes: object) -> Path:
        command = arguments(directory / name, real_data, **{**QUANTIZED, **changes})
        codes, output = train_server.run(command, directory / f"{name}-log", ranks)
        assert codes == [0] * ranks, output
        return directory / name

    return run


@pytest.fixture(scope="module")
def alone(train) -> Callable[[], Path]:
    """Return a cached function that trains one process and exports."""
    return functools.cache(lambda: train("alone", checkpoint__export_hf="true"))


def is_code(name: str, tensor: Tensor) -> bool:
    return name.startswith("model.llm.") and tensor.dtype == torch.uint8


def test_quantization_changes_losses_and_trains(alone, train) -> None:
    plain = [r["loss"] for r in records(train("plain", quantization__quant_type="none"))]
    losses = [r["loss"] for r in records(alone())]
    assert losses[0] == pytest.approx(plain[0], rel=1e-2)
    assert abs(losses[0] / plain[0] - 1) > 1e-5
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_quantized_layouts_equal_one_process(layout: str, train, alone) -> None:
    ranks, changes = LAYOUTS[layout]
    actual, expected = records(train(layout, ranks, **changes)), records(alone())
    for key in ("loss", "grad_norm"):
        assert actual[0][key] == pytest.approx(expected[0][key], rel=1e-5), key
    losses = [r["loss"] for r in actual]
    assert losses == pytest.approx([r["loss"] for r in expected], rel=1e-3)


def test_resumed_run_is_bitwise_equal(train, alone) -> None:
    train("parts", training__steps=2)
    resumed = train("parts")
    for straight, record in zip(records(alone()), records(resumed), strict=True):
        assert (straight["loss"], straight["grad_norm"]) == (record["loss"], record["grad_norm"])
    expected, actual = weights(alone()), weights(resumed)
    assert expected.keys() == actual.keys()
    assert sum(is_code(name, tensor) for name, tensor in actual.items()) == 14
    assert all(torch.equal(expected[name], actual[name]) for name in expected if "rng" not in name)


@pytest.mark.parametrize("layout", ["sharded", "tensor", "pipeline"])
def test_checkpoint_resumes_in_other_layout(layout: str, train, alone) -> None:
    ranks, changes = LAYOUTS[layout]
    name = f"moved-{layout}"
    train(name, ranks, training__steps=2, **changes)
    resumed = train(name)
    losses = [r["loss"] for r in records(resumed)]
    assert losses == pytest.approx([r["loss"] for r in records(alone())], rel=1e-3)
    expected, actual = weights(alone()), weights(resumed)
    codes = {name: tensor for name, tensor in expected.items() if is_code(name, tensor)}
    assert len(codes) == 14
    assert all(torch.equal(tensor, actual[name]) for name, tensor in codes.items())


def test_checkpoint_without_quantization_is_rejected(
    tmp_path: Path, real_data, train_server
) -> None:
    plain = {**QUANTIZED, "quantization__quant_type": "none", "training__steps": 2}
    codes, output = train_server.run(
        arguments(tmp_path / "run", real_data, **plain), tmp_path / "log"
    )
    assert codes == [0], output
    command = arguments(tmp_path / "run", real_data, **QUANTIZED)
    codes, output = train_server.run(command, tmp_path / "log2")
    assert codes != [0]
    assert "q_proj.weight" in output


def test_export_contains_decoded_weights_and_adapters(alone, tmp_path: Path) -> None:
    run_dir = alone()
    stored = {
        name.removeprefix("model.llm.").partition("[")[0]: tensor  # chunks have offsets
        for name, tensor in weights(run_dir).items()
    }
    exported = load_file(run_dir / "hf" / "model.safetensors")
    compared = 0
    for name, tensor in stored.items():
        if tensor.dtype != torch.uint8 or not name.endswith(".weight"):
            continue
        blocks = tensor.view(len(tensor), -1, 36)
        codes = torch.stack((blocks[..., :32] >> 4, blocks[..., :32] & 15), -1).flatten(2)
        scales = blocks[..., 32:].contiguous().view(torch.float32)
        base = (NF4_LEVELS[codes.int()] * scales).flatten(1)
        linear = name.removesuffix(".weight")
        delta = 2.0 * stored[f"{linear}.lora.up"] @ stored[f"{linear}.lora.down"]
        layer = linear.partition(".layers.")[2]
        (value,) = [
            tensor
            for hf_name, tensor in exported.items()
            if "language_model" in hf_name and hf_name.endswith(f".layers.{layer}.weight")
        ]
        assert torch.allclose(value, base + delta, rtol=0, atol=1e-6), name
        assert not torch.allclose(value, base, rtol=0, atol=1e-6), name
        compared += 1
    assert compared == 14
    (checkpoint,) = (run_dir / "checkpoints").glob("step-4")
    export_checkpoint(checkpoint, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == exported.keys()
    assert all(torch.equal(again[name], exported[name]) for name in again)
