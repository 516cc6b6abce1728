from __future__ import annotations

import gzip
import json

import datasets
import pyarrow as pa
import pytest
from data_cases import (
    caption,
    caption_rows,
    png,
    write_jsonl,
    write_parquet,
    write_shard,
)

from torchmm.common.errors import ConfigError, DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.columns import file_segment
from torchmm.data.record_formats.detect import parse_record
from torchmm.data.record_formats.sample import ImageSegment, TextSegment
from torchmm.data.sources.map_sources import open_map_source, resolve_files
from torchmm.data.sources.source_options import warn_about_training_rows
from torchmm.data.sources.streams import open_stream
from torchmm.recipe.data_section import SourceConfig, unique_names


def write_arrow(directory):
    datasets.Dataset.from_list(caption_rows(6)).save_to_disk(directory)


def write_image_column(directory):
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    directory.mkdir()
    table = datasets.Dataset.from_list(caption_rows(6), features)
    table.to_parquet(directory / "data.parquet")


def write_imagefolder(directory):
    (directory / "train").mkdir(parents=True)
    rows = []
    for i, row in enumerate(caption_rows(6)):
        (directory / "train" / f"{i}.png").write_bytes(row["image"]["bytes"])
        rows.append({"file_name": f"{i}.png", "text": row["text"]})
    write_jsonl(directory / "train" / "metadata.jsonl", rows)


def write_paths(directory):
    (directory / "pictures").mkdir(parents=True)
    rows = []
    for i, row in enumerate(caption_rows(6)):
        (directory / "pictures" / f"{i}.png").write_bytes(row["image"]["bytes"])
        rows.append({"image": f"pictures/{i}.png", "text": row["text"]})
    write_jsonl(directory / "a.jsonl", rows[:2])
    write_jsonl(directory / "b.jsonl", rows[2:])


def paths(directory):
    """Return captions whose images are files."""
    write_paths(directory)
    rows = [json.loads(line) for name in "ab" for line in (directory / f"{name}.jsonl").open()]
    for name in "ab":
        (directory / f"{name}.jsonl").unlink()
    return rows


def write_array(directory):
    (directory / "rows.json").write_text(json.dumps(paths(directory), indent=1))


def write_packed_lines(directory):
    text = "".join(json.dumps(row) + "\n" for row in paths(directory))
    with pa.CompressedOutputStream(str(directory / "rows.jsonl.zst"), "zstd") as stream:
        stream.write(text.encode())


def write_packed_array(directory):
    (directory / "rows.json.gz").write_bytes(gzip.compress(json.dumps(paths(directory)).encode()))


def write_csv(directory):
    rows = [f'{row["image"]},"{row["text"]}"\r\n' for row in paths(directory)]
    (directory / "rows.csv").write_text("image,text\r\n" + "".join(rows))


def write_tsv(directory):
    rows = [f"{row['text']}\t{row['image']}\n" for row in paths(directory)]
    (directory / "rows.tsv").write_text("caption\timage\n" + "".join(rows))


def caption_members():
    for i, row in enumerate(caption_rows(6)):
        yield f"{i:05d}.png", row["image"]["bytes"]
        yield f"{i:05d}.txt", row["text"].encode()


def write_tar(directory):
    directory.mkdir()
    write_shard(directory / "shard-0.tar", caption_members())


WRITERS = {
    "parquet": lambda d: write_parquet(d, caption_rows(6)),
    "parquet with an image column": write_image_column,
    "arrow": write_arrow,
    "imagefolder": write_imagefolder,
    "json lines with paths": write_paths,
    "webdataset": write_tar,
    "json array": write_array,
    "packed json lines": write_packed_lines,
    "packed json array": write_packed_array,
    "csv": write_csv,
    "tsv": write_tsv,
}


def contents(record):
    segments = parse_record(record, None).segments
    return [s.read(10**6) if isinstance(s, ImageSegment) else s.text for s in segments]


@pytest.mark.parametrize("kind", WRITERS)
def test_formats_read_equally_by_index_and_stream(kind, tmp_path):
    # Some libraries interpret brackets as patterns and "test" as a split.
    WRITERS[kind](tmp_path / "set [test]")
    check_format(tmp_path)


