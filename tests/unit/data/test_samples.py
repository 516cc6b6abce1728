from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from torchmm.common.errors import DataError
from torchmm.data.corrupt import BeyondLimitError, CorruptLimit, CorruptSampleError
from torchmm.data.record_formats.detect import parse_record
from torchmm.data.record_formats.sample import (
    AudioSegment,
    ImageSegment,
    Record,
    Sample,
    SampleOptions,
    TextSegment,
    VideoSegment,
    assign_encoders,
    limit_images,
)


def no_chat(conversation, options):
    raise AssertionError


def parse(columns, root=None, prompt=""):
    record = Record(columns, root, SampleOptions(prompt=prompt))
    return parse_record(record, no_chat).segments


def text(value, loss=True):
    return TextSegment(value, loss)


def test_caption_with_prompt():
    expected = (ImageSegment(data=b"x"), text("Describe: ", loss=False), text("dog"))
    assert parse({"image": b"x", "text": "dog"}, prompt="Describe: ") == expected


@pytest.mark.parametrize(
    "columns",
    [
        {"image": {"bytes": b"x", "path": "ignored"}, "text": "dog"},
        {"jpg": {"bytes": b"x"}, "txt": "dog", "__key__": "1"},
        {"png": b"x", "txt": b"dog"},
        {"webp": b"x", "json": {"caption": "dog"}},
        {"jpg": b"x", "json": b'{"text": "dog"}'},
    ],
)
def test_captions_are_read_from_any_columns(columns):
    assert parse(columns) == (ImageSegment(data=b"x"), text("dog"))


def test_text_and_caption_without_image_are_read():
    assert parse({"text": "dog"}) == parse({"text": "dog", "image": None}) == (text("dog"),)


def test_interleaved_record_preserves_order():
    columns = {"images": [None, b"1", b"2", None], "texts": ["a", None, None, "b"]}
    parts = (text("a"), ImageSegment(data=b"1"), ImageSegment(data=b"2"), text("b"))
    assert parse(columns) == parts


def test_chat_receives_its_files_in_order():
    def render(conversation, options):
        return Sample(conversation.turns[0].parts)

    types = ("image", "audio", "video", "image")
    messages = [{"role": "user", "content": [{"type": kind} for kind in types]}]
    columns = {"images": [b"1", {"bytes": b"2"}], "audios": [b"3"], "videos": [b"4"]}
    sample = parse_record(Record({"messages": messages, **columns}), render)
    first, second = ImageSegment(data=b"1"), ImageSegment(data=b"2")
    assert sample.segments == (first, AudioSegment(data=b"3"), VideoSegment(data=b"4"), second)


@pytest.mark.parametrize(
    "tools", [[{"name": "f"}], '[{"name": "f"}]', [{"type": "function", "function": {"name": "f"}}]]
)
@pytest.mark.parametrize("column", ["tools", "functions"])
def test_chat_receives_its_tools(column, tools):
    def render(conversation, options):
        assert conversation.tools == ({"type": "function", "function": {"name": "f"}},)
        return Sample(())

    messages = [{"role": "user", "content": "a"}]
    parse_record(Record({"messages": messages, column: tools}), render)


@pytest.mark.parametrize("tools", [None, [], "[]", "", [None], {"name": None}])
def test_empty_tools_column_is_ignored(tools):
    def render(conversation, options):
        return Sample(conversation.turns[0].parts)

    messages = [{"role": "user", "content": "a"}]
    assert parse_record(Record({"messages": messages, "tools": tools}), render).segments
    assert parse({"text": "dog", "tools": "hammer"}) == (text("dog"),)


