"""Loaders that yield the same tensors of the same images: torchmm, and five others as their guides
show them. One side's ranks are processes; each sees its share of the samples, shuffled.

All decode the same JPEG files with Pillow, call the same Hugging Face image processor on an image
and the same tokenizer on a caption. The others collate batches: images stacked, ids padded; torchmm
packs them into sequences, with targets and positions.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import ImageSpec, TextSpec
from torchmm.data.build import build_loader
from torchmm.data.loader import StepBatch
from torchmm.data.media.images import make_processor
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.training_section import TrainingConfig

SPEC = ImageSpec(
    encoder="vision",
    inputs="fixed",
    processor_class="SiglipImageProcessor",
    processor={"size": {"height": 224, "width": 224}},
    patch_size_px=16,
)
IMAGE_TOKENS = 196
BATCH = 8
SHARDS = 8
SHUFFLED = 100
"""Samples in the buffers of those that shuffle in buffers."""

Content = list[tuple[list[int], Tensor]]
"""Token ids and pixels (C, H, W) of every sample of a batch."""
Batches = Iterator[tuple[int, Callable[[], Content]]]
"""Number of samples of a batch, and what is in it."""


@dataclass(frozen=True)
class Task:
    """Samples and settings of a loader."""

    directory: Path
    jpegs: Sequence[bytes]
    captions: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    image_token: int

    @property
    def eos_token(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def text_spec(self) -> TextSpec:
        return TextSpec(
            vocab_size=len(self.tokenizer),
            image_token_id=self.image_token,
            eos_token_id=self.eos_token,
            pad_token_id=self.eos_token,
        )


@dataclass(frozen=True)
class Encoder:
    """An image and its caption to tensors, for all loaders but torchmm."""

    task: Task
    processor: Any

    def __call__(self, image: Image.Image, caption: str) -> tuple[Tensor, Tensor]:
        pixels = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        ids = self.task.tokenizer(caption, add_special_tokens=False).input_ids
        head = [self.task.image_token] * IMAGE_TOKENS
        return torch.tensor([*head, *ids, self.task.eos_token]), pixels

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        ids = [ids for ids, _ in samples]
        padded = pad_sequence(ids, batch_first=True, padding_value=self.task.eos_token)
        return padded, torch.stack([pixels for _, pixels in samples])


def encoder_of(task: Task) -> Encoder:
    """Return the encoder with the processor that torchmm calls."""
    return Encoder(task, make_processor("vision", SPEC.processor_class, SPEC.processor))


def decode(data: bytes) -> Image.Image:
    """Return the image of a file."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def content_of(task: Task, batch: tuple[Tensor, Tensor]) -> Content:
    """Return the samples of a collated batch without padding."""
    samples = []
    for ids, pixels in zip(*batch, strict=True):
        end = (ids == task.eos_token).nonzero()[0].item() + 1
        samples.append((ids[:end].tolist(), pixels))
    return samples


def counted(task: Task, batches: Iterator[Any]) -> Batches:
    """Yield collated batches with their numbers of samples."""
    for batch in batches:
        yield len(batch[0]), lambda batch=batch: content_of(task, batch)


