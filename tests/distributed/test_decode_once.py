"""Ranks that share samples decode each image once and agree on corrupt samples.

Losses, gradient norms and image counts are equal to those of one process.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import run_distributed
from PIL import Image
from test_train_generation import GENERATOR
from tiny_recipe import records, tiny_recipe

from torchmm.parallel.mesh import start_process_group
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.training import agreement
from torchmm.training.build import build_run
from torchmm.training.hooks import validation
from torchmm.training.model_build import build_meta_model, choose_model_stages
from torchmm.training.shutdown import StopSignal
from torchmm.training.trainer import Trainer

pytestmark = pytest.mark.slow
STEPS = 3
GENERATES = {"model__generator__config": GENERATOR}
COLOCATED = {"parallel__placement": "colocated", "parallel__schedule": "optimus"}
DISAGGREGATED = {"parallel__placement": "disaggregated"}
LAYOUTS = {
    2: {
        "fsdp2": {"parallel__shard": 2, **GENERATES},
        "fsdp2, balanced": {"parallel__shard": 2, "data__balance": "images", **GENERATES},
        "pp2": {"parallel__pipeline": 2, **GENERATES},
        "tp2": {"parallel__tensor": 2, **GENERATES},
        "cp2": {"parallel__llm__context": 2, "parallel__shard": 2},
    },
    4: {
        "fsdp2 x tp2, balanced": {
            "parallel__shard": 2,
            "parallel__tensor": 2,
            "data__balance": "images",
            **GENERATES,
        },
        "pp2 x tp2": {"parallel__pipeline": 2, "parallel__tensor": 2, **GENERATES},
        "cp2 x tp2": {"parallel__llm__context": 2, "parallel__shard": 2, "parallel__tensor": 2},
        "colocated": {"parallel__pipeline": 2, "parallel__tensor": 2, **COLOCATED},
        "colocated, encoder unsharded": {
            "parallel__pipeline": 2,
            "parallel__tensor": 2,
            "parallel__vision__tensor": 1,
            "parallel__vision__sub_microbatch_images": 1,
            **COLOCATED,
        },
        "disaggregated": {
            "parallel__vision__shard": 2,
            "parallel__vision__sub_microbatch_images": 1,
            **DISAGGREGATED,
            **GENERATES,
        },
        "disaggregated, encoder split": {
            "parallel__vision__tensor": 2,
            **DISAGGREGATED,
            **GENERATES,
        },
    },
}


def noise_image(number: int) -> Image.Image:
    noise = np.random.default_rng(number).integers(0, 255, (40, 24 + 4 * (number % 5), 3))
    return Image.fromarray(noise.astype(np.uint8))


def write_data(directory: Path) -> None:
    """Write captions of one image, documents of two images, and target images.

    One source image and one target image are corrupt: their headers are complete, but the data are
    truncated.
    """
    directory.mkdir()
    for number in range(24):
        noise_image(number).save(directory / f"{number}.png")
    for number in (4, 17):
        file = directory / f"{number}.png"
        file.write_bytes(file.read_bytes()[:-900])
    read = [{"image": f"{n}.png", "text": f"a picture of number {n}"} for n in range(8)]
    read += [
        {"images": [f"{n}.png", None, f"{n + 1}.png"], "texts": [None, f"after {n} comes", None]}
        for n in range(8, 14)
    ]
    targets = [{"image": f"{n}.png", "text": f"draw number {n}"} for n in range(14, 24)]
    for name, rows in (("read", read), ("drawn", targets)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("decode") / "data"
    write_data(directory)
    return directory


def changes_of(layout: dict[str, object], data: Path) -> dict[str, object]:
    read = f'{{path="{data}/read.jsonl"}}'
    targets = f'{{path="{data}/drawn.jsonl", target_image_column="image"}}'
    sources = [read, targets] if "model__generator__config" in layout else [read]
    return {
        "training__steps": STEPS,
        "training__global_batch_size": 4,
        "training__sequence_length": 64,
        "data__sources": f"[{','.join(sources)}]",
        "data__validation": f"[{','.join(sources)}]",
        "validation__interval": STEPS,
        "validation__batches": 2,
        "validation__num_samples": 1,
        "validation__max_new_tokens": 1,
        "data__max_corrupt_fraction": 1.0,
        "training__deterministic": "true",
        **layout,
    }


def train_all(
    layouts: dict[str, dict], data: Path, tokenizer: Path, root: Path, alone: str = ""
) -> dict[str, list[dict]]:
    """Train all layouts and return their records.

    Args:
        alone: "corrupt" disables the exchange of corrupt samples between ranks.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    if alone:
        for module in (agreement, validation):
            module.gather_corrupt_samples = lambda samples, mesh, **_: samples
    by_layout = {}
    for name, layout in layouts.items():
        run_dir = root / f"{name}{alone}-{ranks}".replace(" ", "-").replace(",", "")
        recipe = tiny_recipe(run_dir, tokenizer, ranks, **changes_of(layout, data))
        run = resolve_recipe(recipe, ranks)
        model, words = build_meta_model(run)
        cut = choose_model_stages(run, model, words, torch.device("cpu"))
        if not torch.distributed.is_initialized():
            start_process_group(recipe.parallel, torch.device("cpu"))
        with StopSignal() as stop:
            parts = build_run(run, run_dir, torch.device("cpu"), model, words, cut)
            Trainer(parts, stop).run()
        torch.distributed.barrier()
        by_layout[name] = records(run_dir)
    return by_layout


