"""Draws are reproducible, and the judge detects defects.

run.py judges the draws (`./scripts/test.sh`).
"""

from dataclasses import replace
from random import Random

import pytest

from fuzz.campaign import features
from fuzz.composites import OMNI, draw_composite
from fuzz.draw import STEPS, Draw, Layout, draw_recipe, merged
from fuzz.judge import Judge
from fuzz.models import source_of

SMALL: Draw = Draw(
    "small",
    "text",
    {
        "model": {
            "llm": {
                "config": {
                    "model_type": "llama",
                    "vocab_size": 96,
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                }
            }
        },
        "freeze": {"modules": []},
        "training": {"global_batch_size": 4, "sequence_length": 64},
    },
    Layout(2, {"parallel": {"shard": 2}}),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "message"),
    [("", ""), ("gradient", "gradient of"), ("rows", "loss"), ("averages", "average: rank 0")],
)
def test_judge_detects_defect(defect, message):
    sections = merged(SMALL.sections, {"training": {"ema_decay": 0.9}})
    with Judge(defect=defect) as judge:
        verdict = judge(replace(SMALL, sections=sections))
    if not defect:
        assert verdict.kind == "equal", verdict
        return
    assert (verdict.kind, verdict.how) == ("failed", "different")
    assert any(message in problem for problem in verdict.problems)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "defect", "message"),
    [(OMNI, "", None), (OMNI, "rows", "loss"), (["audioflamingo3"], "", None)],
)
def test_judge_supports_audio_models(types, defect, message):
    models = (draw_composite(Random(seed)) for seed in range(100))
    model = next(m for m in models if m["config"]["model_type"] in types)
    draw = replace(SMALL, source=source_of(model), sections={**SMALL.sections, "model": model})
    with Judge(defect=defect) as judge:
        verdict = judge(draw)
    assert verdict.kind == ("failed" if defect else "equal"), verdict
    assert message is None or any(message in problem for problem in verdict.problems)


def test_draws_depend_on_seed_and_index():
    assert draw_recipe(7, 3) == draw_recipe(7, 3)
    assert draw_recipe(7, 3) != draw_recipe(8, 3)
    assert STEPS == 2
    assert Draw.from_table(draw_recipe(7, 3).as_table()) == draw_recipe(7, 3)
    assert list(features(SMALL.first.sections)) == ["parallel.shard=2"]