class Side:
    """A loader. `prepare` writes its files once; every rank calls `batches`."""

    module: str | None = None
    """The package that it needs."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.directory = task.directory / type(self).__name__

    def missing(self) -> bool:
        """Return True if its package is not installed; import it before ranks are forked."""
        if self.module is not None:
            try:
                import_module(self.module)
            except ImportError:
                return True
        return False

    def prepare(self) -> None:
        raise NotImplementedError

    def batches(self, rank: int, ranks: int) -> Batches:
        raise NotImplementedError


class Parquet(Side):
    """torchmm, from parquet files."""

    def prepare(self) -> None:
        write_parquet(self.task, self.directory / "samples")
        next(self.batches(0, 1))  # measures them

    def batches(self, rank: int, ranks: int) -> Batches:
        data = DataConfig(
            sources=[SourceConfig(path=str(self.directory / "samples"))],
            workers=0,
            index_cache_dir=str(self.directory / "index"),
        )
        loader = build_loader(
            data,
            TrainingConfig(
                global_batch_size=2 * ranks, microbatch_size=1, sequence_length=1024, seed=0
            ),
            text_spec=self.task.text_spec(),
            image_specs={"vision": SPEC},
            tokenizer=self.task.tokenizer,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            state=None,
        )
        for batch in loader:
            samples = sum(len(microbatch.meta.samples) for microbatch in batch.microbatches)
            yield samples, lambda batch=batch: samples_of(batch)


class Tar(Parquet):
    """torchmm, from tar files."""

    def prepare(self) -> None:
        write_shards(self.task, self.directory / "samples")
        next(self.batches(0, 1))


def samples_of(batch: StepBatch) -> Content:
    """Return the samples of packed sequences of torchmm."""
    samples = []
    for microbatch in batch.microbatches:
        pixels = iter(microbatch.encoders["vision"].values().pixels)
        for begin, end in zip(microbatch.cu_seqlens, microbatch.cu_seqlens[1:], strict=False):
            if (microbatch.targets_T[begin:end] >= 0).any():  # no padding
                samples.append((microbatch.input_ids_T[begin:end].tolist(), next(pixels)))
    return samples


class Datasets(Side):
    """`datasets` with random access, and PyTorch's DataLoader."""

    def prepare(self) -> None:
        write_parquet(self.task, self.directory)
        self._open()

    def batches(self, rank: int, ranks: int) -> Batches:
        encode = encoder_of(self.task)

        def collate(rows: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
            return encode.collate([encode(row["image"], row["text"]) for row in rows])

        rows = self._open()
        sampler = DistributedSampler(rows, ranks, rank)
        loader = DataLoader(rows, BATCH, sampler=sampler, collate_fn=collate)
        return counted(self.task, iter(loader))

    def _open(self) -> Any:
        rows = datasets.load_dataset(
            "parquet",
            data_files=str(self.directory / "*.parquet"),
            split="train",
            cache_dir=str(self.directory / "cache"),
        )
        return rows.cast_column("image", datasets.Image())


class Webdataset(Side):
    """webdataset, tar files by rank."""

    module = "webdataset"

    def prepare(self) -> None:
        write_shards(self.task, self.directory)

    def batches(self, rank: int, ranks: int) -> Batches:
        webdataset = import_module("webdataset")
        encode = encoder_of(self.task)
        shards = [str(shard) for shard in sorted(self.directory.glob("*.tar"))]
        samples = (
            webdataset.WebDataset(shards[rank::ranks], shardshuffle=len(shards), nodesplitter=None)
            .shuffle(SHUFFLED)
            .decode("pil")
            .to_tuple("jpg", "txt")
            .map_tuple(lambda image: image, str)
            .map(lambda sample: encode(*sample))
            .batched(BATCH, collation_fn=encode.collate)
        )
        return counted(self.task, iter(DataLoader(samples, batch_size=None)))


class Litdata(Side):
    """litdata: chunks of samples."""

    module = "litdata"

    def prepare(self) -> None:
        writer = import_module("litdata.streaming.writer").BinaryWriter
        self.directory.mkdir(parents=True)
        chunks = writer(str(self.directory), chunk_bytes="4MB")
        for number, (jpeg, caption) in enumerate(
            zip(self.task.jpegs, self.task.captions, strict=True)
        ):
            chunks[number] = {"image": jpeg, "text": caption}
        chunks.done()
        chunks.merge()

    def batches(self, rank: int, ranks: int) -> Batches:
        litdata = import_module("litdata")
        encode = encoder_of(self.task)
        # Ranks of one machine; it asks PyTorch's process group, which there is none of here.
        os.environ.update(WORLD_SIZE=str(ranks), GLOBAL_RANK=str(rank), NNODES="1")
        environment = import_module("litdata.utilities.env")._DistributedEnv
        environment.detect = classmethod(lambda cls: cls(ranks, rank, 1))
        rows = litdata.StreamingDataset(str(self.directory), shuffle=True, drop_last=False)

        def collate(rows: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
            return encode.collate([encode(decode(row["image"]), row["text"]) for row in rows])

        loader = litdata.StreamingDataLoader(rows, batch_size=BATCH, collate_fn=collate)
        return counted(self.task, iter(loader))


class Lance(Side):
    """Lance: a batch of rows taken by their numbers."""

    module = "lance"

    def prepare(self) -> None:
        import_module("lance").write_dataset(as_table(self.task), str(self.directory))

    def batches(self, rank: int, ranks: int) -> Batches:
        table = import_module("lance").dataset(str(self.directory))
        encode = encoder_of(self.task)

        class Rows(Dataset[Any]):
            def __len__(self) -> int:
                return int(table.count_rows())

            def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
                return list(table.take(indices).to_pylist())

        def collate(rows: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
            return encode.collate(
                [encode(decode(row["image"]["bytes"]), row["text"]) for row in rows]
            )

        rows = Rows()
        sampler = DistributedSampler(rows, ranks, rank)
        loader = DataLoader(rows, BATCH, sampler=sampler, collate_fn=collate)
        return counted(self.task, iter(loader))


class Energon(Side):
    """Megatron-Energon: a prepared folder of tar files."""

    module = "megatron.energon"

    def prepare(self) -> None:
        prepare = import_module("megatron.energon.flavors.webdataset.prepare")
        shards = write_shards(self.task, self.directory)
        names = [shard.name for shard in shards]
        prepare.WebdatasetPreparator.prepare_dataset(
            self.directory, names, split_parts_ratio=[("train", 1.0)], workers=1
        )
        (self.directory / ".nv-meta" / "dataset.yaml").write_text(
            "__module__: megatron.energon\n__class__: CaptioningWebdataset\n"
            "field_map:\n  image: jpg\n  caption: txt\n"
        )

    def batches(self, rank: int, ranks: int) -> Batches:
        energon = import_module("megatron.energon")
        encode = encoder_of(self.task)

        class Encode(energon.DefaultTaskEncoder):  # type: ignore[misc, name-defined]
            decoder = energon.SampleDecoder(image_decode="pilrgb")

            @energon.stateless
            def encode_sample(self, sample: Any) -> Any:
                return encode(sample.image, sample.caption)

            def batch(self, samples: Any) -> Any:
                return encode.collate(samples)

        workers = energon.WorkerConfig(rank=rank, world_size=ranks, num_workers=0)
        rows = energon.get_train_dataset(
            str(self.directory),
            worker_config=workers,
            batch_size=BATCH,
            shuffle_buffer_size=SHUFFLED,
            max_samples_per_sequence=SHUFFLED,
            task_encoder=Encode(),
            repeat=False,
        )
        return counted(self.task, iter(energon.get_loader(rows)))


SIDES: dict[str, type[Side]] = {
    "torchmm": Parquet,
    "torchmm, tar files": Tar,
    "datasets + DataLoader": Datasets,
    "webdataset": Webdataset,
    "litdata": Litdata,
    "Lance": Lance,
    "Energon": Energon,
}


def as_table(task: Task) -> pa.Table:
    """Return a table with the columns in which `datasets` writes images."""
    images = [{"bytes": jpeg, "path": None} for jpeg in task.jpegs]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.table({"image": pa.array(images, kind), "text": list(task.captions)})


def write_parquet(task: Task, directory: Path) -> None:
    """Write one file in groups of 100 rows."""
    directory.mkdir(parents=True)
    pq.write_table(as_table(task), directory / "samples.parquet", row_group_size=100)


def write_shards(task: Task, directory: Path) -> list[Path]:
    """Write tar files in the format of webdataset, with samples round-robin over SHARDS files."""
    directory.mkdir(parents=True)
    paths = [directory / f"shard-{number}.tar" for number in range(SHARDS)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for i in range(number, len(task.jpegs), SHARDS):
                for part, body in (("jpg", task.jpegs[i]), ("txt", task.captions[i].encode())):
                    info = tarfile.TarInfo(f"{i:06d}.{part}")
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
    return paths
