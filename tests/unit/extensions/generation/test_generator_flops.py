"""FLOPs and memory traffic of a generator match its description and metadata."""

from __future__ import annotations

import model_cases
import pytest
import torch
from counting import count_flops
from generator_cases import generator_config, generator_inputs

from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.costs.flops import microbatch_flops, module_layers, step_flops

pytest.importorskip("diffusers")

GRIDS, CONTEXTS = [(1, 4, 4), (1, 4, 4), (1, 4, 4)], [6, 6, 6]
META = MicrobatchMeta(
    tuple(
        SampleMeta("s", i, c, generated=(GeneratedMeta(g, c),))
        for i, (g, c) in enumerate(zip(GRIDS, CONTEXTS, strict=True))
    ),
    sum(CONTEXTS),
)
GENERATOR_MODULES = ("generator", "generator.connector")


@pytest.mark.parametrize("llm_frozen", [False, True])
@pytest.mark.parametrize(
    "freeze", [(), GENERATOR_MODULES[:1], GENERATOR_MODULES[1:], GENERATOR_MODULES], ids=str
)
def test_generator_flops_match_torch_counter(freeze: tuple[str, ...], llm_frozen: bool) -> None:
    model = model_cases.build(
        generator_config(encoder=None), (*freeze, *(("llm",) if llm_frozen else ()))
    )
    context = torch.randn(sum(CONTEXTS), model_cases.LLMS["llama"]["hidden_size"])
    context.requires_grad_(not llm_frozen)
    inputs = generator_inputs(GRIDS, CONTEXTS)
    forward, loss = count_flops(lambda: model.generator(inputs, context))
    backward, _ = count_flops(loss.backward) if loss.requires_grad else (0, None)
    modules = [module.describe() for module in model.modality_modules()]
    actual = microbatch_flops(modules, META)["generator"]
    assert actual.forward == pytest.approx(forward, rel=0.01)
    # Hidden states before the first cross attention have no gradient if only the context needs
    # one.
    assert actual.backward == pytest.approx(backward, rel=0.01 if not freeze else 0.25)
    assert bool(actual.backward) == bool(backward)


def test_generator_layers_have_costs_for_splitting() -> None:
    modules = [m.describe() for m in model_cases.build(generator_config()).modality_modules()]
    layers = module_layers(modules, [META])[-1]
    assert layers.kind == "generator" and layers.sub_microbatched
    assert len(layers.costs) == 3 and min(layers.costs) > 0 < min(
        layers.embedding_cost, layers.head_cost
    )
    flops = microbatch_flops(modules, META)["generator"]
    total = sum(layers.costs) + layers.embedding_cost + layers.head_cost
    assert total == pytest.approx(flops.forward + flops.backward, rel=1e-6)


def test_step_flops_match_sum_of_microbatches() -> None:
    modules = [m.describe() for m in model_cases.build(generator_config()).modality_modules()]
    image = ImageMeta(0, 0, 16, 4, encoder=next(m.name for m in modules if m.kind == "encoder"))
    image_batch = MicrobatchMeta((SampleMeta("s", 0, 12, (image,)),), 16)
    metas = [META, image_batch, MicrobatchMeta((SampleMeta("s", 1, 9),), 16)]
    expected = [sum(map(sum, microbatch_flops(modules, meta).values())) for meta in metas]
    assert step_flops(modules, metas).tolist() == expected
    assert len(set(expected)) == 3
