"""A model that is split into stages equals the full model: values, gradients and names."""

from collections import defaultdict

import pytest
import torch
from model_cases import (
    BASIC_ENCODERS,
    BASIC_LLMS,
    COMPOSITES,
    SPEECH,
    composite_config,
    make_inputs,
    microbatch,
    pair_config,
    relative_error,
)
from omni_cases import images_and_audio
from proofs import proves
from speech_cases import three_samples
from test_multimodal import ROWS, two_samples_with_images
from torch import Tensor

from torchmm.common.batch import EncoderInputs, Microbatch
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.layered import LayeredModule, StageRange, stage_ranges
from torchmm.models.llm import StageInput
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

CONFIGS = {
    **{f"{llm}+clip": pair_config(llm, "clip") for llm in BASIC_LLMS},
    **{f"llama+{encoder}": pair_config("llama", encoder) for encoder in BASIC_ENCODERS},
    "llava": composite_config("llava", vision_feature_layer=-1),
    "qwen2_5_vl": composite_config("qwen2_5_vl"),
    "tied qwen2_5_vl": composite_config("qwen2_5_vl", tie_word_embeddings=True),
}

StageCut = list[tuple[int, int, int]]
CUTS: dict[str, dict[str, StageCut]] = {
    # Maps modules to (first layer, last layer + 1, rank) of each stage.
    "two ranks": {"vision": [(0, 2, 0), (2, 3, 1)], "llm": [(0, 1, 0), (1, 3, 1)]},
    "interleaved": {
        "vision": [(0, 1, 0), (1, 2, 1), (2, 2, 0), (2, 3, 1)],
        "llm": [(0, 1, 0), (1, 1, 1), (1, 2, 0), (2, 3, 1)],
    },
    "ends without layers": {
        "vision": [(0, 0, 0), (0, 3, 1), (3, 3, 0)],
        "llm": [(0, 0, 0), (0, 2, 1), (2, 3, 0), (3, 3, 1)],
    },
    "encoder on one rank": {"vision": [(0, 3, 0)], "llm": [(0, 2, 0), (2, 3, 1)]},
    "a stage per layer and end": {
        "vision": [(0, 0, 0), (0, 1, 1), (1, 2, 2), (2, 3, 0), (3, 3, 1)],
        "llm": [(0, 0, 0), (0, 1, 1), (1, 2, 2), (2, 3, 0), (3, 3, 1)],
    },
}


def split_model(config: ModelConfig, stages: dict[str, StageCut], rank: int) -> MultimodalModel:
    """Return the stages of one rank, initialized with seed 0. Rank 0 has all further encoders."""
    model = build_model(config, FreezeConfig())
    vision = next(iter(model.encoders))
    parts = defaultdict(list)
    for module, module_stages in stages.items():
        ranges = stage_ranges([(start, stop) for start, stop, _ in module_stages])
        for stage, (_, _, stage_rank) in zip(ranges, module_stages, strict=True):
            if stage_rank == rank:
                parts[vision if module == "vision" else module].append(stage)
    if rank == 0:
        for name in list(model.encoders)[1:]:
            layers = len(model.encoders[name].layers)
            parts[name] = list(stage_ranges([(0, layers)]))
    model.reduce_to_stages(parts)
    materialize(model, "cpu")
    init_weights(model, 0)
    return model


def example(name: str, model: MultimodalModel) -> Microbatch:
    """Return two packed samples. All images are in the first one, unless there is also audio."""
    if name in SPEECH:
        return three_samples(name)[0]
    if "audio" in model.encoders:
        return images_and_audio(name)
    if name in ROWS:
        return two_samples_with_images(name)[0]
    families = (*BASIC_ENCODERS, "qwen2_vl", "gemma4")
    families += ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe")
    encoder_name = "glm4v" if name == "glm46v" else name  # has the encoder of glm4v
    family = next((family for family in families if encoder_name.endswith(family)), "clip")
    inputs = make_inputs(family)
    encoder = next(iter(model.encoders.values()))
    with torch.no_grad():
        tokens = len(encoder(inputs))
    positions = torch.arange(3, 3 + tokens)
    images = {encoder.name: EncoderInputs(inputs.pixels, inputs.grids_thw, positions)}
    batch = microbatch([tokens + 9, 7], images, positions)
    if model.text.mrope:
        batch.position_ids = batch.position_ids.expand(3, -1) * torch.tensor([[1], [2], [3]])
    return batch


