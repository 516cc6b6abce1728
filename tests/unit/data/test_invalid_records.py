"""Invalid and hostile records: each costs one sample and is reported with location and reason.

Each case is written into every format that supports it, between valid samples. The damage occurs
before the source is measured, or afterwards. No case may block or allocate much memory.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tarfile
from itertools import islice

import datasets
import pytest
from data_cases import CLIP, data_config, png, training, write_parquet, write_shard

from torchmm.data.build import build_loader
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.sample import ImageSegment
from torchmm.data.sources import tar_samples, text_files
from torchmm.recipe.data_section import SourceConfig

GOOD = 6
BAD = 2
"""Index of the hostile record. All remaining records are valid."""
DEEP = "[" * 5000 + "]" * 5000


@pytest.fixture(autouse=True)
def time_limit():
    """Fail tests that block."""

    def stop(number, frame):
        raise TimeoutError("waited for 60 s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# Files that records refer to


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    here = os.getcwd()  # noqa: PTH109 - socket paths have a length limit
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def make_huge_file(path):
    with path.open("wb") as stream:
        stream.truncate(20 << 30)


FILES = {
    "a pipe": (make_pipe, "is a pipe, not a regular file"),
    "a socket": (make_socket, "No such device or address"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a regular file"),
    "a directory": (lambda path: path.mkdir(), "directory"),
    "a loop of links": (lambda path: path.symlink_to(path), "Too many levels"),
    "missing": (lambda path: None, "No such file"),
    "20 GiB": (make_huge_file, r"has 21474836480 bytes, but data.max_file_mb is 1000"),
    "not an image": (lambda path: path.write_bytes(b"x" * 100), "not an image"),
    "truncated": (lambda path: path.write_bytes(png(16, 16, BAD)[:150]), "cannot be decoded"),
}
NAMES = {
    "NUL": ("images/\0.png", "null byte"),
    "lone surrogate": ("images/\ud800.png", "surrogates not allowed"),
    "too long": ("images/" + "a" * 5000, "name too long"),
    "above": ("../../etc/passwd", "is outside"),
    "absolute": ("/etc/passwd", "is outside"),
    "a URL": ("http://127.0.0.1:9/a.png", "does not download"),
}


def chat(path):
    content = [{"type": "image", "image": path}, {"type": "text", "text": "what?"}]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "a dog"},
        ]
    }


def caption(path):
    return {"image": path, "text": "a dog"}


def lines(directory, paths, row=caption):
    text = "".join(json.dumps(row(path)) + "\n" for path in paths)
    (directory / "rows.jsonl").write_text(text)


def json_array(directory, paths):
    (directory / "rows.json").write_text(json.dumps([caption(path) for path in paths]))


def csv_table(directory, paths):
    rows = [f'"{path}",a dog\n' for path in paths]
    data = ("image,text\n" + "".join(rows)).encode("utf-8", "surrogatepass")
    (directory / "rows.csv").write_bytes(data)


def parquet(directory, paths):
    write_parquet(directory, [caption(path) for path in paths])


def image_folder(directory, paths):
    rows = [{"file_name": path, "text": "a dog"} for path in paths]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metadata.jsonl").write_text(text)


def chats(directory, paths):
    lines(directory, paths, chat)


WITH_PATHS = {
    "json lines": lines,
    "json array": json_array,
    "csv": csv_table,
    "parquet": parquet,
    "image folder": image_folder,
    "chat": chats,
}


def folder(tmp_path):
    """Return the directory of a source with valid images, and the image names."""
    directory = tmp_path / "set"
    (directory / "images").mkdir(parents=True)
    names = [f"images/{i}.png" for i in range(GOOD)]
    for i, name in enumerate(names):
        (directory / name).write_bytes(png(16, 16, i))
    return directory, names


@pytest.fixture
def open_loader(tmp_path, tokenizer, text_spec):
    """Return a function that builds a loader of tmp_path / "set" with threads as workers."""

    def build(streaming=False, **options):
        config = SourceConfig(path=str(tmp_path / "set"), streaming=streaming, **options)
        return build_loader(
            data_config(tmp_path, config, shuffle_window=GOOD),
            training(global_batch_size=2, sequence_length=16),
            text_spec=text_spec,
            image_specs={"vision": CLIP},
            tokenizer=tokenizer,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
        )

    return build


def errors_and_samples(loader):
    """Return the errors of the first two epochs, and the indices of samples with targets."""
    results, good = [], set()
    for batch in islice(loader, 3 * GOOD):
        results += batch.skipped
        for microbatch in batch.microbatches:
            ends = microbatch.cu_seqlens[1:]
            for sample, begin, end in zip(
                microbatch.meta.samples, microbatch.cu_seqlens, ends, strict=False
            ):
                if (microbatch.targets_T[begin:end] >= 0).any():
                    good.add(sample.index)
    return results, good


def assert_costs_one(loader, reason, where="", index=BAD, good=GOOD - 1):
    errors, indices = errors_and_samples(loader)
    assert len(errors) == 1, errors
    assert f"[{index}]: " in errors[0] and where in errors[0]
    assert errors[0].isprintable()
    assert re.search(reason, errors[0]), errors
    assert len(indices) == good and index not in indices


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "stream"])
@pytest.mark.parametrize("kind", FILES)
def test_hostile_file_costs_one_sample(kind, streaming, tmp_path, open_loader):
    directory, names = folder(tmp_path)
    make, reason = FILES[kind]
    (directory / names[BAD]).unlink()
    make(directory / names[BAD])
    lines(directory, names)
    assert_costs_one(open_loader(streaming), reason, f"rows.jsonl:{BAD + 1}")


@pytest.mark.parametrize("kind", FILES)
def test_file_damaged_after_indexing_costs_one_sample(kind, tmp_path, open_loader):
    directory, names = folder(tmp_path)
    lines(directory, names)
    loader = open_loader()
    (directory / names[BAD]).unlink()
    make, reason = FILES[kind]
    make(directory / names[BAD])
    assert_costs_one(loader, reason, f"rows.jsonl:{BAD + 1}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", WITH_PATHS)
def test_hostile_file_name_costs_one_sample(form, name, tmp_path, open_loader):
    directory, names = folder(tmp_path)
    names[BAD], reason = NAMES[name]
    if name == "lone surrogate":
        if form == "parquet":
            pytest.skip("text of Arrow is UTF-8")
        if form == "csv":
            reason = "can't decode"
    WITH_PATHS[form](directory, names)
    where = {
        "parquet": f" row {BAD}",
        "csv": f":{BAD + 2}",
        "json array": f" element {BAD + 1}",
    }
    assert_costs_one(open_loader(), reason, where.get(form, f":{BAD + 1}"))


# Text


RECORDS = {
    "deep": (DEEP, "recursion"),
    "deep inside": ('{"text": ' + DEEP + "}", "recursion"),
    "NUL": ("\0", "Expecting value|Invalid"),
    "not an object": ("3", "is int|no record format matches"),
    "a number of 10,000 digits": ('{"text": ' + "9" * 10_000 + "}", "4300 digits"),
    "lone surrogate": (r'{"text": "a\ud800"}', "lone surrogate"),
    "not a string": ('{"text": {"a": 1}}', "is dict, not a string"),
    "too long": (json.dumps({"text": "a" * 70_000}), "longer than the limit of 65536"),
    "not UTF-8": (b'{"text": "\xff"}', "can't decode"),
    "far too much text": (json.dumps({"text": "a " * 30_000}), "text of 60000 characters"),
}


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 65536)
    monkeypatch.setattr("torchmm.data.sources.streams.MAX_RECORD_BYTES", 65536)
    monkeypatch.setattr("torchmm.data.media.text.MIN_TEXT_LIMIT", 50_000)


def as_bytes(record):
    return record if isinstance(record, bytes) else record.encode()


def texts(record):
    rows = [json.dumps({"text": f"a dog {i}"}).encode() for i in range(GOOD)]
    rows[BAD] = as_bytes(record)
    return rows


def text_lines(directory, rows):
    (directory / "rows.jsonl").write_bytes(b"\n".join(rows) + b"\n")


def text_array(directory, rows):
    (directory / "rows.json").write_bytes(b"[" + b",\n".join(rows) + b"]")


def text_tar(directory, rows):
    write_shard(directory / "a.tar", ((f"{i}.json", row) for i, row in enumerate(rows)))


def text_column(directory, rows):
    csv_table = datasets.Dataset.from_list([{"json": row} for row in rows])
    csv_table.to_parquet(directory / "rows.parquet")


def text_metadata(directory, rows):
    (directory / "a.png").write_bytes(png(8, 8))
    good = [b'{"file_name": "a.png", ' + row[1:] if i != BAD else row for i, row in enumerate(rows)]
    (directory / "metadata.jsonl").write_bytes(b"\n".join(good) + b"\n")


WITH_TEXT = {
    "json lines": text_lines,
    "json array": text_array,
    "json column": text_column,
    "webdataset": text_tar,
    "image folder": text_metadata,
}


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "stream"])
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("form", WITH_TEXT)
def test_hostile_text_costs_one_sample(
    form, record, streaming, tmp_path, open_loader, small_limits
):
    content, reason = RECORDS[record]
    if record == "too long" and form not in ("json lines", "json array", "image folder"):
        pytest.skip("only lines have a length limit; another case has long text")
    if form == "image folder" and record != "deep":
        content = as_bytes(content).replace(b'{"text"', b'{"file_name": "a.png", "text"')
    (tmp_path / "set").mkdir()
    WITH_TEXT[form](tmp_path / "set", texts(content))
    assert_costs_one(open_loader(streaming), reason)


@pytest.mark.parametrize("form", ["json lines", "json array", "webdataset"])
@pytest.mark.parametrize("change", ["gone", "a pipe", "truncated", "rewritten"])
def test_changed_source_files_cost_their_samples(form, change, tmp_path, open_loader):
    """Check that every unreadable sample is skipped individually, up to the limits."""
    (tmp_path / "set").mkdir()
    WITH_TEXT[form](tmp_path / "set", texts('{"text": "a cat"}'))
    loader = open_loader()
    (file,) = [f for f in (tmp_path / "set").iterdir() if f.is_file()]
    size = file.stat().st_size
    if change in ("gone", "a pipe"):
        file.unlink()
    if change == "a pipe":
        os.mkfifo(file)
    if change == "truncated":
        os.truncate(file, 40 if form != "webdataset" else 3 * 1024)
    if change == "rewritten":
        file.write_bytes(b"x" * size)
    actual, good = errors_and_samples(loader)
    assert len(actual) == (GOOD if change != "truncated" else GOOD - len(good))
    assert all(str(file) in message for message in actual)


# Tar files


def pickled_mkdir(path):
    """Return a pickle that creates a directory when it is loaded."""
    return b"cposix\nmkdir\n(S'" + str(path).encode() + b"'\ntR."


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "stream"])
@pytest.mark.parametrize("part", ["pth", "pt", "npy", "npz", "pkl", "pickle", "pyd", "x.pth"])
def test_pickled_members_are_not_loaded(part, streaming, tmp_path, open_loader):
    members = []
    for i in range(GOOD):
        members += [(f"{i}.txt", b"a dog"), (f"{i}.{part}", pickled_mkdir(tmp_path / "x"))]
    write_shard(tmp_path / "set" / "a.tar", members)
    assert errors_and_samples(open_loader(streaming)) == ([], set(range(GOOD)))
    assert not (tmp_path / "x").exists()


def captions(directory):
    members = []
    for i in range(GOOD):
        members += [(f"{i}.png", png(16, 16, i)), (f"{i}.txt", b"a dog")]
    path = write_shard(directory / "a.tar", members)
    with tarfile.open(path) as tar:
        return path, {member.name: member for member in tar}


def overwrite(path, at, data):
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def damage_shard(tmp_path):
    """Damage the header of the text of sample 2. Its text may be the first part of sample 3."""
    path, members = captions(tmp_path / "set")
    overwrite(path, members[f"{BAD}.txt"].offset, b"\xff" * 512)


def check_damaged_shard(loader):
    results, good = errors_and_samples(loader)
    assert sorted(m.partition("[")[2][:1] for m in results) == ["2", "3"], results
    assert all("damage" in m and "a.tar" in m for m in results)
    assert good == {0, 1, 4, 5}


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "stream"])
def test_damaged_shard_costs_adjacent_samples(streaming, tmp_path, open_loader):
    damage_shard(tmp_path)
    check_damaged_shard(open_loader(streaming))


def test_damaged_image_in_shard_costs_one_sample(tmp_path, open_loader):
    path, members = captions(tmp_path / "set")
    overwrite(path, members[f"{BAD}.png"].offset_data, b"\xff" * 512)
    assert_costs_one(open_loader(), "not an image", f"a.tar:{BAD}")


def test_tar_header_with_huge_size_is_rejected(tmp_path, monkeypatch):
    path, members = captions(tmp_path)
    for kind, size in ((tarfile.GNUTYPE_SPARSE, 100), (tarfile.REGTYPE, 8 << 30)):
        member = members[f"{BAD}.txt"]
        fake = tarfile.TarInfo(member.name)
        fake.type, fake.size = kind, size
        header = fake.tobuf(tarfile.GNU_FORMAT)
        overwrite(path, member.offset, header)
        source = tar_samples.TarSamples([path])
        with pytest.raises(CorruptSampleError, match=r"the limit is|truncated|sparse|corrupt data"):
            source.read(BAD)
        assert source.read(0)[0].endswith("a.tar:0")
    long = tarfile.TarInfo("././@LongLink")
    long.type, long.size = tarfile.GNUTYPE_LONGNAME, 1 << 34
    overwrite(path, members[f"{BAD}.txt"].offset, long.tobuf(tarfile.GNU_FORMAT))
    source = tar_samples.TarSamples([path])
    with pytest.raises(CorruptSampleError, match="corrupt data"):
        source.read(BAD)
    assert len(source) == GOOD


def test_tar_sample_with_duplicate_member_is_corrupt(tmp_path):
    write_shard(tmp_path / "a.tar", [("1.txt", b"a"), ("1.TXT", b"b"), ("2.txt", b"c")])
    source = tar_samples.TarSamples([tmp_path / "a.tar"])
    with pytest.raises(CorruptSampleError, match="two members txt"):
        source.read(0)
    assert source.read(1)[1] == {"txt": b"c"}


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 24, b"\0" * 24])
def test_damaged_shard_index_is_ignored(content, tmp_path, caplog):
    path, _ = captions(tmp_path)
    path.with_suffix(".tar.idx").write_bytes(content)
    source = tar_samples.TarSamples([path])
    assert len(source) == GOOD
    assert "idx is corrupt" in caplog.text


# Limits and messages


def test_max_file_mb_limits_segments(tmp_path):
    (tmp_path / "a.png").write_bytes(bytes(100))
    for segment in (ImageSegment(path=str(tmp_path / "a.png")), ImageSegment(data=bytes(100))):
        assert len(segment.read(100)) == 100
        with pytest.raises(CorruptSampleError, match=r"has 100 bytes, but data\.max_file_mb is"):
            segment.read(99)


def test_corrupt_sample_messages_are_printable_and_short():
    error = CorruptSampleError("a\ud800\0\x1b[31m\n" + "b" * 10_000)
    assert str(error).startswith(r"a\ud800\x00\x1b[31m" + "\nb")
    assert len(str(error).encode()) < 2100