def check_format(tmp_path):
    """Read the six captions in "set [test]" by index, as a stream, and after a restart."""
    expected = [[row["image"]["bytes"], row["text"]] for row in caption_rows(6)]
    config = SourceConfig(path=str(tmp_path / "set [test]"))
    cache = str(tmp_path / "index")
    source = open_map_source(config, cache)
    assert [contents(source.read(i)) for i in range(len(source))] == expected

    stream = open_stream("set", config, cache)
    first = [contents(stream.next()) for _ in range(4)]
    position = json.loads(json.dumps(stream.position()))
    remaining = [contents(record) for record in iter(stream.next, None)]
    assert first + remaining == expected
    stream.restart(position)
    assert [contents(record) for record in iter(stream.next, None)] == remaining
    stream.restart(None)
    assert contents(stream.next()) == expected[0]


def test_split_directories_files_and_globs(tmp_path):
    write_jsonl(tmp_path / "set" / "train" / "a.jsonl", [{"text": "t"}])
    write_jsonl(tmp_path / "set" / "validation" / "a.jsonl", [{"text": "v"}])
    for path, split, text in (
        ("set", "train", "t"),
        ("set", "validation", "v"),
        ("set/validation/a.jsonl", "train", "v"),
        ("set/t*/*.jsonl", "train", "t"),
    ):
        source = open_map_source(SourceConfig(path=str(tmp_path / path), split=split))
        assert [source.read(i).columns["text"] for i in range(len(source))] == [text]


ROWS = [f"row {i}" for i in range(10)]
SPLITS = {
    "train": ROWS,
    "train[:2]": ROWS[:2],
    "train[10%:]": ROWS[1:],
    "train[-3:]": ROWS[-3:],
    "train[:2]+train[5:6]": [*ROWS[:2], ROWS[5]],
    "train[:25%](closest)": ROWS[:2],
    "train[8:50]": ROWS[8:],
}


WRITE_ROWS = {
    "jsonl": lambda d: write_jsonl(d / "a.jsonl", [{"text": t} for t in ROWS]),
    "array": lambda d: (d / "a.json").write_text(json.dumps([{"text": t} for t in ROWS])),
    "csv": lambda d: (d / "a.csv").write_text("text\n" + "".join(f"{t}\n" for t in ROWS)),
    "parquet": lambda d: write_parquet(d, [{"text": t} for t in ROWS]),
    "arrow": lambda d: datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(d),
    "tar": lambda d: write_shard(
        d / "a.tar", [(f"{i}.txt", text.encode()) for i, text in enumerate(ROWS)]
    ),
    "folder": lambda d: write_jsonl(
        d / "metadata.jsonl", [{"file_name": "x.png", "text": t} for t in ROWS]
    ),
}


@pytest.fixture(params=WRITE_ROWS)
def rows_directory(request, tmp_path):
    directory = tmp_path / "rows"
    directory.mkdir()
    WRITE_ROWS[request.param](directory)
    if request.param == "folder":
        (directory / "x.png").write_bytes(png(8, 8))
    return directory


def text_of(record):
    (text,) = (s.text for s in parse_record(record, None).segments if isinstance(s, TextSegment))
    return text


def texts(source):
    return [text_of(source.read(i)) for i in range(len(source))]


@pytest.mark.parametrize("split", SPLITS)
def test_split_slices_select_rows(rows_directory, split):
    cache = str(rows_directory / "index")
    config = SourceConfig(path=str(rows_directory), split=split)
    assert texts(open_map_source(config, cache)) == SPLITS[split]
    first = SourceConfig(path=str(rows_directory), split=split, max_samples=2)
    assert len(open_map_source(first, cache)) == min(2, len(SPLITS[split]))


WRONG_SPLITS = [
    ("validation", "split"),
    ("test[:2]", "split"),
    ("train+validation", "split"),
    ("train[:0]", "selects none of 10 rows|has a slice"),
    ("train[20:]", "selects none of 10 rows|has a slice|split"),
    ("train[", "is not a split"),
    ("train[a:b]", "is not a split"),
]


