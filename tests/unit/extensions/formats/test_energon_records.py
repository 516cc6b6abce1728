"""Energon datasets in the tests of all formats."""

from __future__ import annotations

import json

import pytest
import test_invalid_records as hostile
import test_sources as sources
from data_cases import write_meta, write_shard
from test_invalid_records import NAMES, RECORDS, open_loader, small_limits

__all__ = ["open_loader", "small_limits"]


def write_energon(directory):
    members = list(sources.caption_members())
    write_shard(directory / "shards" / "a-0.tar", members[:6])
    write_shard(directory / "shards" / "a-1.tar", members[6:])
    write_meta(directory, "CaptioningSample", {"image": "jpg,png", "caption": "txt"})


def write_energon_rows(directory):
    members = [(f"{i}.txt", text.encode()) for i, text in enumerate(sources.ROWS)]
    write_shard(directory / "shards" / "a-0.tar", members)
    write_meta(directory, "TextSample", {"text": "txt"})


def energon(directory, paths):
    members = []
    for number, path in enumerate(paths):
        row = {"images": [path, None], "texts": [None, "a dog"]}
        members.append((f"{number}.json", json.dumps(row).encode()))
    write_shard(directory / "shards" / "a.tar", members)
    write_meta(directory, "CrudeWebdataset")


def text_energon(directory, rows):
    hostile.text_tar(directory, rows)
    write_meta(directory, "CrudeWebdataset")


@pytest.fixture
def rows_directory(tmp_path):
    write_energon_rows(tmp_path / "rows")
    return tmp_path / "rows"


def test_energon_reads_equally_by_index_and_stream(tmp_path):
    write_energon(tmp_path / "set [test]")
    sources.check_format(tmp_path)


@pytest.mark.parametrize("split", sources.SPLITS)
def test_energon_slices_select_rows(rows_directory, split):
    sources.test_split_slices_select_rows(rows_directory, split)
    if split in sources.STREAMED_SPLITS:
        sources.test_stream_reads_split_slices_or_rejects(rows_directory, split)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("split", "reason"), sources.WRONG_SPLITS)
def test_missing_energon_splits_are_rejected(rows_directory, split, reason, streaming):
    sources.test_splits_that_files_lack_are_rejected(rows_directory, split, reason, streaming)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_in_energon_cost_one_sample(name, tmp_path, open_loader):
    directory, names = hostile.folder(tmp_path)
    names[hostile.BAD], reason = NAMES[name]
    energon(directory, names)
    hostile.assert_costs_one(open_loader(), reason, f".tar:{hostile.BAD}")


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "stream"])
@pytest.mark.parametrize("record", [name for name in RECORDS if name != "too long"])
def test_hostile_text_in_energon_costs_one_sample(
    record, streaming, tmp_path, open_loader, small_limits
):
    content, reason = RECORDS[record]
    (tmp_path / "set").mkdir()
    text_energon(tmp_path / "set", hostile.texts(content))
    hostile.assert_costs_one(open_loader(streaming), reason)


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "stream"])
def test_damaged_energon_shard_costs_adjacent_samples(streaming, tmp_path, open_loader):
    hostile.damage_shard(tmp_path)
    write_meta(tmp_path / "set", "CaptioningSample", {"image": "png", "caption": "txt"})
    hostile.check_damaged_shard(open_loader(streaming))
