"""Datasets of Megatron-Energon, written as in its documentation."""

from __future__ import annotations

import json
import os
import struct
import tarfile

import pytest
from data_cases import png, write_meta, write_shard

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.sources.map_sources import open_map_source, resolve_files
from torchmm.recipe.data_section import SourceConfig

RED, BLUE = png(8, 8, 1), png(8, 8, 2)


def columns(directory, **options):
    source = open_map_source(SourceConfig(path=str(directory), **options))
    return [source.read(i).columns for i in range(len(source))]


def write(directory, members, kind, fields=None, **more):
    write_shard(directory / "shards" / "s-0.tar", members.items())
    return write_meta(directory, kind, fields, **more)


def test_energon_questions_use_best_answer(tmp_path):
    sample = {"question": "<image>\nColor?", "answers": ["blue", "red"], "weights": [0.3, 1.0]}
    fields = {
        "image": "png",
        "context": "json[question]",
        "answers": "json[answers]",
        "answer_weights": "json[weights]",
    }
    members = {"dir/a.png": RED, "dir/a.json": json.dumps(sample).encode()}
    (actual,) = columns(write(tmp_path, members, "VQASample", fields))
    assert actual["images"] == [RED]
    content = [{"type": "image"}, {"type": "text", "text": "Color?"}]
    assert actual["messages"] == [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "red"},
    ]


def test_energon_fields_inside_lists_are_read(tmp_path):
    turns = [{"from": "human", "value": "Color?"}, {"from": "gpt", "value": "Red."}]
    fields = {"image": "jpg,png", "context": "json[0][value]", "answers": "json[1][value]"}
    members = {"a.png": RED, "a.json": json.dumps(turns).encode()}
    (actual,) = columns(write(tmp_path, members, "VQAWebdataset", fields))
    assert actual["messages"][1]["content"] == "Red."


@pytest.mark.parametrize(
    "sequence",
    [
        ["First", "x.png", "then", "y.png"],
        {"texts": ["First", None, "then", None], "images": [None, "x.png", None, "y.png"]},
    ],
)
def test_energon_interleaved_sequences_name_images(tmp_path, sequence):
    members = {"a.x.png": RED, "a.y.png": BLUE, "a.json": json.dumps(sequence).encode()}
    (actual,) = columns(write(tmp_path, members, "InterleavedSample", {"sequence": "json"}))
    assert actual == {"texts": ["First", None, "then", None], "images": [None, RED, None, BLUE]}


def test_energon_chats_preserve_turns(tmp_path):
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    shared = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "Red."}]
    members = {
        "a.jpg": RED,
        "a.json": json.dumps(shared).encode(),
        "b.json": json.dumps(turns).encode(),
    }
    fields = {"imgs": "jpg", "conversation": "json"}
    first, second = columns(write(tmp_path, members, "ChatMLWebdataset", fields))
    assert first == {"conversations": shared, "images": [RED]}
    assert second == {"messages": turns}


def test_energon_crude_samples_preserve_members(tmp_path):
    inner = {"text": "red", "images": ["x.png"], "n": 1}
    members = {"a.json": json.dumps(inner).encode(), "a.x.png": RED}
    (actual,) = columns(write(tmp_path, members, "CrudeWebdataset"))
    assert actual == {"text": "red", "images": [RED], "n": 1, "x.png": RED}


