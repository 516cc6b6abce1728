"""Tests of saved bytes of compiled layers, which must not exceed planned bytes.

The compiler decides which tensors it saves for backward and which it recomputes. It must not save
more bytes than the uncompiled layer, because plans use the bytes of the uncompiled layer. The tests
use the decompositions and partitioner of Inductor without code generation, which takes minutes.
"""

from __future__ import annotations

import pytest
import test_layer_tuning_memory
import test_model_stages
import torch
from support.allocations import held_in_a_step, traced_peak_bytes
from test_layer_operators import RealLayer
from torch import Tensor

from torchmm.common.batch import Microbatch
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.layers import layer_saved_bytes
from torchmm.models.layered import LayeredModule
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import Compilation
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.runtime import PipelineRuntime

BACKEND = "aot_eager_decomp_partition"
WIDE, NARROW = torch.float32, torch.bfloat16
LAYERS = [("llama", WIDE), ("qwen3_5", NARROW)]
OTHERS = [("gemma2", NARROW), ("gpt_oss", WIDE), ("siglip2", WIDE)]


def saved_bytes(real: RealLayer, mode: str, compilation: Compilation | None) -> int:
    """Return bytes that autograd saves in a forward pass, without parameters and rotary tables."""
    forward = real.layer.forward
    apply_activation_checkpoint(real.module, mode, compilation)
    existing = [*real.module.parameters(), *real.module.buffers(), *real.tables]
    excluded = {tensor.untyped_storage()._cdata for tensor in existing}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    real.run()  # can compile
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = real.run()
    real.layer.forward = forward
    del out
    return sum(size for key, size in saved.items() if key not in excluded)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*LAYERS, *(pytest.param(*o, marks=pytest.mark.campaign) for o in OTHERS)],
)
def test_compiled_layer_saves_at_most_planned_bytes(family: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()  # dynamic sizes that other tests have compiled
    real = RealLayer(family, dtype)
    layer = real.description.layers[0]
    setting = CostSetting(Execution(), dtype.itemsize)
    (planned,) = layer_saved_bytes(layer, real.sizes, setting, weights=True)
    assert saved_bytes(real, "none", None) == pytest.approx(planned, rel=0.03)
    saved = saved_bytes(real, "none", Compilation(BACKEND))
    assert 0.35 * planned < saved <= 1.001 * planned  # shape values add a few bytes


@pytest.mark.campaign
def test_compiled_step_stays_within_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    compilation = Compilation(BACKEND)

    def compiled(module: LayeredModule, mode: str) -> None:
        apply_activation_checkpoint(module, mode, compilation)

    monkeypatch.setattr(test_model_stages, "apply_activation_checkpoint", compiled)
    step = CompiledStep("clip")
    batch = step.batch(0)
    plan = step.plan("gpipe", batch, test_layer_tuning_memory.PARTS)
    for limit, predicted, measured in step.tuned(plan, batch):
        assert 0.85 * predicted <= measured <= predicted <= limit, measured / limit
    assert compilation.new_graphs()


class CompiledStep(test_layer_tuning_memory.Step):
    """Step with traced memory, because compiled code allocates without operators."""

    def peak_bytes(self, plan: PipelinePlan, batch: list[Microbatch]) -> int:
        def run() -> None:
            PipelineRuntime(0, self.stages, None).step(plan, batch)

        run()  # compile graphs that this plan uses first
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        existing = {t.untyped_storage() for t in held_in_a_step(self.model, batch)}
        sizes = {storage._cdata: storage.nbytes() for storage in existing}
        return traced_peak_bytes(run) + sum(sizes.values()) + self.optimizer_bytes
