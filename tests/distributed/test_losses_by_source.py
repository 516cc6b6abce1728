"""Losses by data source are the same in all layouts."""

import json

import pytest
from tiny_recipe import LLM, arguments, train_records

pytestmark = pytest.mark.slow
LAYOUTS = {
    "replicate": {"parallel__replicate": 2},
    "pipeline": {"parallel__pipeline": 2},
    "virtual stages": {
        "parallel__pipeline": 2,
        "parallel__virtual_stages": 2,
        "parallel__schedule": "interleaved_1f1b",
    },
    "tensor": {"parallel__tensor": 2, "parallel__shard": 1},
    "context": {"parallel__llm__context": 2},
}


@pytest.fixture(scope="module")
def changes(tmp_path_factory, real_data):
    """Return a recipe with two training sources and two validation sources."""
    folder = tmp_path_factory.mktemp("texts")
    captions = [f"A number of words: {number % 7} {number % 5}." for number in range(200)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in captions))

    def sources(part):
        images = f'{{path="{real_data}/tuxpaint_stamps/{part}", name="stamps"}}'
        return f'[{images}, {{path="{folder}/texts.jsonl", name="texts"}}]'

    return {
        "data__sources": sources("train"),
        "data__validation": sources("validation"),
        LLM.strip("-").replace(".", "__") + "num_hidden_layers": 4,
        LLM.strip("-").replace(".", "__") + "tie_word_embeddings": "false",
        "training__steps": 2,
        "training__global_batch_size": 4,
        "validation__interval": 2,
        "validation__batches": 1,
    }


@pytest.fixture(scope="module")
def train(tmp_path_factory, real_data, train_server, changes):
    """Return a function that trains in a layout and returns the records of the steps."""

    def run(name, ranks, **layout):
        run_dir = tmp_path_factory.mktemp(name.replace(" ", "_")) / "run"
        command = arguments(run_dir, real_data, **changes, **layout)
        return train_records(train_server, run_dir, command, ranks)

    return run


@pytest.fixture(scope="module")
def single(train):
    return train("single", 1)


def test_source_losses_of_one_process_are_separate(single):
    for record in single:
        by_source = record["loss_by_source"]
        assert by_source.keys() == {"stamps", "texts"}
        assert by_source["stamps"] != by_source["texts"]
        assert min(by_source.values()) < record["loss"] < max(by_source.values())
    assert single[0]["validation_loss_by_source"] is None
    held_out = single[1]["validation_loss_by_source"]
    assert min(held_out.values()) < single[1]["validation_loss"] < max(held_out.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_source_losses_are_equal_in_layouts(train, single, layout):
    for found, expected in zip(train(layout, 2, **LAYOUTS[layout]), single, strict=True):
        for metric in ("loss_by_source", "validation_loss_by_source"):
            assert found[metric] == (
                None if expected[metric] is None else pytest.approx(expected[metric], rel=1e-5)
            )
