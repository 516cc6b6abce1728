"""Images in Parquet and tar files: only the ranks that decode them read them."""

import io
import tarfile
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_cases import CLIP, caption, data_config, training
from PIL import Image

from torchmm.common.sequence_slices import DecodeAssignment, RankShare
from torchmm.data.build import build_loader
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.sample_files import INLINE_BYTES, FileRange, TableValue, read_row
from torchmm.data.record_formats.sample import ImageSegment
from torchmm.recipe.data_section import SourceConfig

COUNT = 8
READS = {
    "all": None,
    "none": DecodeAssignment({}),
    "first half": DecodeAssignment({"vision": RankShare(0, 2)}),
    "second half": DecodeAssignment({"vision": RankShare(1, 2)}),
}


def noise_images() -> list[bytes]:
    """Return incompressible images of noise."""
    files = []
    for number in range(COUNT):
        stream = io.BytesIO()
        noise = np.random.default_rng(number).integers(0, 255, (40 + number, 48, 3), np.uint8)
        Image.fromarray(noise).save(stream, "png")
        files.append(stream.getvalue())
    assert min(map(len, files)) > INLINE_BYTES
    return files


def write_parquet(directory) -> None:
    values = [{"bytes": data, "path": None} for data in noise_images()]
    texts = [caption(number) for number in range(COUNT)]
    pq.write_table(pa.table({"image": values, "text": texts}), directory / "a.parquet")


def write_lists(directory) -> None:
    values = [[{"bytes": data, "path": None}] for data in noise_images()]
    texts = [[None, caption(number)] for number in range(COUNT)]
    pq.write_table(
        pa.table({"images": [[*v, None] for v in values], "texts": texts}), directory / "a.parquet"
    )


def write_tar(directory) -> None:
    with tarfile.open(directory / "a.tar", "w") as tar:
        for number, data in enumerate(noise_images()):
            for part, content in (("png", data), ("txt", caption(number).encode())):
                member = tarfile.TarInfo(f"{number:03d}.{part}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("write", [write_parquet, write_lists, write_tar])
@pytest.mark.parametrize("streaming", [False, True])
def test_images_are_read_only_if_decoded(write, streaming, tmp_path, tokenizer, text_spec):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    source = SourceConfig(path=str(tmp_path / "data"), name="a", streaming=streaming)
    batches = {}
    for name, reads in READS.items():
        loader = build_loader(
            data_config(tmp_path, source, shuffle=False),
            training(global_batch_size=2, microbatch_size=1, sequence_length=64),
            text_spec=replace(text_spec, positions="1d"),
            image_specs={"vision": CLIP},
            tokenizer=tokenizer,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
            reads=reads,
        )
        [batches[name]] = islice(loader.batches(), 1)
    full = batches["all"]
    sizes = dict(enumerate(map(len, noise_images())))
    items = [item for packs in full.packs for pack in packs for item in pack]
    expected = sum(sizes[item.meta.index] for item in items)
    assert expected
    texts = batches["none"].read_bytes
    assert 0 < texts < INLINE_BYTES
    assert full.read_bytes - texts == expected
    halves = [batches[name].read_bytes - texts for name in ("first half", "second half")]
    assert sum(halves) == expected and min(halves) > 0
    for batch in batches.values():
        for ours, theirs in zip(batch.microbatches, full.microbatches, strict=True):
            assert torch.equal(ours.input_ids_T, theirs.input_ids_T)


def test_short_bytes_are_read_immediately():
    long = b"x" * INLINE_BYTES
    table = pa.table({"text": [long], "image": [{"bytes": b"short", "path": "a.png"}], "n": [1]})
    row = read_row(table)
    assert row["image"] == {"bytes": b"short", "path": "a.png"} and row["n"] == 1
    assert isinstance(row["text"], TableValue) and row["text"].read() == long


def test_truncated_file_range_is_corrupt(tmp_path):
    file = tmp_path / "a.tar"
    file.write_bytes(bytes(100))
    assert FileRange(file, 10, 90).read() == bytes(90)
    with pytest.raises(
        CorruptSampleError, match=r"a\.tar, byte 10: truncated after 90 of 91 bytes"
    ):
        ImageSegment(path=FileRange(file, 10, 91)).read(10**6)
    with pytest.raises(CorruptSampleError, match=r"has 90 bytes, but data\.max_file_mb"):
        ImageSegment(path=FileRange(file, 10, 90)).read(80)
    file.unlink()
    with pytest.raises(CorruptSampleError, match="No such file"):
        ImageSegment(path=FileRange(file, 10, 90)).read(10**6)
