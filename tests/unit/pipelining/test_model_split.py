"""Tests of splitting a model into the stages of a layout."""

import pytest

from torchmm.models.build import build_model
from torchmm.models.multimodal import MultimodalModel
from torchmm.pipelining.plan.graph import StageLayout, StageSpec
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.schedules.layouts import ModuleLayers, megatron_layout, separated_layout
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
MODEL = {
    "llm": {
        "config": {
            "model_type": "qwen3",
            **SIZES,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "vocab_size": 32,
            "head_dim": 8,
        }
    },
    "encoders": {
        "eye": {
            "config": {
                "model_type": "siglip_vision_model",
                **SIZES,
                "num_hidden_layers": 3,
                "image_size": 16,
                "patch_size": 8,
            }
        }
    },
}
MODULES = [
    ModuleLayers("eye", "encoder", (1.0,) * 3, sub_microbatched=True),
    ModuleLayers("llm", "llm", (1.0,) * 5),
]


def model() -> MultimodalModel:
    return build_model(ModelConfig.model_validate(MODEL), FreezeConfig())


@pytest.mark.parametrize(
    "layout",
    [
        separated_layout(MODULES, 2, {"llm": 2}),
        separated_layout(MODULES, 3),
        megatron_layout(MODULES, 2, 2),
    ],
)
def test_ranks_have_every_stage_and_weight_once(layout: StageLayout) -> None:
    names: list[str] = []
    for rank in range(layout.rank_count):
        rank_model = model()
        stages = split_model_for_rank(rank_model, layout, rank)
        assert tuple(stages) == layout.stages_on_rank(rank)
        for index, stage in stages.items():
            spec = layout.stages[index]
            assert stage.name == spec.module
            assert [i for i, _ in stage.indexed_layers()] == list(range(spec.start, spec.stop))
            assert stage.is_first == (spec.start == 0)
            assert stage.is_last == (spec.stop == len(stage.layer_sizes()))
        assert {id(s) for s in rank_model.all_stages()} == {id(s) for s in stages.values()}
        names += dict(rank_model.named_parameters())
    assert sorted(names) == sorted(dict(model().named_parameters()))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((("llm", 0, 5),), r"the layout has modules \['llm'\], but the model has \['eye', 'llm'\]"),
        ((("eye", 0, 3), ("llm", 0, 4)), "llm: the stages contain 4 of 5"),
        ((("eye", 1, 3), ("llm", 0, 5)), "are not consecutive from 0"),
    ],
)
def test_layouts_of_different_models_are_rejected(stages: tuple, message: str) -> None:
    specs = (StageSpec(i, *stage, (0,)) for i, stage in enumerate(stages))
    with pytest.raises(ValueError, match=message):
        split_model_for_rank(model(), StageLayout(tuple(specs), ()), 0)