def run(ranks: list[MultimodalModel], stages: dict[str, StageCut], batch: Microbatch) -> Tensor:
    """Return the loss of a batch that all stages process in order."""
    vision = next(iter(ranks[0].encoders))
    views = {
        (module, rank): iter(model.stages[vision if module == "vision" else module])
        for module in stages
        for rank, model in enumerate(ranks)
    }
    hidden = None  # also features of deepstack layers
    for _, _, rank in stages["vision"]:
        hidden = next(views["vision", rank])(batch.encoders[vision], hidden)
    inputs: StageInput = {vision: hidden}
    for name in list(ranks[0].encoders)[1:]:
        inputs[name] = ranks[0].stages[name][0](batch.encoders[name])
    for _, _, rank in stages["llm"]:
        inputs = next(views["llm", rank])(batch, inputs)
    assert isinstance(inputs, Tensor)
    return inputs


FURTHER = tuple(name for name in COMPOSITES if name not in CONFIGS)
FINEST = "a stage per layer and end"
EVERY_CUT = ("llama_tied+clip", "llama+qwen2_5_vl", "tied qwen2_5_vl", "qwen3_vl")
"""Families for which all splits are tested. Splitting does not depend on the family."""
CASES = [(name, FINEST) for name in (*CONFIGS, *FURTHER)]
CASES += [(name, cut_name) for name in EVERY_CUT for cut_name in CUTS if cut_name != FINEST]
CONFIGS |= {name: composite_config(name) for name in FURTHER}


@proves("stages", COMPOSITES)
@pytest.mark.parametrize(("name", "cut_name"), CASES)
def test_stages_match_full_model(name: str, cut_name: str) -> None:
    stages = CUTS[cut_name]
    full = build_model(CONFIGS[name], FreezeConfig())
    materialize(full, "cpu")
    init_weights(full, 0)
    batch = example(name, full)
    loss = full(batch)
    loss.backward()
    reference = dict(full.named_parameters())

    count = 1 + max(rank for module_stages in stages.values() for _, _, rank in module_stages)
    ranks = [split_model(CONFIGS[name], stages, rank) for rank in range(count)]
    actual = run(ranks, stages, batch)
    assert relative_error(actual, loss) < 1e-5
    actual.backward()
    grads: dict[str, Tensor] = {}
    for model in ranks:
        copies = model.tied_replicas()
        for fqn, parameter in model.named_parameters():
            original = copies.get(fqn, fqn)
            assert torch.equal(parameter, reference[original]), fqn
            if not parameter.requires_grad:  # positions of audio encoders
                assert parameter.grad is None
                continue
            assert parameter.grad is not None
            assert original not in grads or original in copies.values() or fqn in copies, fqn
            grads[original] = parameter.grad + grads.get(original, 0)
    assert set(grads) == {fqn for fqn, parameter in reference.items() if parameter.requires_grad}
    largest = max(p.grad.norm() for p in reference.values() if p.grad is not None)
    for fqn, grad in grads.items():
        expected = reference[fqn].grad
        assert expected is not None
        assert (grad - expected).norm() <= 1e-5 * expected.norm() + 1e-6 * largest, fqn