@pytest.mark.parametrize(("split", "reason"), WRONG_SPLITS)
@pytest.mark.parametrize("streaming", [False, True])
def test_splits_that_files_lack_are_rejected(rows_directory, split, reason, streaming):
    config = SourceConfig(path=str(rows_directory), split=split, streaming=streaming)
    cache = str(rows_directory / "index")
    with pytest.raises((ConfigError, DataError), match=reason):
        open_stream("rows", config, cache) if streaming else open_map_source(config, cache)


STREAMED_SPLITS = ["train[:2]", "train[10%:]", "train[:2]+train[5:6]"]


@pytest.mark.parametrize("split", STREAMED_SPLITS)
def test_stream_reads_split_slices_or_rejects(rows_directory, split):
    config = SourceConfig(path=str(rows_directory), split=split, streaming=True)
    cache = str(rows_directory / "index")
    if any(rows_directory.glob("*.arrow")):
        with pytest.raises(ConfigError, match=r"split = .* has a slice, which a stream of arrow"):
            open_stream("rows", config, cache)
        return
    stream = open_stream("rows", config, cache)
    assert [text_of(record) for record in iter(stream.next, None)] == SPLITS[split]


def test_files_named_as_splits_are_separate(tmp_path):
    names = {
        "data/train-00000-of-00001.jsonl": "t",
        "data/validation-00000-of-00001.jsonl": "v",
        "test.jsonl": "e",
        "latest.jsonl": "l",
    }
    for name, text in names.items():
        write_jsonl(tmp_path / "set" / name, [{"text": text}])

    def read(split, path="set"):
        return texts(open_map_source(SourceConfig(path=str(tmp_path / path), split=split)))

    assert read("train") == ["t"]
    assert read("validation") == read("val") == read("validation[:1]") == ["v"]
    assert read("test") == ["e"]
    with pytest.raises(DataError, match="its files belong to the splits test, train, validation"):
        read("other")
    assert sorted(read("train", "set/data/*.jsonl")) == ["t", "v"]
    (tmp_path / "set/data/train-00000-of-00001.jsonl").unlink()
    assert read("train") == ["l"]


def test_folders_of_different_splits_are_rejected(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "set" / "images" / split).mkdir(parents=True)
        (tmp_path / "set" / "images" / split / "a.png").write_bytes(png(8, 8))
    with pytest.raises(DataError, match="1 of 2 files are in directories of other splits"):
        open_map_source(SourceConfig(path=str(tmp_path / "set")))
    assert len(open_map_source(SourceConfig(path=str(tmp_path / "set" / "images")))) == 1


@pytest.mark.parametrize(
    ("trained", "held_out", "both"),
    [
        ({}, {"split": "train[:2]"}, 2),
        ({"split": "train[:90%]"}, {"split": "train[90%:]"}, 0),
        ({"split": "train[:4]"}, {"split": "train[2:]", "max_samples": 3}, 2),
        ({}, {}, 10),
        ({"max_samples": 3}, {"split": "train[3:]"}, 0),
    ],
)
def test_validation_on_training_rows_warns(tmp_path, caplog, trained, held_out, both):
    path = str(write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in ROWS]))
    config = SourceConfig(path=path, **held_out)
    records = open_map_source(config)
    other = SourceConfig(path=str(tmp_path), **trained)
    warn_about_training_rows(config, records, [SourceConfig(path=path, **trained), other])
    expected = [f"{both} of {len(records)} validation samples"] if both else []
    assert [r.message[: len(expected[0])] for r in caplog.records] == expected


def test_broken_line_costs_one_sample(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n\n[1]\n{"messages": "x", "n": [1, "a"]}\n')
    source = open_map_source(SourceConfig(path=str(path)))
    assert len(source) == 4
    for broken in (1, 2):
        with pytest.raises(CorruptSampleError, match=r"a\.jsonl"):
            source.read(broken)
    assert source.read(3).columns["n"] == [1, "a"]


def test_stream_continues_after_broken_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nbroken\n{"text": "two"}')
    records = list(iter(open_stream("a", SourceConfig(path=str(path))).next, None))
    assert isinstance(records[1], CorruptSampleError)
    assert [records[i].columns["text"] for i in (0, 2)] == ["one", "two"]


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("nowhere/at/all", None, "no such file"),
        ("nothing", None, "no such file"),
        ("notes.md", "hello", "supported suffixes are"),
        ("damaged.parquet", "PAR1 damaged", "cannot be read"),
    ],
)
def test_unreadable_source_is_reported(path, content, message, tmp_path):
    if content:
        (tmp_path / path).write_text(content)
    with pytest.raises(DataError, match=message):
        open_map_source(SourceConfig(path=str(tmp_path / path)))


