"""Tests of adapter costs against real layers: FLOPs, saved bytes and parameters."""

from __future__ import annotations

from dataclasses import replace

import model_cases
import pytest
import torch
from counting import CountLive, count_flops

from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.costs.blocks import stage_blocks
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.flops import microbatch_flops, module_layers, module_sizes, pass_flops
from torchmm.costs.layers import layer_operators, layer_saved_bytes, stage_parameters
from torchmm.costs.sizes import llm_sizes
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.layers.attention import Segments
from torchmm.models.layers.lora import is_adapter_parameter
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.recipe.model_section import AdapterConfig, FreezeConfig, LlmConfig, ModelConfig

FAMILIES = ("llama", "qwen3", "qwen3_moe", "phi3", "gemma2", "qwen3_5", "deepseek_v3")
RANK = 3
LENGTHS = [40, 56]
WIDE = {"hidden_size": 128, "intermediate_size": 320}


def adapted(family: str, targets: list[str], method: str = "lora", **sizes: int) -> MultimodalModel:
    config = ModelConfig(llm=LlmConfig(config={**model_cases.LLMS[family], **sizes}))
    section = {"modules": ["llm"], "targets": targets, "rank": RANK, "method": method}
    adapters = {"a": AdapterConfig.model_validate(section)}
    model = build_model(config, FreezeConfig(), adapters=adapters)
    materialize(model, "cpu")
    init_weights(model, 0)
    return model


def meta_of(lengths: list[int]) -> MicrobatchMeta:
    samples = tuple(SampleMeta("s", i, n) for i, n in enumerate(lengths))
    return MicrobatchMeta(samples, sum(lengths))


