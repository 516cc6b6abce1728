"""Tests of layer operators and saved tensors against real layers of every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod

import model_cases
import numpy as np
import pytest
import torch
from counting import CountLive, CountTraffic, count_flops
from torch import Tensor, nn

from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.layers import (
    layer_flops,
    layer_linears,
    layer_operators,
    layer_saved_bytes,
    received_bytes,
)
from torchmm.costs.operators import Operator
from torchmm.costs.sizes import TaskSizes, encoder_sizes, llm_sizes
from torchmm.models.layered import LayeredModule
from torchmm.models.layers.attention import Segments
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.recipe.model_section import EncoderConfig, LlmConfig, ModelConfig

LLMS = {
    **model_cases.LLMS,
    "lfm2, attention": {**model_cases.LLMS["lfm2"], "layer_types": ["full_attention"] * 3},
    "qwen3_5, attention": {**model_cases.LLMS["qwen3_5"], "layer_types": ["full_attention"] * 3},
    # The first layers of the published configurations are dense.
    "glm4_moe, experts": {**model_cases.LLMS["glm4_moe"], "first_k_dense_replace": 0},
    "deepseek_v3, experts": {**model_cases.LLMS["deepseek_v3"], "first_k_dense_replace": 0},
}
FAMILIES = [*(n for n in LLMS if n != "llama_tied"), *model_cases.BASIC_ENCODERS]
OWN_TABLES = ("gemma3_text", "olmo3", "gemma4", "gemma4_moe")
TOKENS = 96
# Wide enough that costs which depend only on the number of heads or experts are small.
WIDE = {"hidden_size": 128, "intermediate_size": 320}
FUSED = (
    "packed_attention",
    "packed_attention_backward",
    "capped_attention",
    "capped_attention_backward",
    "packed_delta_rule",
    "packed_delta_rule_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")


class RealLayer:
    """Layer of a model family, ready to run."""

    def __init__(self, family: str, dtype: torch.dtype) -> None:
        self.tables: list[Tensor] = []
        self.module, self.hidden, self.sizes, self._run = (
            self._llm(family, dtype) if family in LLMS else self._encoder(family, dtype)
        )
        self.layer: nn.Module = self.module.layers[0]
        self.description: ModuleDescription = self.module.describe()

    def run(self) -> Tensor:
        return self._run()

    def backward_flops(self, mode: str) -> int:
        """Return the FLOPs of the backward pass, including recomputation."""
        forward = self.layer.forward
        apply_activation_checkpoint(self.module, mode)
        out = self.run()
        flops, _ = count_flops(out.sum().backward)
        self.layer.forward = forward
        return flops

    def live_bytes(self, mode: str, trained: bool) -> tuple[int, int]:
        """Return the bytes that a forward pass saves for backward, without parameters.

        The first number includes the layer input only if it is saved. The second number always
        includes it, as for an input that a stage received.
        """
        forward = self.layer.forward
        self.layer.requires_grad_(trained)
        apply_activation_checkpoint(self.module, mode)
        saved = [mode != "none"]

        def look(tensor: Tensor) -> Tensor:
            saved.append(tensor.untyped_storage()._cdata == self.hidden.untyped_storage()._cdata)
            return tensor

        with CountLive() as counter:
            if mode == "none":
                with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
                    out = self.run()
            else:
                out = self.run()
        alive = counter.live_bytes([out, self.hidden, *self.tables, *self.module.parameters()])
        self.layer.forward = forward
        self.layer.requires_grad_(True)
        return alive + any(saved) * self.hidden.nbytes, alive + self.hidden.nbytes

    def _llm(
        self, family: str, dtype: torch.dtype
    ) -> tuple[LayeredModule, Tensor, TaskSizes, Callable[[], Tensor]]:
        config = {**LLMS[family], **WIDE}
        if config["model_type"] == "qwen3_5_moe_text":  # all layers have experts
            del config["intermediate_size"]
        module = model_cases.build(ModelConfig(llm=LlmConfig(config=config))).llm.to(dtype)
        hidden = torch.randn(1, TOKENS, 128, dtype=dtype, requires_grad=True)
        positions = torch.arange(TOKENS)[None]
        # Rotary tables of each layer type.
        kinds = config["layer_types"][:1] if family in OWN_TABLES else ()
        self.tables = list(module.text_model.rotary_emb(hidden, positions, *kinds))
        segments = Segments.from_starts([0, 40, TOKENS], hidden.device)
        samples = (SampleMeta("s", 0, 40), SampleMeta("s", 1, TOKENS - 40))

        def run() -> Tensor:
            return module.layers[0](
                hidden,
                position_embeddings=tuple(self.tables),
                position_ids=positions,
                attention_mask=None,
                cu_seq_lens_q=segments,
            )

        sizes = llm_sizes([MicrobatchMeta(samples, TOKENS)], [8], padding=True)
        return module, hidden, sizes, run

    def _encoder(
        self, family: str, dtype: torch.dtype
    ) -> tuple[LayeredModule, Tensor, TaskSizes, Callable[[], Tensor]]:
        section = EncoderConfig(config={**model_cases.ENCODERS[family], **WIDE})
        llm = LlmConfig(config=model_cases.LLMS["llama"])
        model = model_cases.build(ModelConfig(llm=llm, encoders={"eye": section}))
        module = model.encoders["eye"].to(dtype)
        inputs = model_cases.make_inputs(family)
        inputs.pixels = inputs.pixels.to(dtype)
        context = module.family.context(module.tower, inputs, inputs.pixels.device)
        hidden = module.family.embed(module.tower, inputs, context).detach().requires_grad_()
        self.tables = list(getattr(context, "rotary", []))
        group = module.patches_per_token
        images = [ImageMeta(1, 1, prod(g), prod(g) // group) for g in inputs.grids_thw]

        def run() -> Tensor:
            layer = module.layers[0]
            return module.family.run_layer(module.tower, 0, layer, hidden, context)

        return module, hidden, encoder_sizes(module.describe(), [images]), run


real_layer = cache(RealLayer)


def traffic(operators: list[Operator], matmul: bool) -> float:
    chosen = [o for o in operators if (o.kind == "matmul") == matmul]
    return sum(np.sum(o.memory_bytes) for o in chosen if not o.kind.startswith("attention"))


def counted(traffic: CountTraffic, matmul: bool) -> float:
    return sum(n for k, n in traffic.nbytes.items() if (k in PRODUCTS) == matmul and k not in FUSED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_memory_traffic_matches_real_layers(family: str, dtype: torch.dtype) -> None:
    real = real_layer(family, dtype)
    layer = real.description.layers[0]
    setting = CostSetting(Execution(), dtype.itemsize)
    expected = layer_operators(layer, real.sizes, setting)
    with CountTraffic() as forward:
        out = real.run()
    with CountTraffic() as backward:
        out.backward(torch.ones_like(out))
    accumulation = expected.weights.pop()  # the first gradients of a step are not accumulated
    # Copies of latent attention and of expert groups are not modeled: few bytes, but calls.
    few = 0.3 if layer.router_float32 else 0.25 if layer.key_value_rank else 0.2
    for operators, count in (
        (expected.forward, forward),
        (expected.inputs + expected.weights, backward),
    ):
        assert traffic(operators, True) == pytest.approx(counted(count, True), rel=0.02)
        # Padded windows, scalars of single families, and expert rows that are weighted in float32.
        assert traffic(operators, False) == pytest.approx(counted(count, False), rel=0.18)
        fused = [o for o in operators if o.kind.startswith("attention")]  # with internal loops
        calls = len(fused) + sum(np.sum(o.calls) for o in operators if o not in fused)
        assert calls == pytest.approx(sum(count.calls.values()), rel=few)
    named = real.layer.named_parameters()
    weights = {name: p for name, p in named if not name.endswith("bias")}
    products = sum(p.numel() for n, p in weights.items() if p.ndim == 2 or "experts." in n)
    assert accumulation.memory_bytes == products * (8 + dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_bytes_match_live_memory(family: str, dtype: torch.dtype) -> None:
    real = real_layer(family, dtype)
    layer, size = real.description.layers[0], dtype.itemsize
    for mode, trained in product(("none", "selective", "full"), (True, False)):
        execution = Execution(recompute=mode)  # type: ignore[arg-type]
        setting = CostSetting(execution, size)
        saved = layer_saved_bytes(layer, real.sizes, setting, weights=trained)
        received = received_bytes(layer, real.sizes, setting, weights=trained)
        alive, held = real.live_bytes(mode, trained)
        # The Qwen encoder casts its rotary tables, of the size of a head, in every layer.
        allowed = 0.06 if layer.packed_qkv else 0.02
        assert saved == pytest.approx([alive], rel=allowed), (mode, trained)
        assert saved + received == pytest.approx([held], rel=allowed), (mode, trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_recomputation_repeats_all_but_last_matmul(family: str) -> None:
    real = real_layer(family, torch.float32)
    layer = real.description.layers[0]
    setting = CostSetting(Execution(recompute="full"), 4)
    again = layer_operators(layer, real.sizes, setting).recomputed
    products = sum(np.sum(o.flops) for o in again if o.kind == "matmul")
    dense, scores = (np.sum(flops_N) for flops_N in layer_flops(layer, real.sizes))
    linears = 2 * np.sum(real.sizes.units_N) * sum(map(prod, layer_linears(layer).values()))
    convolutions = dense - linears
    extra = real.backward_flops("full") - real.backward_flops("none")
    assert products + scores + convolutions == pytest.approx(extra, rel=0.01)


def test_selective_recomputation_saves_matmuls_and_attention() -> None:
    real = real_layer("llama", torch.float32)
    layer = real.description.layers[0]

    def again(mode: str) -> list[str]:
        setting = CostSetting(Execution(recompute=mode), 4)  # type: ignore[arg-type]
        return [o.kind for o in layer_operators(layer, real.sizes, setting).recomputed]

    assert not again("none")
    full, selective = again("full"), again("selective")
    assert "matmul" in full
    assert "attention" in full
    assert [k for k in full if k not in ("matmul", "attention")] == selective


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_split_matmuls(sequence_parallel: bool) -> None:
    real = real_layer("qwen3", torch.float32)
    layer = real.description.layers[0]

    def operators_of(tensor: int) -> list[Operator]:
        execution = Execution(tensor=tensor, sequence_parallel=sequence_parallel)
        operators = layer_operators(layer, real.sizes, CostSetting(execution, 4))
        return [*operators.forward, *operators.inputs, *operators.weights]

    def total(operators: list[Operator], field: str, *kinds: str) -> float:
        return sum(np.sum(getattr(o, field)) for o in operators if o.kind in kinds)

    one, two = operators_of(1), operators_of(2)
    for kind in ("matmul", "attention", "attention_backward"):
        assert total(two, "flops", kind) == pytest.approx(total(one, "flops", kind) / 2)
    norms = total(two, "memory_bytes", "norm") / total(one, "memory_bytes", "norm")
    assert norms < 0.51 if sequence_parallel else norms > 0.6
    network = ("all_reduce", "all_gather", "reduce_scatter")
    assert total(one, "network_bytes", *network) == 0
    # Two all-reduces of all positions in each direction, each of 2 (t - 1) / t times the size.
    assert total(two, "network_bytes", *network) == pytest.approx(4 * TOKENS * 128 * 4)
    used = {o.kind for o in two} & set(network)
    assert used == ({"all_gather", "reduce_scatter"} if sequence_parallel else {"all_reduce"})


def test_few_key_value_heads_are_replicated() -> None:
    real = real_layer("llama", torch.float32)
    layer = replace(real.description.layers[0], kv_heads=1)
    operators = layer_operators(layer, real.sizes, CostSetting(Execution(tensor=4), 4))
    flops = sum(np.sum(o.flops) for o in operators.forward if o.kind == "matmul")
    head = layer.head_dim
    weights = 128 * (2 * 128 // 4 + 2 * head + 3 * 320 // 4)
    assert flops == 2 * TOKENS * weights
    reduced = [o for o in operators.weights if o.kind == "all_reduce"]
    assert [np.sum(o.network_bytes) for o in reduced] == [2 * 3 / 4 * 4 * 2 * 128 * head]
