"""Tests of FLOPs of real models against the counter of PyTorch: models, and actions of a step."""

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
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.run.stage import make_stage
from torchmm.pipelining.run.step_state import StepState

# Grids that are multiples of the 4 x 4 window, because metadata has only the number of patches.
WINDOWS = KINDS["qwen2_5_vl"]._replace(grids=[(1, 4, 4), (1, 8, 4)])
FREEZES = [(), ("vision",), ("llm",), ("vision", "vision.connector"), ("vision.connector", "llm")]
SPLITS = [*((freeze, 1.0) for freeze in FREEZES), (FREEZES[0], 0.0), (FREEZES[3], 0.0)]
"""Frozen modules, and the fraction of backward passes that are split into I and W."""
FEW = ("clip", "qwen3_omni")
"""Encoders with all combinations in every run. For the other encoders, most are campaigns."""
CPU = torch.device("cpu")


def combine(options: list) -> list:
    """Combine encoders and options. Most cases of encoders that are not in `FEW` are campaigns."""
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
    if "vision" not in case.kinds:  # audio encoder
        (modality,) = case.kinds
        freeze = tuple(name.replace("vision", modality) for name in freeze)
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
    """Return metadata with padding as a sample, which is computed but not part of model FLOPs."""
    gap = SampleMeta("padding", 0, meta.tokens - meta.used_tokens)
    return replace(meta, samples=(*meta.samples, gap))


@pytest.mark.parametrize("freeze", FREEZES[:2], ids=str)
@pytest.mark.parametrize("encoder", KINDS)
def test_model_flops_match_torch(encoder: str, freeze: tuple[str, ...]) -> None:
    case = case_of(encoder, freeze)
    model = build(case)
    (microbatch,) = batch_of(case, [3])
    forward, loss = count_flops(lambda: model(microbatch))
    backward, _ = count_flops(loss.backward) if loss.requires_grad else (0, None)
    modules = [m.describe() for m in model.modality_modules()]
    meta = padding_as_sample(microbatch.meta)
    flops = microbatch_flops(modules, meta, microbatch.target_count).values()
    assert sum(f.forward for f in flops) == pytest.approx(forward, rel=0.01)
    assert sum(f.backward for f in flops) == pytest.approx(backward, rel=0.01)


@proves("flops", model_cases.LLMS)
@pytest.mark.parametrize("family", model_cases.LLMS)
def test_llm_family_flops_match_torch(family: str) -> None:
    model = model_cases.text_model(family)
    microbatch = model_cases.microbatch([20, 33])
    forward, loss = count_flops(lambda: model(microbatch))
    backward, _ = count_flops(loss.backward)
    samples = (SampleMeta("s", 0, 20), SampleMeta("s", 1, 33))
    meta = MicrobatchMeta(samples, 53)
    flops = microbatch_flops([model.llm.describe()], meta, microbatch.target_count)["llm"]
    assert flops.forward == pytest.approx(forward, rel=0.01)
    assert flops.backward == pytest.approx(backward, rel=0.01)


