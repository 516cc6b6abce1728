"""Costs of adapters against real layers: FLOPs, kept bytes, parameters, no W for the base."""

from __future__ import annotations

from dataclasses import replace

import model_cases
import pytest
import torch
from counting import CountLive, count_flops

from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.costs.blocks import stage_blocks
from torchmm.costs.execution import Execution, Setting
from torchmm.costs.flops import microbatch_flops, module_layers, module_sizes, pass_flops
from torchmm.costs.layers import layer_kept_bytes, layer_operators, stage_parameters
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
def test_flops_are_those_that_torch_counts(family: str, method: str, targets: list[str]) -> None:
    """Gradients arrive at the first layer, as from a trained connector."""
    model = adapted(family, targets, method)
    microbatch = model_cases.microbatch(LENGTHS)
    model.llm.embedding.register_forward_hook(lambda _, __, out: out.requires_grad_())
    forward, loss = count_flops(lambda: model(microbatch))
    backward, _ = count_flops(loss.backward)
    module = model.llm.describe()
    sizes = module_sizes(module, meta_of(LENGTHS), microbatch.target_count)
    assert sizes is not None
    found = pass_flops(stage_blocks(module, 0, len(module.layers)), sizes, True)
    total = float(found.inputs_N[0] + found.weights_N[0])
    of_norms = sum(
        2 * RANK * (o.outputs * o.inputs + o.inputs * RANK + o.outputs * RANK)
        for layer in module.layers
        for o in layer.adapters
        if o.magnitudes
    )
    assert bool(of_norms) == (method == "dora")
    assert float(found.forward_N[0]) + of_norms == pytest.approx(forward, rel=0.01)
    assert total == pytest.approx(backward, rel=0.01)
    of_adapters = sum(
        p.numel() for n, p in model.named_parameters() if is_adapter_parameter(n) and p.ndim == 2
    )
    assert float(found.weights_N[0]) == 2 * of_adapters * sum(LENGTHS)
    whole = microbatch_flops([module], meta_of(LENGTHS), microbatch.target_count)["llm"]
    assert whole.backward <= total


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_only_adapters_have_gradients_and_states(method: str) -> None:
    model = adapted("llama", ["all-linear"], method)
    module = model.llm.describe()
    counted = {
        trained: sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)
        for trained in (False, True)
    }
    found = stage_parameters(module, 0, len(module.layers))
    assert (found.all, found.trained) == (counted[False], counted[True])
    half = stage_parameters(module, 0, len(module.layers), tensor=2)
    whole_factors = sum(  # A of linears with divided outputs, B of those with divided inputs
        own.rank * own.inputs
        if own.divided == "outputs"
        else (own.rank + own.magnitudes) * own.outputs
        for layer in module.layers
        for own in layer.adapters
    )
    assert half.trained == (found.trained + whole_factors) / 2
    (layers,) = module_layers([module], [meta_of(LENGTHS)])
    assert layers.trainable == (True,) * len(module.layers)
    assert not layers.pre_trainable and not layers.post_trainable
    setting = Setting(Execution(), 4)
    sizes = llm_sizes([meta_of(LENGTHS)], [sum(LENGTHS)], padding=False)
    weights = layer_operators(module.layers[0], sizes, setting).weights
    each = 3 + (method == "dora")  # two products and their sums; one for magnitudes
    assert len(weights) == each * len(module.layers[0].adapters)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_an_adapter_of_a_connector_is_all_that_is_trained_of_it(family: str) -> None:
    """Products and parameters against those of the connector itself."""
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
    own = [block.flops(sizes)[0][0] for block in (first, second)]
    assert sum(own) == forward
    learned = sum(float(block.weight_flops(sizes)[0]) for block in (first, second))
    assert learned == 2 * rows * counted
    # The first one's input needs no gradient, but its few features do.
    assert backward == own[1] + learned + 2 * rows * RANK * first.linear[1]
    setting = Setting(Execution(), 4)
    assert len(first.operators(sizes, setting).weights) == 3  # two products and their sums
    frozen = replace(first, trained=False, adapter=None)
    kept = [float(b.kept_bytes(sizes, setting, b.trained)[0]) for b in (first, frozen)]
    assert kept[0] - kept[1] == 4 * rows * (first.linear[0] + RANK)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "lora"), ("qwen3", "lora"), ("starcoder2", "lora"), ("qwen3", "dora")],
)
def test_kept_bytes_are_what_stays_alive(family: str, method: str, mode: str) -> None:
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
    alive += hidden.numel() * 4  # the layer's input was there before
    execution = Execution(recompute=mode)  # type: ignore[arg-type]
    sizes = llm_sizes([meta_of(LENGTHS)], [tokens], padding=False)
    layer = module.describe().layers[0]
    found = layer_kept_bytes(layer, sizes, Setting(execution, 4), weights=True)
    assert found == pytest.approx([alive], rel=0.03)
