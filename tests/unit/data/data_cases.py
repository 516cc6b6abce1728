"""Tiny images, records, specs and recipe sections."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

from torchmm.common.batch import ImageSpec, SequenceAssignment
from torchmm.data.items import BalancedRankSamples, PackItems
from torchmm.data.loader import Loader
from torchmm.data.nodes import rank_samples
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.training_section import TrainingConfig

WORDS = "a red green blue small large round square picture of one two three dogs cats in the sun"


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return a PNG image of noise."""
    rng = np.random.default_rng(seed)
    return encode(Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)), "PNG")


def encode(image: Image.Image, fmt: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, fmt, **options)
    return stream.getvalue()


def caption(i: int) -> str:
    words = WORDS.split()
    return " ".join(words[(i * 7 + k) % len(words)] for k in range(3 + i % 9))


def caption_rows(count: int) -> list[dict]:
    return [
        {"image": {"bytes": png(16 + i % 5 * 8, 24, i), "path": None}, "text": caption(i)}
        for i in range(count)
    ]


def write_parquet(directory: Path, rows: list[dict]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(directory / "part-0.parquet")
    return directory


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_shard(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """Write a tar file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return path


def write_meta(
    directory: Path, kind: str, fields: dict | None = None, split: object = None, **more: object
) -> Path:
    """Write the metadata that `energon prepare` writes next to shards."""
    meta = directory / ".nv-meta"
    meta.mkdir(parents=True, exist_ok=True)
    described = {"sample_type": {"__module__": "megatron.energon", "__class__": kind}, **more}
    if fields is not None:
        described["field_map"] = fields
    (meta / "dataset.yaml").write_text(json.dumps(described))  # JSON is also valid YAML
    shards = sorted(str(f.relative_to(directory)) for f in directory.rglob("*.tar"))
    (meta / "split.yaml").write_text(json.dumps(split or {"split_parts": {"train": shards}}))
    (meta / ".info.yaml").write_text("shard_counts: {}")
    return directory


CLIP = ImageSpec(
    encoder="vision",
    inputs="fixed",
    processor_class="CLIPImageProcessor",
    processor={
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
    },
    patch_size_px=8,
)
NAFLEX = ImageSpec(
    encoder="vision",
    inputs="patches",
    processor_class="Siglip2ImageProcessor",
    processor={"patch_size": 8, "max_num_patches": 12},
    patch_size_px=8,
)
QWEN = ImageSpec(
    encoder="vision",
    inputs="patches",
    processor_class="Qwen2VLImageProcessor",
    processor={
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 512},
    },
    patch_size_px=4,
    merge=2,
)
GLM = replace(QWEN, processor_class="Glm4vImageProcessor")
"""Image spec whose pixel limits apply to both frames of a temporal patch."""


def training(**changes: object) -> TrainingConfig:
    values = {
        "global_batch_size": 4,
        "microbatch_size": 1,
        "sequence_length": 64,
        "seed": 3,
        "device": "cpu",
    }
    return TrainingConfig(**{**values, **changes})


def data_config(tmp_path: Path, *sources: SourceConfig, **changes: object) -> DataConfig:
    values = {"workers": 0, "packing_buffer_size": 3, "index_cache_dir": str(tmp_path / "index")}
    return DataConfig(sources=list(sources), **{**values, **changes})


def planned_shares(loader: Loader) -> Iterator[list[list[PackItems]] | BalancedRankSamples]:
    """Yield the samples that the rank of a loader decodes in each step, from the first step on."""
    for step in loader._steps._make_steps(None):
        yield rank_samples(step, loader._rank)


def largest_first(packs: list) -> SequenceAssignment:
    """Assign the packs with the most tokens to the first of two ranks."""
    order = sorted(range(len(packs)), key=lambda i: -packs[i].used_tokens)
    half = len(packs) // 2
    return SequenceAssignment([[[n] for n in order[:half]], [[n] for n in order[half:]]])


def content(batch):
    """Return all model inputs of a batch as comparable values."""

    def comparable(value):
        return value.numpy().tobytes() if hasattr(value, "numpy") else value

    return [
        (
            [comparable(getattr(m, key)) for key in ("input_ids_T", "targets_T", "position_ids")],
            m.cu_seqlens,
            {name: [comparable(v) for v in vars(e).values()] for name, e in m.encoders.items()},
            m.generator and [comparable(v) for v in vars(m.generator).values()],
            m.meta,
        )
        for m in batch.microbatches
    ]


def take(loader, count=6):
    return [(content(batch), batch.skipped, batch.state) for batch in islice(loader, count)]