@pytest.mark.parametrize("name", ["llama_tied+clip", "qwen2_5_vl"])
def test_stages_share_parameters_of_model(name: str) -> None:
    for rank in (0, 1):
        model = split_model(CONFIGS[name], CUTS["interleaved"], rank)
        in_views = [id(p) for stage in model.all_stages() for p in stage.parameters()]
        assert sorted(in_views) == sorted(id(p) for p in model.parameters())
        tensors = {id(b) for b in model.buffers()}
        assert {id(b) for stage in model.all_stages() for b in stage.buffers()} <= tensors


def test_stage_names_and_buffers_match_full_model() -> None:
    full = build_model(CONFIGS["llama_tied+clip"], FreezeConfig())
    ranks = [split_model(CONFIGS["llama_tied+clip"], CUTS["interleaved"], rank) for rank in (0, 1)]
    first, second = (set(model.state_dict()) for model in ranks)
    assert first | second == set(full.state_dict())
    assert not first & second
    assert ranks[0].tied_replicas() == {}
    assert ranks[1].tied_replicas() == {
        "llm.backbone.lm_head.weight": "llm.backbone.model.embed_tokens.weight"
    }
    assert len(ranks[1].tied_replica_parameters()) == 1


def test_module_without_stage_is_empty() -> None:
    model = split_model(CONFIGS["llama+siglip"], CUTS["encoder on one rank"], 1)
    encoder = model.encoders["eye"]
    assert isinstance(encoder, LayeredModule)
    assert model.stages["eye"] == ()
    assert list(encoder.parameters()) == [] and encoder.layers == []
    assert encoder.describe().parameters == 0
    assert [stage.name for stage in model.all_stages()] == ["llm"]


def test_train_and_eval_modes_apply_to_stages() -> None:
    model = split_model(CONFIGS["llama+clip"], CUTS["interleaved"], 0)
    model.eval()
    assert not any(m.training for stage in model.all_stages() for m in stage.modules())
    model.train()
    assert all(m.training for stage in model.all_stages() for m in stage.modules())


def test_descriptions_of_ranks_sum_to_full_model() -> None:
    config = CONFIGS["granite+clip"]
    full = build_model(config, FreezeConfig())
    ranks = [split_model(config, CUTS["ends without layers"], rank) for rank in (0, 1)]
    for index, module in enumerate(full.modality_modules()):
        parts = [model.modality_modules()[index].describe() for model in ranks]
        description = module.describe()
        assert sum(p.parameters for p in parts) == description.parameters
        assert sum(len(p.layers) for p in parts) == len(description.layers)
        for key in ("embedding_flops_per_unit", "head_flops_per_unit"):
            assert sum(getattr(p, key) for p in parts) == getattr(description, key)
        assert len(ranks[0].modality_modules()[index].layer_sizes()) == len(description.layers)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"eye": [StageRange(0, 4, True, True)]},
            r"eye: layers \[0, 4\) are out of range \(it has 3\)",
        ),
        ({"llm": [StageRange(0, 2, True, False), StageRange(1, 3, False, True)]}, "another stage"),
        ({"ear": [StageRange(0, 1, True, True)]}, r"unknown modules \['ear'\].*'eye', 'llm'"),
        (
            {"llm": [StageRange(0, 1, True, False), StageRange(2, 3, False, True)]},
            "different ranks, or merge them",
        ),
    ],
)
def test_invalid_stage_ranges_are_rejected(parts: dict, message: str) -> None:
    model = build_model(CONFIGS["llama_tied+clip"], FreezeConfig())
    with pytest.raises(ValueError, match=message):
        model.reduce_to_stages(parts)


def test_stage_ranges_must_be_consecutive() -> None:
    assert stage_ranges([(0, 0), (0, 2), (2, 2)]) == [
        StageRange(0, 0, True, False),
        StageRange(0, 2, False, False),
        StageRange(2, 2, False, True),
    ]
    for wrong in ([(0, 1), (2, 3)], [(1, 2)], [(0, 2), (2, 1)]):
        with pytest.raises(ValueError, match="are not consecutive"):
            stage_ranges(wrong)
