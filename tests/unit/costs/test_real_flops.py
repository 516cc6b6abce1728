"""FLOPs of real models against torch's counter: whole models, and every action of a step."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import model_cases
import pytest
import torch
from counting import count_flops
from pipeline_cases import KINDS, Case, varied_microbatch
from proofs import proves
from random_orders import random_order
from speech_cases import three_samples
from test_multimodal import two_images

from torchmm.common.batch import (
    EncoderInputs,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
)
from torchmm.common.layers import DeltaSizes
from torchmm.costs.flops import microbatch_flops, task_durations
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.pipelining.plan.actions import COMPUTE, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.run.cut import cut_for_rank
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.stage import make_stage
from torchmm.pipelining.run.step_state import StepState

# Grids that windows of 4 x 4 patches divide: metadata has numbers of patches only.
WINDOWS = KINDS["qwen2_5_vl"]._replace(grids=[(1, 4, 4), (1, 8, 4)])
FREEZES = [(), ("vision",), ("llm",), ("vision", "vision.connector"), ("vision.connector", "llm")]
SPLITS = [*((freeze, 1.0) for freeze in FREEZES), (FREEZES[0], 0.0), (FREEZES[3], 0.0)]
"""Frozen parts, and the share of backwards that become I and W."""
FEW = ("clip", "qwen3_omni")
"""Encoders whose combinations are all counted always; `--all` counts those of the others too."""
CPU = torch.device("cpu")


def combine(options: list) -> list:
    """Pair every encoder with every option; mark most pairs of other encoders than FEW."""
    return [
        pytest.param(
            encoder,
            option,
            marks=[] if encoder in FEW or option == options[0] else [pytest.mark.campaign],
            id=f"{encoder}-{option}",
        )
        for encoder in (*KINDS, "clip; loss in chunks")
        for option in options
    ]


def case_of(encoder: str, freeze: tuple[str, ...] = ()) -> Case:
    case = Case(f"{encoder} {freeze}", encoder=encoder, tied=False)
    if "vision" not in case.kinds:  # an encoder of sounds
        (own,) = case.kinds
        freeze = tuple(name.replace("vision", own) for name in freeze)
    return replace(case, freeze=freeze)


def build(case: Case) -> MultimodalModel:
    model = case.build()
    materialize(model, CPU)
    init_weights(model, seed=1)
    return model


def batch_of(case: Case, images: list[int], seed: int = 0) -> list[Microbatch]:
    kinds = dict(case.kinds)
    if case.encoder == "qwen2_5_vl":
        kinds["vision"] = WINDOWS
    return [
        varied_microbatch(seed + i, dict.fromkeys(kinds, n), kinds) for i, n in enumerate(images)
    ]


def padding_as_sample(meta: MicrobatchMeta) -> MicrobatchMeta:
    """Padding costs no model FLOPs, but the machine does it."""
    gap = SampleMeta("padding", 0, meta.tokens - meta.used_tokens)
    return replace(meta, samples=(*meta.samples, gap))


@pytest.mark.parametrize("freeze", FREEZES[:2], ids=str)
@pytest.mark.parametrize("encoder", KINDS)
def test_whole_models_cost_what_torch_counts(encoder: str, freeze: tuple[str, ...]) -> None:
    case = case_of(encoder, freeze)
    model = build(case)
    (microbatch,) = batch_of(case, [3])
    forward, loss = count_flops(lambda: model(microbatch))
    backward, _ = count_flops(loss.backward) if loss.requires_grad else (0, None)
    modules = [m.describe() for m in model.modality_modules()]
    meta = padding_as_sample(microbatch.meta)
    found = microbatch_flops(modules, meta, microbatch.target_count).values()
    assert sum(f.forward for f in found) == pytest.approx(forward, rel=0.01)
    assert sum(f.backward for f in found) == pytest.approx(backward, rel=0.01)


@proves("flops", model_cases.LLMS)
@pytest.mark.parametrize("family", model_cases.LLMS)
def test_every_llm_family_costs_what_torch_counts(family: str) -> None:
    model = model_cases.text_model(family)
    microbatch = model_cases.microbatch([20, 33])
    forward, loss = count_flops(lambda: model(microbatch))
    backward, _ = count_flops(loss.backward)
    samples = (SampleMeta("s", 0, 20), SampleMeta("s", 1, 33))
    meta = MicrobatchMeta(samples, 53)
    found = microbatch_flops([model.llm.describe()], meta, microbatch.target_count)["llm"]
    assert found.forward == pytest.approx(forward, rel=0.01)
    assert found.backward == pytest.approx(backward, rel=0.01)


@proves("flops", model_cases.ENCODERS)
@pytest.mark.parametrize("family", model_cases.ENCODERS)
def test_every_encoder_family_costs_what_torch_counts(family: str) -> None:
    encoder = model_cases.build(model_cases.pair_config("llama", family)).encoders["eye"]
    inputs = model_cases.make_inputs(family)
    if family in ("qwen2_5_vl", "qwen2_5_omni_vision"):  # grids that windows divide
        inputs = replace(inputs, pixels=inputs.pixels[:48], grids_thw=WINDOWS.grids)
    forward, tokens = count_flops(lambda: encoder(inputs))
    backward, _ = count_flops(tokens.sum().backward)
    images = [
        ImageMeta(1, 1, prod(grid), prod(grid) // encoder.patches_per_token, grid[0])
        for grid in inputs.grids_thw
    ]
    meta = MicrobatchMeta((SampleMeta("s", 0, len(tokens), tuple(images), "eye"),), len(tokens))
    found = microbatch_flops([encoder.describe()], meta)["eye"]
    assert found.forward == pytest.approx(forward, rel=0.01)
    assert found.backward == pytest.approx(backward, rel=0.01)


@pytest.mark.parametrize("name", model_cases.COMPOSITES)
def test_connectors_behind_frozen_towers_cost_what_torch_counts(name: str) -> None:
    tower = "audio" if name in model_cases.SPEECH else "vision"
    model = model_cases.build(model_cases.composite_config(name), freeze=(tower,))
    encoder = model.encoders[tower]
    if tower == "audio":
        inputs = three_samples(name)[0].encoders[tower]
    else:
        grids, pixels, _ = two_images(name, torch.Generator().manual_seed(5))
        inputs = EncoderInputs(pixels, grids, torch.empty(0))
    tokens = encoder(inputs)
    backward, _ = count_flops(tokens.sum().backward)
    images = [
        ImageMeta(1, 1, prod(grid), prod(grid) // encoder.patches_per_token)
        for grid in inputs.grids_thw
    ]
    meta = MicrobatchMeta((SampleMeta("s", 0, len(tokens), tuple(images), tower),), len(tokens))
    found = microbatch_flops([encoder.describe()], meta)[tower]
    assert found.backward == pytest.approx(backward, rel=0.01)


@pytest.mark.parametrize("family", model_cases.LLMS)
def test_attention_costs_what_unfused_products_cost(family: str) -> None:
    """The formula for the fused operator is ours; eager attention needs none."""
    model = model_cases.text_model(family)
    window = model_cases.LLMS[family].get("sliding_window")  # beyond which eager attention goes on
    microbatch = model_cases.microbatch([min(40, window or 40)])  # chunks of delta nets are whole
    plain = model_cases.plain_causal_lm(model)
    ids, kept = microbatch.input_ids_T[None], microbatch.target_positions_L
    eager, _ = count_flops(lambda: plain(input_ids=ids, logits_to_keep=kept))
    ours, _ = count_flops(lambda: model(microbatch))
    # Hugging Face's convolutions go on behind the row, by all but one of a filter's values.
    beyond = 0
    for layer in model.llm.layer_sizes():
        channels = layer.hidden_size
        if isinstance(mixer := layer.mixer, DeltaSizes):
            channels = 2 * mixer.key_heads * mixer.key_dim + mixer.value_heads * mixer.value_dim
        if mixer is not None:
            beyond += 2 * mixer.filter_width * channels * (mixer.filter_width - 1)
    assert ours == eager - beyond


def test_frames_of_a_video_attend_to_themselves() -> None:
    module = build(case_of("qwen2_5_vl")).modality_modules()[0].describe()
    module = replace(module, layers=tuple(replace(n, window=None) for n in module.layers))
    image, video = ImageMeta(1, 1, 32, 8), ImageMeta(1, 1, 32, 8, frames=4)
    found = [
        microbatch_flops([module], MicrobatchMeta((SampleMeta("s", 0, 8, (i,), "vision"),), 8))
        for i in (image, video)
    ]
    pairs = 32 * 32 - 4 * 8 * 8
    difference = found[0]["vision"].forward - found[1]["vision"].forward
    assert difference == 4 * 32 * pairs * len(module.layers)


@pytest.mark.parametrize(("encoder", "option"), combine(SPLITS))
def test_actions_cost_what_torch_counts(
    encoder: str, option: tuple[tuple[str, ...], float]
) -> None:
    """Compare every F, B, I and W of a step of many stages, executed one by one."""
    freeze, split = option
    encoder, _, chunks = encoder.partition("; ")
    case = replace(case_of(encoder, freeze), chunked_loss=bool(chunks))
    model, batch = build(case), batch_of(case, [3, 0, 2], seed=7)
    layout = case.layout()
    modules = [m.describe() for m in model.modality_modules()]
    parts = dict.fromkeys(case.kinds, (2, 0, 1))
    graph = StageGraph(layout, len(batch), parts)
    metas = [padding_as_sample(m.meta) for m in batch]
    targets = [m.target_count for m in batch]
    durations = task_durations(graph, modules, metas, targets)
    by_name = {m.name: m for m in model.modality_modules()}
    specs = message_specs(graph, by_name, [m.meta for m in batch], torch.float32)
    stages = {i: make_stage(m) for i, m in cut_for_rank(model, layout, 0).items()}
    plan = lower_plan(random_order(graph, 5, split=split), graph, specs, sharding="none")
    state = StepState(0, stages, None, plan, batch, 1.0)
    state.begin()
    handlers = state.handlers()
    seen = set()
    for action in plan.actions[0]:
        counted, _ = count_flops(lambda: handlers[action.type](action))  # noqa: B023
        if action.type in COMPUTE:
            seen.add(action.type)
            assert durations(action) == pytest.approx(counted, rel=0.01), action
    assert ActionType.F in seen
