"""Compiled layers keep no more than planners think, so memory limits hold for them too.

The compiler decides what backward finds kept and what it computes again: never more bytes than the
uncompiled layer keeps, which is what plans count. Compared with what the compiler decides with
Inductor's decompositions, without the code that Inductor makes of it, which would take minutes.
"""

from __future__ import annotations

import pytest
import test_model_stages
import test_tuned_memory
import torch
from support.allocations import held_in_a_step, traced_peak_bytes
from test_part_operators import RealLayer
from torch import Tensor

from torchmm.common.batch import Microbatch
from torchmm.costs.execution import Execution, Setting
from torchmm.costs.layers import layer_kept_bytes
from torchmm.models.layered import LayeredModule
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import Compilation
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.runtime import PipelineRuntime

BACKEND = "aot_eager_decomp_partition"
WIDE, NARROW = torch.float32, torch.bfloat16
LAYERS = [("llama", WIDE), ("qwen3_5", NARROW)]
OTHERS = [("gemma2", NARROW), ("gpt_oss", WIDE), ("siglip2", WIDE)]


def kept_bytes(real: RealLayer, mode: str, compilation: Compilation | None) -> int:
    """What autograd holds after a forward, beside parameters and tables of positions."""
    forward = real.layer.forward
    apply_activation_checkpoint(real.module, mode, compilation)
    given = [*real.module.parameters(), *real.module.buffers(), *real.tables]
    left_out = {tensor.untyped_storage()._cdata for tensor in given}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
        return tensor

    real.run()  # may compile
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = real.run()
    real.layer.forward = forward
    del out
    return sum(size for key, size in found.items() if key not in left_out)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*LAYERS, *(pytest.param(*own, marks=pytest.mark.campaign) for own in OTHERS)],
)
def test_a_compiled_layer_keeps_no_more_than_is_planned(family: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()  # what other tests have taught the compiler about sizes
    real = RealLayer(family, dtype)
    layer = real.description.layers[0]
    setting = Setting(Execution(), dtype.itemsize)
    (planned,) = layer_kept_bytes(layer, real.sizes, setting, weights=True)
    assert kept_bytes(real, "none", None) == pytest.approx(planned, rel=0.03)
    found = kept_bytes(real, "none", Compilation(BACKEND))
    assert 0.35 * planned < found <= 1.001 * planned  # with the sizes themselves, a few bytes


@pytest.mark.campaign
def test_a_compiled_step_never_uses_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    compilation = Compilation(BACKEND)

    def compiled(module: LayeredModule, mode: str) -> None:
        apply_activation_checkpoint(module, mode, compilation)

    monkeypatch.setattr(test_model_stages, "apply_activation_checkpoint", compiled)
    step = CompiledStep("clip")
    batch = step.batch(0)
    plan = step.plan("gpipe", batch, test_tuned_memory.PARTS)
    for limit, predicted, measured in step.tuned(plan, batch):
        assert 0.85 * predicted <= measured <= predicted <= limit, measured / limit
    assert compilation.new_graphs()


class CompiledStep(test_tuned_memory.Step):
    """Whose allocations are not all made by operators that Python sees."""

    def peak_bytes(self, plan: PipelinePlan, batch: list[Microbatch]) -> int:
        def run() -> None:
            PipelineRuntime(0, self.stages, None).step(plan, batch)

        run()  # compiles what this plan is the first to use
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        held = {t.untyped_storage() for t in held_in_a_step(self.model, batch)}
        sizes = {storage._cdata: storage.nbytes() for storage in held}
        return traced_peak_bytes(run) + sum(sizes.values()) + self.optimizer_bytes