@pytest.fixture(scope="module")
def one_process(data, real_data, tmp_path_factory) -> dict[bool, list[dict]]:
    """Return the records of one process, with and without target images."""
    layouts = {"drawn": GENERATES, "read": {}}
    root = tmp_path_factory.mktemp("one")
    [by_layout] = run_distributed(train_all, 1, layouts, data, real_data, root)
    return {True: by_layout["drawn"], False: by_layout["read"]}


def single_process_records(one_process: dict[bool, list[dict]], layout: dict) -> list[dict]:
    return one_process["model__generator__config" in layout]


def images(record: dict) -> int:
    """Return the number of images in the samples of a step, including target images."""
    per_s = record["media_per_s"] + (record["generated_images_per_s"] or 0.0)
    return round(per_s * record["step_ms"] / 1e3)


def test_one_process_decodes_all_valid_images(one_process):
    for steps in one_process.values():
        missing = [images(record) - record["decoded_media"] for record in steps]
        assert sum(missing) > 0 and min(missing) >= 0
        assert steps[-1]["skipped_samples"] > 0
        assert all(record["data_read_bytes"] > 0 for record in steps)


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.campaign)], ids=["2 ranks", "4 ranks"]
)
def test_replicas_decode_each_image_once(ranks, data, real_data, one_process, tmp_path):
    layouts = LAYOUTS[ranks]
    by_layout = run_distributed(train_all, ranks, layouts, data, real_data, tmp_path)[0]
    for name, actual in by_layout.items():
        for one, other in zip(
            single_process_records(one_process, layouts[name]), actual, strict=True
        ):
            for key in ("loss", "grad_norm", "validation_loss"):
                assert other[key] == (one[key] and pytest.approx(one[key], rel=1e-4)), (name, key)
            assert other["decoded_media"] == one["decoded_media"], (name, one["step"])
            # Each data-parallel rank counts a corrupt sample once, when it first reads it.
            counted_twice = (
                name.startswith("fsdp2") and other["skipped_samples"] > one["skipped_samples"]
            )
            assert counted_twice or other["skipped_samples"] == one["skipped_samples"], (
                name,
                one["step"],
            )
            assert images(other) == images(one)
            assert (other["image_imbalance"] or 0.0) >= ("balanced" in name), (name, other)


def test_unshared_corrupt_samples_change_losses(data, real_data, one_process, tmp_path):
    layouts = {name: LAYOUTS[2][name] for name in ("pp2", "fsdp2, balanced")}
    by_layout = run_distributed(train_all, 2, layouts, data, real_data, tmp_path, "corrupt")[0]
    for name, actual in by_layout.items():
        pairs = zip(single_process_records(one_process, layouts[name]), actual, strict=True)
        assert any(abs(a["loss"] / b["loss"] - 1) > 1e-4 for a, b in pairs), name