@pytest.mark.parametrize("targets", [["all-linear"], ["o_proj"]], ids=str)
@pytest.mark.parametrize(
    ("family", "method"), [*((f, "lora") for f in FAMILIES), ("qwen3", "dora")]
)
def test_adapter_flops_match_torch(family: str, method: str, targets: list[str]) -> None:
    """Compare FLOPs when the embedding output requires a gradient, as with a trained connector."""
    model = adapted(family, targets, method)
    microbatch = model_cases.microbatch(LENGTHS)
    model.llm.embedding.register_forward_hook(lambda _, __, out: out.requires_grad_())
    forward, loss = count_flops(lambda: model(microbatch))
    backward, _ = count_flops(loss.backward)
    module = model.llm.describe()
    sizes = module_sizes(module, meta_of(LENGTHS), microbatch.target_count)
    assert sizes is not None
    flops = pass_flops(stage_blocks(module, 0, len(module.layers)), sizes, True)
    total = float(flops.inputs_N[0] + flops.weights_N[0])
    norm_flops = sum(
        2 * RANK * (o.outputs * o.inputs + o.inputs * RANK + o.outputs * RANK)
        for layer in module.layers
        for o in layer.adapters
        if o.magnitudes
    )
    assert bool(norm_flops) == (method == "dora")
    assert float(flops.forward_N[0]) + norm_flops == pytest.approx(forward, rel=0.01)
    assert total == pytest.approx(backward, rel=0.01)
    adapter_parameters = sum(
        p.numel() for n, p in model.named_parameters() if is_adapter_parameter(n) and p.ndim == 2
    )
    assert float(flops.weights_N[0]) == 2 * adapter_parameters * sum(LENGTHS)
    model_flops = microbatch_flops([module], meta_of(LENGTHS), microbatch.target_count)["llm"]
    assert model_flops.backward <= total


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapter_gradients_and_states(method: str) -> None:
    model = adapted("llama", ["all-linear"], method)
    module = model.llm.describe()
    expected = {
        trained: sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)
        for trained in (False, True)
    }
    full = stage_parameters(module, 0, len(module.layers))
    assert (full.total, full.trained) == (expected[False], expected[True])
    half = stage_parameters(module, 0, len(module.layers), tensor=2)
    unsharded_factors = sum(  # A of column-parallel layers, B of row-parallel layers
        adapter.rank * adapter.inputs
        if adapter.sharded_dim == "outputs"
        else (adapter.rank + adapter.magnitudes) * adapter.outputs
        for layer in module.layers
        for adapter in layer.adapters
    )
    assert half.trained == (full.trained + unsharded_factors) / 2
    (layers,) = module_layers([module], [meta_of(LENGTHS)])
    assert layers.trainable == (True,) * len(module.layers)
    assert not layers.embedding_trainable and not layers.head_trainable
    setting = CostSetting(Execution(), 4)
    sizes = llm_sizes([meta_of(LENGTHS)], [sum(LENGTHS)], padding=False)
    weights = layer_operators(module.layers[0], sizes, setting).weights
    each = 3 + (method == "dora")  # two matmuls and two gradient sums, one sum for magnitudes
    assert len(weights) == each * len(module.layers[0].adapters)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_connector_adapter_costs_match_torch(family: str) -> None:
    """Compare FLOPs and parameters with the real connector if only its adapter is trained."""
    adapters = {"a": AdapterConfig(modules=["eye.connector"], rank=RANK)}
    config = model_cases.pair_config("llama", family)
    model = build_model(config, FreezeConfig(modules=["llm", "eye"]), adapters=adapters)
    materialize(model, "cpu")
    init_weights(model, 0)
    encoder = model.encoders["eye"]
    module = encoder.describe()
    counted = sum(p.numel() for p in encoder.parameters() if p.requires_grad)
    layers = len(module.layers)
    assert stage_parameters(module, 0, layers).trained == counted > 0
    first, second = stage_blocks(module, layers, layers)
    assert first.trained and second.trained
    rows = 8
    forward, out = count_flops(lambda: encoder.connector(torch.randn(rows, first.linear[0])))
    backward, _ = count_flops(out.sum().backward)
    sizes = llm_sizes([meta_of([rows])], [rows], padding=False)
    flops = [block.flops(sizes)[0][0] for block in (first, second)]
    assert sum(flops) == forward
    weight_flops = sum(float(block.weight_flops(sizes)[0]) for block in (first, second))
    assert weight_flops == 2 * rows * counted
    # The input of the first block needs no gradient, but its low-rank features do.
    assert backward == flops[1] + weight_flops + 2 * rows * RANK * first.linear[1]
    setting = CostSetting(Execution(), 4)
    assert len(first.operators(sizes, setting).weights) == 3  # two matmuls and two gradient sums
    frozen = replace(first, trained=False, adapter=None)
    kept = [float(b.saved_bytes(sizes, setting, b.trained)[0]) for b in (first, frozen)]
    assert kept[0] - kept[1] == 4 * rows * (first.linear[0] + RANK)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", "lora"),
        ("qwen3", "lora"),
        ("starcoder2", "lora"),
        ("qwen3", "dora"),
    ],
)
def test_adapter_saved_bytes_match_live_memory(family: str, method: str, mode: str) -> None:
    module = adapted(family, ["all-linear"], method, **WIDE).llm
    tokens = sum(LENGTHS)
    hidden = torch.randn(1, tokens, 128, requires_grad=True)
    positions = torch.arange(tokens)[None]
    tables = module.text_model.rotary_emb(hidden, positions)
    segments = Segments.from_starts([0, LENGTHS[0], tokens], hidden.device)
    apply_activation_checkpoint(module, mode)
    with CountLive() as counter:
        out = module.layers[0](
            hidden,
            position_embeddings=tables,
            position_ids=positions,
            attention_mask=None,
            cu_seq_lens_q=segments,
        )
    alive = counter.live_bytes([out, hidden, *tables, *module.parameters()])
    alive += hidden.numel() * 4  # the layer input existed before
    execution = Execution(recompute=mode)  # type: ignore[arg-type]
    sizes = llm_sizes([meta_of(LENGTHS)], [tokens], padding=False)
    layer = module.describe().layers[0]
    predicted = layer_saved_bytes(layer, sizes, CostSetting(execution, 4), weights=True)
    assert predicted == pytest.approx([alive], rel=0.03)