@proves("flops", model_cases.ENCODERS)
@pytest.mark.parametrize("family", model_cases.ENCODERS)
def test_encoder_family_flops_match_torch(family: str) -> None:
    encoder = model_cases.build(model_cases.pair_config("llama", family)).encoders["eye"]
    inputs = model_cases.make_inputs(family)
    if family in ("qwen2_5_vl", "qwen2_5_omni_vision"):  # grids that are multiples of the window
        inputs = replace(inputs, pixels=inputs.pixels[:48], grids_thw=WINDOWS.grids)
    forward, tokens = count_flops(lambda: encoder(inputs))
    backward, _ = count_flops(tokens.sum().backward)
    images = [
        ImageMeta(1, 1, prod(grid), prod(grid) // encoder.patches_per_token, grid[0])
        for grid in inputs.grids_thw
    ]
    meta = MicrobatchMeta((SampleMeta("s", 0, len(tokens), tuple(images), "eye"),), len(tokens))
    flops = microbatch_flops([encoder.describe()], meta)["eye"]
    assert flops.forward == pytest.approx(forward, rel=0.01)
    assert flops.backward == pytest.approx(backward, rel=0.01)


@pytest.mark.parametrize("name", model_cases.COMPOSITES)
def test_connector_flops_with_frozen_encoder_match_torch(name: str) -> None:
    modality = "audio" if name in model_cases.SPEECH else "vision"
    model = model_cases.build(model_cases.composite_config(name), freeze=(modality,))
    encoder = model.encoders[modality]
    if modality == "audio":
        inputs = three_samples(name)[0].encoders[modality]
    else:
        grids, pixels, _ = two_images(name, torch.Generator().manual_seed(5))
        inputs = EncoderInputs(pixels, grids, torch.empty(0))
    tokens = encoder(inputs)
    backward, _ = count_flops(tokens.sum().backward)
    images = [
        ImageMeta(1, 1, prod(grid), prod(grid) // encoder.patches_per_token)
        for grid in inputs.grids_thw
    ]
    meta = MicrobatchMeta((SampleMeta("s", 0, len(tokens), tuple(images), modality),), len(tokens))
    flops = microbatch_flops([encoder.describe()], meta)[modality]
    assert flops.backward == pytest.approx(backward, rel=0.01)


@pytest.mark.parametrize("family", model_cases.LLMS)
def test_attention_flops_match_eager_attention(family: str) -> None:
    """Compare with eager attention of Hugging Face, which needs no separate FLOP formula."""
    model = model_cases.text_model(family)
    window = model_cases.LLMS[family].get("sliding_window")  # eager attention ignores the window
    microbatch = model_cases.microbatch([min(40, window or 40)])  # delta nets use complete chunks
    reference = model_cases.plain_causal_lm(model)
    ids, positions = microbatch.input_ids_T[None], microbatch.target_positions_L
    eager, _ = count_flops(lambda: reference(input_ids=ids, logits_to_keep=positions))
    flops, _ = count_flops(lambda: model(microbatch))
    # Convolutions of Hugging Face continue after the sequence, by the filter width minus one.
    extra_flops = 0
    for layer in model.llm.layer_sizes():
        channels = layer.hidden_size
        if isinstance(mixer := layer.mixer, DeltaSizes):
            channels = 2 * mixer.key_heads * mixer.key_dim + mixer.value_heads * mixer.value_dim
        if mixer is not None:
            extra_flops += 2 * mixer.filter_width * channels * (mixer.filter_width - 1)
    assert flops == eager - extra_flops


def test_video_frames_attend_to_themselves() -> None:
    module = build(case_of("qwen2_5_vl")).modality_modules()[0].describe()
    module = replace(module, layers=tuple(replace(n, window=None) for n in module.layers))
    image, video = ImageMeta(1, 1, 32, 8), ImageMeta(1, 1, 32, 8, frames=4)
    flops = [
        microbatch_flops([module], MicrobatchMeta((SampleMeta("s", 0, 8, (i,), "vision"),), 8))
        for i in (image, video)
    ]
    pairs = 32 * 32 - 4 * 8 * 8
    difference = flops[0]["vision"].forward - flops[1]["vision"].forward
    assert difference == 4 * 32 * pairs * len(module.layers)


@pytest.mark.parametrize(("encoder", "option"), combine(SPLITS))
def test_action_flops_match_torch(encoder: str, option: tuple[tuple[str, ...], float]) -> None:
    """Execute and compare every F, B, I and W action of a step with many stages."""
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
    stages = {i: make_stage(m) for i, m in split_model_for_rank(model, layout, 0).items()}
    plan = lower_plan(random_order(graph, 5, split=split), graph, specs, sharding="none")
    state = StepState(0, stages, None, plan, batch, 1.0)
    state.begin()
    handlers = state.handlers()
    executed = set()
    for action in plan.actions[0]:
        counted, _ = count_flops(lambda: handlers[action.type](action))  # noqa: B023
        if action.type in COMPUTE:
            executed.add(action.type)
            assert durations(action) == pytest.approx(counted, rel=0.01), action
    assert ActionType.F in executed