def test_videos_are_read_from_columns_and_lists():
    video = VideoSegment(data=b"1")
    assert parse({"mp4": b"1", "txt": "dog"}) == (video, text("dog"))
    segments = parse({"audio": b"3", "video": b"1", "image": b"2", "text": "dog"})
    assert [type(s).__name__[:5] for s in segments] == ["Image", "Video", "Audio", "TextS"]
    columns = {"videos": [None, b"1"], "images": [b"2", None], "texts": [None, None]}
    assert parse(columns) == (ImageSegment(data=b"2"), video)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": 3}, r"no record format matches the columns \['label'\]"),
        ({"image": b"x", "text": 3}, "not a string"),
        ({"image": 3, "text": "dog"}, "not bytes or a path"),
        ({"images": [b"x"], "texts": []}, "1 images but 0 texts"),
        ({"images": "x", "texts": []}, "not a list"),
        ({"jpg": b"x", "json": "{"}, "column json"),
        ({"image": "http://127.0.0.1/x.png", "text": "dog"}, "does not download"),
        ({"image": "hf://datasets/x.png", "text": "dog"}, "does not download"),
        ({"image": "../secret.png", "text": "dog"}, "is outside"),
        ({"image": "/etc/passwd", "text": "dog"}, "is outside"),
        ({"image": {"bytes": None, "path": "a/../../x.png"}, "text": "dog"}, "is outside"),
    ],
)
def test_malformed_record_is_corrupt(columns, message, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    with pytest.raises(CorruptSampleError, match=message):
        parse(columns, root="/data/set")


def test_image_paths_are_relative_to_root():
    assert parse({"image": "a/b.png", "text": "x"}, "/data")[0] == ImageSegment(
        path="/data/a/b.png"
    )


def test_missing_image_file_is_corrupt(tmp_path):
    with pytest.raises(CorruptSampleError, match="No such file"):
        ImageSegment(path=str(tmp_path / "none.png")).read(10**6)


def test_limit_images_truncates_before_extra_image():
    images = [ImageSegment(data=bytes([i])) for i in range(3)]
    sample = Sample((images[0], text("a"), images[1], images[2], text("b")), add_bos=False)
    retained = Sample((images[0], text("a")), add_bos=False, add_eos=False)
    assert limit_images(sample, 1) == (retained, 2)
    assert limit_images(sample, 3) == (sample, 0)


def test_assign_encoders_rejects_unread_evidence():
    image, audio = ImageSegment(data=b"i"), AudioSegment(data=b"a")
    readers = {"image": ["vision"], "audio": []}
    with pytest.raises(BeyondLimitError, match="an audio file, followed by text in the loss"):
        assign_encoders(Sample((image, audio, text("what is said"))), readers)
    after = assign_encoders(Sample((image, text("a"), audio)), readers)
    assert after.segments == (replace(image, encoder="vision"), text("a"))
    single = assign_encoders(Sample((image, text("a"))), {"image": [], "audio": []})
    assert single.segments == (text("a"),)


# Limit


def test_corrupt_limit_stops_at_max_samples():
    limit = CorruptLimit(max_samples=2, max_fraction=1.0)
    limit.add(2, 10)
    with pytest.raises(DataError, match="3 of 20"):
        limit.add(1, 10)


def test_corrupt_fraction_requires_hundred_samples():
    limit = CorruptLimit(max_samples=1000, max_fraction=0.1)
    limit.add(50, 99)
    with pytest.raises(DataError, match=r"max_corrupt_fraction = 0\.1"):
        limit.add(0, 1)
    CorruptLimit(1000, 0.1).add(10, 100)


def test_limit_counts_all_measured_samples():
    """Check a limit if 11 of 200 samples are corrupt, all among the first 108."""
    limit = CorruptLimit(100, 0.1, samples_per_pass=200)
    limit.add(11, 108)
    with pytest.raises(DataError, match="21 of 120"):
        limit.add(10, 12)


def test_limit_counts_corrupt_samples_once_per_pass():
    limit = CorruptLimit(100, 0.5, samples_per_pass=1000)
    limit.add(100 * 5, 1000 * 5)
    with pytest.raises(DataError, match="501 of 5000"):
        limit.add(1, 0)
