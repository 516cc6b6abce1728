"""Model families and data formats with train.py: they train, resume and export."""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image
from tiny_recipe import records, weights
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

pytestmark = pytest.mark.slow
IMAGE_ID = 3
LLM = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2432,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "image_size": 32, "patch_size": 8}
PAIR = {"llm": {"config": {"model_type": "llama", **LLM}}, "encoders": {"eye": {"config": SIGLIP}}}
LLAVA = {
    "config": {
        "model_type": "llava",
        "vision_config": {**SIGLIP, "model_type": "clip_vision_model"},
        "text_config": {"model_type": "llama", **LLM},
        "image_token_index": IMAGE_ID,
        "image_seq_length": 16,
    }
}
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@pytest.fixture(scope="module")
def vision_tokenizer(tmp_path_factory, real_data) -> Path:
    """Return the tokenizer of the captions with the special tokens of Qwen2.5-VL."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(real_data / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def qwen(vision_tokenizer) -> dict[str, Any]:
    """Return the `[model]` section of a tiny Qwen2.5-VL."""
    tokenizer = AutoTokenizer.from_pretrained(vision_tokenizer)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    vision = {
        "model_type": "qwen2_5_vl_vision",
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 48,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 3]}
    config = {
        "model_type": "qwen2_5_vl",
        "vision_config": vision,
        "text_config": {**LLM, "rope_parameters": rope},
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }
    return {"tokenizer": str(vision_tokenizer), "config": config}


@pytest.fixture
def train(tmp_path, real_data, train_server):
    """Return a function that runs a recipe and returns its run directory."""

    def run(
        name: str, model: dict[str, Any], source: object, ranks: int = 1, **sections: Any
    ) -> Path:
        sources = source if isinstance(source, list) else [{"path": str(source)}]
        data = {"workers": 0, "index_cache_dir": str(tmp_path / "index"), "sources": sources}
        recipe = {
            "name": name,
            "output_dir": str(tmp_path),
            "model": {"tokenizer": str(real_data / "tokenizer"), **model},
            "data": {**data, **sections.pop("data", {})},
            "training": {
                **{"steps": 2, "global_batch_size": 2, "sequence_length": 128},
                **sections.pop("training", {}),
            },
            "optimizer": {"lr": 2e-3, "lr_schedule": "constant"},
            "checkpoint": {"export_hf": False},
        }
        recipe.update(sections)
        file = tmp_path / f"{name}.toml"
        file.write_text(tomli_w.dumps(recipe))
        codes, output = train_server.run(["--config", file], tmp_path / f"{name}-log", ranks)
        assert codes == [0] * ranks, output
        return tmp_path / name

    return run


def noise_png(width: int, height: int, seed: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, "PNG")
    return stream.getvalue()


def write_parquet(directory: Path, rows: list[dict]) -> Path:
    directory.mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(directory / "part-0.parquet")
    return directory


def write_text(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def one_sample(tmp_path) -> Path:
    """Return a validation source of one captioned image."""
    image = {"bytes": noise_png(56, 56, 7), "path": None}
    return write_parquet(tmp_path / "one", [{"image": image, "text": "A large red chicken."}])


def hugging_face_loss(
    export: Path, seed: int, prefix: list[int], suffix: list[int], per_image: int
) -> float:
    """Compute the loss of the exported model on `one_sample` (seed 7) with Hugging Face."""
    model = AutoModelForImageTextToText.from_pretrained(export, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(export)
    processor = AutoImageProcessor.from_pretrained(export, use_fast=False)
    inputs = processor(Image.open(io.BytesIO(noise_png(56, 56, seed))), return_tensors="pt")
    text = tokenizer.encode("A large red chicken.", add_special_tokens=False)
    image_id = model.config.image_token_id
    before = [1, *prefix, *[image_id] * per_image, *suffix]
    ids = torch.tensor([[*before, *text, 2]])
    labels = ids.clone()
    labels[:, : len(before)] = -100
    kinds = (ids == image_id).int()
    if prefix:
        inputs["mm_token_type_ids"] = kinds
    with torch.no_grad():
        return model(input_ids=ids, labels=labels, **inputs).loss.item()


VALIDATION = {"validation": {"interval": 2, "batches": 1}, "checkpoint": {"interval": 0}}


@pytest.mark.parametrize("name", ["pair", "llava", "qwen2_5_vl"])
def test_export_has_validation_loss_of_run(name, train, real_data, one_sample, qwen):
    model = {"pair": PAIR, "llava": LLAVA, "qwen2_5_vl": qwen}[name]
    data = {"validation": [{"path": str(one_sample)}]}
    captions = real_data / "tuxpaint_stamps/train"
    training = {"sequence_length": 512} if name == "qwen2_5_vl" else {}
    run_dir = train(name, model, captions, data=data, training=training, **VALIDATION)
    expected = records(run_dir)[-1]["validation_loss"]
    markers: list[list[int]] = [[], []]
    if name == "qwen2_5_vl":
        markers = [[qwen["config"][f"vision_{end}_token_id"]] for end in ("start", "end")]
    per_image = 4 if name == "qwen2_5_vl" else 16
    exported, other_image = (
        hugging_face_loss(run_dir / "hf", seed, *markers, per_image) for seed in (7, 8)
    )
    assert exported == pytest.approx(expected, abs=1e-4)
    assert abs(exported - expected) < 0.1 * abs(exported - other_image), (
        "a different image gives a different loss"
    )


def test_naflex_trains_on_images_of_all_sizes(train, tmp_path):
    sizes = [(20, 90), (64, 64), (200, 40), (33, 57), (16, 16)]
    rows = [
        {"image": {"bytes": noise_png(*sizes[i % 5], i), "path": None}, "text": f"noise {i}"}
        for i in range(40)
    ]
    eye = {"model_type": "siglip2_vision_model", **TOWER, "patch_size": 8, "num_patches": 16}
    model = {
        "llm": {"config": {"model_type": "qwen3", "head_dim": 16, **LLM}},
        "encoders": {"eye": {"config": eye, "processor": {"max_num_patches": 16}}},
    }
    source = write_parquet(tmp_path / "sizes", rows)
    alone = records(train("one", model, source))
    sharded = records(train("two", model, source, ranks=2))
    assert [r["loss"] for r in sharded] == pytest.approx([r["loss"] for r in alone], rel=1e-5)
    assert alone[-1]["loss"] < alone[0]["loss"]


INTERNVL = {
    "config": {
        "model_type": "internvl",
        "vision_config": {
            "model_type": "internvl_vision",
            **TOWER,
            "image_size": 32,
            "patch_size": 4,
        },
        "text_config": {"model_type": "qwen2", **LLM},
        "image_token_id": IMAGE_ID,
    },
    "processor": {"crop_to_patches": True, "max_patches": 4},
}
ONEVISION = {
    "config": {
        "model_type": "llava_onevision",
        "vision_config": {**SIGLIP, "vision_use_head": False},
        "text_config": {"model_type": "qwen2", **LLM},
        "image_token_index": IMAGE_ID,
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
        "vision_aspect_ratio": "anyres_max_1",
    },
}


@pytest.mark.parametrize(
    ("model", "layout", "balance"),
    [
        (INTERNVL, {"shard": 2}, "none"),
        (INTERNVL, {"shard": 2}, "images"),
        (ONEVISION, {"shard": 2}, "images"),
        (ONEVISION, {"pipeline": 2}, "none"),
    ],
    ids=["internvl, fsdp", "internvl, balanced", "onevision, balanced", "onevision, pipeline"],
)
def test_tiles_give_same_losses_on_two_ranks(model, layout, balance, train, tmp_path, real_data):
    """Tiles are processed like images, with at most 8 per sequence."""
    directory = tmp_path / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(real_data / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<img>", "</img>"]})
    tokenizer.save_pretrained(directory)
    model = {"tokenizer": str(directory), **model}
    captions = real_data / "tuxpaint_stamps/train"
    sections = {
        "data": {"max_tiles_per_sequence": 8},
        "training": {"sequence_length": 256, "global_batch_size": 4, "steps": 3},
    }
    alone = records(train("alone", model, captions, **sections))
    sections["data"]["balance"] = balance
    ranks = records(train("ranks", model, captions, ranks=2, parallel=layout, **sections))
    images = [r["media_per_s"] / r["samples_per_s"] for r in alone]
    assert min(images) > 2
    for record, reference in zip(ranks, alone, strict=True):
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_interleaved_documents_train(train, tmp_path):
    image = {"bytes": noise_png(32, 32, 0), "path": None}
    rows = [
        {"images": [image, None, image], "texts": [None, f"a picture {i} and another", None]}
        for i in range(40)
    ]
    steps = records(train("inter", PAIR, write_parquet(tmp_path / "inter", rows)))
    assert steps[-1]["loss"] < steps[0]["loss"]
    for r in steps:
        assert r["media_per_s"] == pytest.approx(2 * r["samples_per_s"])


def test_chat_trains_on_answers(train, tmp_path):
    """The loss approaches the loss of the answer, because all samples are equal."""
    question = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "A large red chicken."},
    ]
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat/a.png").write_bytes(noise_png(32, 32, 0))
    rows = [{"messages": messages, "images": ["a.png"]}] * 40
    source = write_text(tmp_path / "chat/a.jsonl", rows)
    steps = records(train("chat", PAIR, source, training={"steps": 8}))
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]


@pytest.mark.parametrize(
    "layout", [{"replicate": 2, "shard": 1}, {"shard": 2}], ids=["ddp", "fsdp"]
)
def test_ranks_without_images_train_with_others(layout, train, tmp_path):
    """Most samples are text, so that steps have fewer images than microbatches."""
    image = {"bytes": noise_png(32, 32, 0), "path": None}
    captions = [{"image": image, "text": f"noise {i}"} for i in range(9)]
    texts = [{"text": f"A large red chicken, and {i} more of them in the sun."} for i in range(400)]
    sources = [
        {"path": str(write_parquet(tmp_path / "captions", captions)), "weight": 1.0},
        {"path": str(write_text(tmp_path / "text.jsonl", texts)), "weight": 60.0},
    ]
    training = {"training": {"steps": 5, "global_batch_size": 8, "sequence_length": 64}}
    alone = records(train("alone", PAIR, sources, **training))
    ranks = records(train("ranks", PAIR, sources, ranks=2, parallel=layout, **training))
    images = [r["media_per_s"] * r["step_ms"] / 1e3 for r in alone]
    assert sum(images) > 0 and min(images) < 8
    for record, reference in zip(ranks, alone, strict=True):
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_balanced_stream_resumes_exactly(train, real_data):
    """Losses equal those of one rank that reads the stream without balancing."""
    source = [{"path": str(real_data / "tuxpaint_stamps/train"), "streaming": True}]
    data = {"shuffle_window": 64}
    balanced = {"ranks": 2, "data": {**data, "balance": "images"}}
    common = {"checkpoint": {"interval": 3, "export_hf": False}}
    uninterrupted = train(
        "uninterrupted", PAIR, source, training={"steps": 6}, **common, **balanced
    )
    train("parts", PAIR, source, training={"steps": 3}, **common, **balanced)
    resumed = train("parts", PAIR, source, training={"steps": 6}, **common, **balanced)
    alone = train("alone", PAIR, source, training={"steps": 6}, **common, data=data)
    assert [r["loss"] for r in records(resumed)] == [r["loss"] for r in records(uninterrupted)]
    for balanced_record, record in zip(records(uninterrupted), records(alone), strict=True):
        assert balanced_record["loss"] == pytest.approx(record["loss"], rel=1e-5)
    resumed_weights, expected_weights = weights(resumed), weights(uninterrupted)
    assert resumed_weights.keys() == expected_weights.keys()
    assert all(
        torch.equal(resumed_weights[name], expected_weights[name]) for name in resumed_weights
    )


def test_training_loads_weights_of_local_directories(train, real_data, tmp_path):
    """The export has the weights of the sources, because the learning rate is 0."""
    llm = LlamaForCausalLM(LlamaConfig(**LLM))
    llm.save_pretrained(tmp_path / "llm")
    AutoTokenizer.from_pretrained(real_data / "tokenizer").save_pretrained(tmp_path / "llm")
    tower = SiglipVisionModel(SiglipVisionConfig(**{**SIGLIP, "vision_use_head": False}))
    tower.save_pretrained(tmp_path / "tower")
    model = {
        "llm": {"source": str(tmp_path / "llm")},
        "encoders": {"eye": {"source": str(tmp_path / "tower")}},
    }
    no_update = {
        "optimizer": {"lr": 0.0, "lr_schedule": "constant"},
        "checkpoint": {"export_hf": True},
    }
    run_dir = train("start", model, real_data / "tuxpaint_stamps/train", ranks=2, **no_update)
    export = AutoModelForImageTextToText.from_pretrained(run_dir / "hf").model
    for exported, source in ((export.language_model, llm.model), (export.vision_tower, tower)):
        expected = source.state_dict()
        actual = {k.removeprefix("vision_model."): v for k, v in exported.state_dict().items()}
        shared = {k: v for k, v in expected.items() if k.removeprefix("vision_model.") in actual}
        assert len(shared) >= 2 * 9
        for name, value in shared.items():
            assert torch.equal(actual[name.removeprefix("vision_model.")], value), name