def test_fingerprint_changes_with_files(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    before = open_map_source(SourceConfig(path=str(path))).fingerprint
    assert open_map_source(SourceConfig(path=str(path))).fingerprint == before
    write_jsonl(path, [{"text": "ab"}])
    assert open_map_source(SourceConfig(path=str(path))).fingerprint != before


def test_image_folder_fingerprint_includes_captions(tmp_path):
    write_imagefolder(tmp_path / "set")
    config = SourceConfig(path=str(tmp_path / "set"))
    before = open_map_source(config).fingerprint
    metadata = tmp_path / "set" / "train" / "metadata.jsonl"
    metadata.write_text(metadata.read_text().replace(caption(0), "other words"))
    assert open_map_source(config).fingerprint != before


def test_pickles_in_tar_are_not_loaded(tmp_path):
    sentinel = tmp_path / "sentinel"
    payload = b"cposix\nsystem\n(S'touch " + str(sentinel).encode() + b"'\ntR."
    members = {"1.pkl": payload, "1.pyd": payload, "1.txt": b"a", "1.png": png(4, 4)}
    write_shard(tmp_path / "a.tar", members.items())
    config = SourceConfig(path=str(tmp_path / "a.tar"))
    assert contents(open_map_source(config).read(0))[1] == "a"
    assert contents(open_stream("a", config).next())[1] == "a"
    assert not sentinel.exists()


def test_source_names_are_unique():
    paths = ["data/a/train", "data/a/train", "other/a/train", "b.jsonl"]
    configs = [SourceConfig(path=p) for p in paths] + [SourceConfig(path="x", name="mine")]
    assert unique_names(configs) == ["a/train", "a/train#2", "a/train#3", "b.jsonl", "mine"]


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("imdb", False),
        ("owner/name-v1.5", False),
        ("here/name", True),
        ("owner/name.parquet", True),
        ("owner/*", True),
        ("./name", True),
    ],
)
def test_hub_ids_are_distinguished_from_paths(path, local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    config = SourceConfig(path=path)
    if local:
        with pytest.raises(DataError, match="no such file"):
            resolve_files(config)
    else:
        assert resolve_files(config) == ("hub", [])


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_another_directory_are_read(streaming, tmp_path):
    records, images = tmp_path / "records", tmp_path / "images"
    records.mkdir()
    images.mkdir()
    (images / "1.png").write_bytes(b"png")
    rows = [{"image": "1.png", "text": "a"}, {"image": str(images / "1.png"), "text": "b"}]
    (records / "train.json").write_text(json.dumps([*rows, {"image": "../1.png", "text": "c"}]))
    config = SourceConfig(path=str(records / "train.json"), files=str(images), streaming=streaming)
    if streaming:
        actual = list(iter(open_stream("a", config, str(tmp_path / "cache")).next, None))
    else:
        source = open_map_source(config, str(tmp_path / "cache"))
        actual = [source.read(index) for index in range(len(source))]
    paths = [
        file_segment("image", record.columns["image"], record.root).path for record in actual[:2]
    ]
    assert paths == [str(images / "1.png")] * 2
    with pytest.raises(CorruptSampleError, match="set `files` of the source"):
        file_segment("image", actual[2].columns["image"], actual[2].root)


def test_missing_directory_of_files_raises(tmp_path):
    (tmp_path / "train.json").write_text('[{"text": "a"}]')
    config = SourceConfig(path=str(tmp_path / "train.json"), files=str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"files = .*none' of source .* is not a directory"):
        open_map_source(config, str(tmp_path / "cache"))