def test_energon_splits_expand_braces_and_exclusions(tmp_path):
    for number in range(5):
        names = {f"{number}{key}.txt": f"{number}{key}".encode() for key in "ab"}
        write_shard(tmp_path / "shards" / f"s_00{number}.tar", names.items())
    split = {
        "exclude": ["shards/s_001.tar", "shards/s_002.tar/2a"],
        "split_parts": {"train": ["shards/s_00{0..2}.tar"], "val": ["shards/s_{003,004}.tar"]},
    }
    write_meta(tmp_path, "TextSample", {"text": "txt"}, split)
    texts = [[row["text"] for row in columns(tmp_path, split=s)] for s in ("train", "validation")]
    assert texts == [["0a", "0b", "2b"], ["3a", "3b", "4a", "4b"]]
    with pytest.raises(DataError, match=r"no shards for split 'test'; use one of train, val"):
        columns(tmp_path, split="test")
    kind, files = resolve_files(SourceConfig(path=str(tmp_path)))
    assert kind == "energon" and [f.name for f in files[-2:]] == ["s_000.tar", "s_002.tar"]


def test_energon_sample_loader_code_is_never_run(tmp_path):
    write(tmp_path, {"a.txt": b"a"}, "TextSample", None, sample_loader="sample_loader.py:load")
    sentinel = tmp_path / "sentinel"
    code = f"open({str(sentinel)!r}, 'w')"
    (tmp_path / ".nv-meta" / "sample_loader.py").write_text(code)
    with pytest.raises(DataError, match=r"sample_loader = 'sample_loader.py:load' is Python code"):
        columns(tmp_path)
    assert not sentinel.exists()


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("MyOwnSample", {"text": "txt"}, "MyOwnSample.* not supported; use one of Captioning"),
        ("TextSample", None, "no field_map"),
        ("ChatMLWebdataset", {"imgs": "jpgs", "conversation": "json"}, "'jpgs', which is a pickle"),
    ],
)
def test_unsupported_energon_dataset_is_rejected(tmp_path, kind, fields, reason):
    with pytest.raises(DataError, match=rf"dataset\.yaml: .*{reason}"):
        columns(write(tmp_path, {"a.txt": b"a"}, kind, fields))


def test_energon_sample_without_field_is_corrupt(tmp_path):
    members = {"a.txt": b"text", "b.png": RED, "b.txt": b"text"}
    write(tmp_path, members, "CaptioningSample", {"image": "png", "caption": "txt"})
    source = open_map_source(SourceConfig(path=str(tmp_path)))
    with pytest.raises(
        CorruptSampleError, match=r"s-0\.tar:a: has no png for field image, only txt"
    ):
        source.read(0)
    assert source.read(1).location == f"{tmp_path}/shards/s-0.tar:b"


def test_energon_shard_index_is_used_unless_older(tmp_path):
    names = {f"{n}.{part}": f"{n}".encode() for n in "abc" for part in ("txt", "cls")}
    write(tmp_path, names, "TextSample", {"text": "txt"})
    shard = tmp_path / "shards" / "s-0.tar"
    with tarfile.open(shard) as tar:
        starts = [m.offset for m in tar if m.name.endswith(".txt")]
        end = tar.offset
    index = shard.with_suffix(".tar.idx")
    for with_end in ([], [end]):
        index.write_bytes(
            struct.pack("<3Q", *starts) + struct.pack(f"<{len(with_end)}Q", *with_end)
        )
        assert [row["text"] for row in columns(tmp_path)] == ["a", "b", "c"]
    index.write_bytes(struct.pack("<2Q", starts[0], starts[2]))
    assert [row["text"] for row in columns(tmp_path)] == ["a", "c"]
    os.utime(index, (0, 0))
    assert [row["text"] for row in columns(tmp_path)] == ["a", "b", "c"]


def test_missing_energon_shards_are_reported(tmp_path):
    write(tmp_path, {"a.txt": b"a"}, "TextSample", {"text": "txt"})
    (tmp_path / "shards" / "s-0.tar").unlink()
    with pytest.raises(DataError, match=r"split\.yaml lists .*s-0\.tar, which does not exist"):
        columns(tmp_path)
    (tmp_path / ".nv-meta" / "split.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"split\.yaml cannot be read"):
        columns(tmp_path)
    with pytest.raises(DataError, match=r"not a directory with \.nv-meta"):
        columns(tmp_path / "shards", format="energon")
