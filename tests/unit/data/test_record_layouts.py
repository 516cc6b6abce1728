"""Every record format has the tokens, labels and files of the same content in torchmm's format."""

from __future__ import annotations

import base64
import copy
import json
import re
from pathlib import Path

import pytest
from data_cases import write_parquet
from layout_cases import CASES, COCO, DATA_ADDRESS, FILES, FIRST, SECOND, Case, say, torchmm_record
from layout_cases import turn as message

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.detect import RECORD_FORMATS, detect_format, parse_record
from torchmm.data.record_formats.questions import read_references
from torchmm.data.record_formats.sample import (
    AudioSegment,
    ImageSegment,
    Record,
    Sample,
    SampleOptions,
    TextSegment,
    VideoSegment,
)
from torchmm.data.sources.map_sources import open_map_source
from torchmm.recipe.data_section import SourceConfig


def conversation(columns, root=None):
    """Return the conversation of a record, before any template."""
    record = Record(columns, root)
    return detect_format(record).read(record)


def parts(columns, root=None):
    """Return all content parts of a conversation in one list."""
    return [part for turn in conversation(columns, root).turns for part in turn.parts]


@pytest.mark.parametrize("name", CASES)
def test_published_record_matches_torchmm_format(read, name):
    case = CASES[name]
    actual, expected = read(copy.deepcopy(case.record)), read(torchmm_record(case))
    assert actual.text.ids == expected.text.ids
    assert actual.text.loss == expected.text.loss
    assert actual.text.image_starts == expected.text.image_starts
    assert actual.images == expected.images
    assert actual.files == expected.files == [FILES[name] for name in case.images]


def test_comparison_detects_moved_image_and_speaker(read):
    case = CASES["llama_factory_images"]
    first, answer, *rest = case.turns
    variants = [
        [("user", first[1][::-1]), answer, *rest],
        [(answer[0], first[1]), (first[0], answer[1]), *rest],
    ]
    expected = read(torchmm_record(case)).text
    for turns in variants:
        other = read(torchmm_record(Case({}, turns, case.images))).text
        assert (other.ids, other.loss) != (expected.ids, expected.loss)
    swapped = read(torchmm_record(Case({}, case.turns, case.images[::-1])))
    assert swapped.files != read(copy.deepcopy(case.record)).files


@pytest.mark.parametrize("name", CASES)
def test_only_assistant_messages_are_in_loss(read, tokenizer, name):
    case = CASES[name]
    text = read(copy.deepcopy(case.record)).text
    loss_ids = [i for i, loss in zip(text.ids, text.loss, strict=True) if loss]
    answers = [content for role, content in case.turns if role == "assistant"]
    if all(isinstance(answer, str) for answer in answers):
        assert tokenizer.decode(loss_ids) == "".join(f"{answer}</s>" for answer in answers)


def test_records_read_equally_from_parquet(reader, root, tmp_path):
    """Check that missing keys, which Parquet fills with None, do not change a record."""
    names = ("finevision", "vqa", "hf_parts", "trl_prompt_completion", "alpaca")
    keys = {key for name in names for key in CASES[name].record}
    rows = [{key: CASES[name].record.get(key) for key in sorted(keys)} for name in names]
    write_parquet(tmp_path / "set", rows)
    source = open_map_source(SourceConfig(path=str(tmp_path / "set")))
    for number, name in enumerate(names):
        record = source.read(number)
        assert record.columns["messages"] is None or name == "hf_parts"
        expected = reader.read(Record(CASES[name].record, root))
        assert reader.read(record) == expected


# TRL


def test_trl_prompt_completion_is_caption_with_prompt(reader, root):
    """Compare with TRL's dataset_formats: standard prompt-completion."""
    published = Record({"prompt": "The sky is", "completion": " blue.", "image": FIRST}, root)
    reference = Record({"image": FIRST, "text": " blue."}, root, SampleOptions(prompt="The sky is"))
    actual, expected = reader.read(published), reader.read(reference)
    assert (actual.text, actual.files) == (expected.text, expected.files)
    assert parse({"prompt": "The sky is", "completion": " blue."}) == (
        TextSegment("The sky is", False),
        TextSegment(" blue.", True),
    )


def test_placeholder_of_prompt_keeps_its_position(root):
    actual = parse({"prompt": "a <image> b", "completion": "c", "images": [FIRST]}, root)
    assert [type(s).__name__ for s in actual] == ["TextSegment", "ImageSegment"] + [
        "TextSegment"
    ] * 2


def test_assistant_turns_of_prompt_are_not_trained():
    prompt = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    dialog = conversation({"prompt": prompt, "completion": [message("assistant", "d")]})
    assert [turn.train for turn in dialog.turns] == [False, False, False, None]
    dialog = conversation(
        {"prompt": prompt, "completion": [message("assistant", "d")], "system": "s"}
    )
    assert [turn.train for turn in dialog.turns] == [False] * 4 + [None]


NO_FILE = ("", " ", None, [], [""], [None], float("nan"), [float("nan")],
           {"bytes": None, "path": None}, [{"bytes": None, "path": ""}])  # fmt: skip


@pytest.mark.parametrize("value", NO_FILE)
@pytest.mark.parametrize("column", ["image", "images", "video", "audios", "mp3"])
def test_blank_file_column_means_no_file(read, column, value):
    turns = [message("user", "a"), message("assistant", "b")]
    for record in (
        {"messages": turns},
        {"conversations": [say("human", "a"), say("gpt", "b")]},
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "output": "b"},
        {"query": "a", "response": "b"},
        {"question": "a", "answer": "b"},
        {"texts": [{"user": "a", "assistant": "b"}]},
        {"texts": ["a", "b"]},
        {"text": "a"},
    ):
        assert read({**record, column: value}) == read(record)


def test_blank_file_entries_are_skipped(read):
    turns = [message("user", "<image> a"), message("assistant", "b")]
    expected = read({"messages": turns, "images": [FIRST]})
    assert read({"messages": turns, "images": ["", FIRST, None]}) == expected
    expected = read({"texts": [None, "a"], "images": [FIRST, None]})
    assert read({"texts": [None, "a"], "images": [FIRST, ""]}) == expected


def test_blank_target_image_leaves_text(root):
    for value in ("", None, float("nan")):
        record = Record(
            {"image": value, "text": "a"}, root, SampleOptions(target_image_column="image")
        )
        assert parse_record(record, None).segments == (TextSegment("a", True),)


def parse(columns, root=None):
    def no_chat(conversation, options):
        raise AssertionError

    return parse_record(Record(columns, root), no_chat).segments


# Files


@pytest.mark.parametrize(
    "columns",
    [
        {"image": b"1", "video": b"2", "audio": b"3"},
        {"images": [b"1"], "videos": [b"2"], "audios": [b"3"]},
        {"jpg": b"1", "mp4": b"2", "flac": b"3", "images": [], "videos": None},
        {"image": [b"1"], "videos": b"2", "audio": {"bytes": b"3", "path": None}},
    ],
)
@pytest.mark.parametrize("layout", ["conversations", "query", "messages"])
def test_placeholders_match_files_of_all_modalities(columns, layout):
    question = "See <video> and <image>, hear <audio>."
    records = {
        "conversations": {"conversations": [say("human", question), say("gpt", "yes")]},
        "query": {"query": question, "response": "yes"},
        "messages": {"messages": [message("user", question), message("assistant", "yes")]},
    }
    expected = [
        "See ", VideoSegment(b"2"), " and ", ImageSegment(b"1"), ", hear ", AudioSegment(b"3"),
        ".", "yes",
    ]  # fmt: skip
    assert parts({**records[layout], **columns}) == expected


def test_llava_image_placeholder_reads_video():
    """Read a record of lmms-lab/LLaVA-Video-178K."""
    entries = [say("human", "<image>\nWhat happens?"), say("gpt", "A dog digs.")]
    record = {"id": "1", "video": b"2", "data_source": "0_30_s", "conversations": entries}
    assert parts(record) == [VideoSegment(b"2"), "\nWhat happens?", "A dog digs."]
    mixed = [say("human", "<image><video>"), say("gpt", "a")]
    assert parts({"image": b"1", "video": b"2", "conversations": mixed})[:2] == [
        ImageSegment(b"1"),
        VideoSegment(b"2"),
    ]


def test_webdataset_members_form_llava_record():
    inner = {"conversations": [say("human", "<image>\na"), say("gpt", "b")]}
    parts_seen = []

    def render(conversation, options):
        parts_seen.extend(conversation.turns[0].parts)
        return Sample(())

    parse_record(Record({"jpg": b"1", "json": json.dumps(inner).encode()}), render)
    assert parts_seen == [ImageSegment(b"1"), "\na"]


DATA = DATA_ADDRESS.partition(",")[2]
AUDIO_BASE64 = base64.b64encode(b"RIFF").decode()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image", "image": FIRST}, "path"),
        ({"type": "image", "path": FIRST}, "path"),
        ({"type": "image", "url": FIRST}, "path"),
        ({"type": "image", "base64": DATA}, "data"),
        ({"type": "image", "bytes": FILES[FIRST], "path": "x.png"}, "data"),
        ({"type": "image", "image": {"bytes": FILES[FIRST], "path": "x.png"}}, "data"),
        ({"type": "image", "image": FILES[FIRST]}, "data"),
        ({"image": FIRST, "text": None}, "path"),
        ({"type": "image_url", "image_url": {"url": DATA_ADDRESS}}, "data"),
        ({"type": "image_url", "image_url": {"url": FIRST, "detail": "high"}}, "path"),
        ({"type": "image_url", "image_url": FIRST}, "path"),
        ({"type": "input_image", "image_url": DATA_ADDRESS}, "data"),
        (
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": DATA},
            },
            "data",
        ),
    ],
)
def test_image_notations_in_message_are_read(root, part, expected):
    content = [part, {"type": "text", "text": "What?"}]
    actual = parts({"messages": [message("user", content)]}, root)
    image = (
        ImageSegment(FILES[FIRST]) if expected == "data" else ImageSegment(None, f"{root}/{FIRST}")
    )
    assert actual == [image, "What?"]


@pytest.mark.parametrize("host", ["", "localhost"])
def test_file_urls_are_paths_in_source(root, host):
    escaped = FIRST.replace(".", "%2E")
    content = [{"image": f"file://{host}{root}/{escaped}"}]
    assert parts({"messages": [message("user", content)]}, root) == [
        ImageSegment(None, f"{root}/{FIRST}")
    ]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "video", "video": "a.mp4"}, VideoSegment(None, "/set/a.mp4")),
        ({"video": "a.mp4"}, VideoSegment(None, "/set/a.mp4")),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}}, VideoSegment(None, "/set/a.mp4")),
        ({"type": "audio", "audio": "a.wav"}, AudioSegment(None, "/set/a.wav")),
        ({"type": "audio_url", "audio_url": {"url": "a.wav"}}, AudioSegment(None, "/set/a.wav")),
        (
            {"type": "input_audio", "input_audio": {"data": AUDIO_BASE64, "format": "wav"}},
            AudioSegment(b"RIFF"),
        ),
        ({"type": "audio", "url": f"data:audio/wav;base64,{AUDIO_BASE64}"}, AudioSegment(b"RIFF")),
    ],
)
def test_videos_and_audio_in_message_are_read(part, expected):
    assert parts({"messages": [message("user", [part])]}, "/set") == [expected]


def test_named_files_and_columns_can_mix(root):
    content = [{"type": "image", "image": FIRST}, {"type": "image"}]
    first = ImageSegment(None, f"{root}/{FIRST}")
    second = ImageSegment(None, f"{root}/{SECOND}")
    one = {"messages": [message("user", content)], "images": [SECOND]}
    assert parts(one, root) == [first, second]
    both = {"messages": [message("user", content)], "images": [SECOND, COCO]}
    assert parts(both, root) == [second, ImageSegment(None, f"{root}/{COCO}")]


def test_placeholder_text_without_files_stays_text(read):
    for columns in (
        {"messages": [message("user", "<image> <video>"), message("assistant", "a")]},
        {
            "images": [FIRST],
            "messages": [
                message("user", [{"type": "image"}, {"type": "text", "text": "<image>"}]),
                message("assistant", "<image> <video>"),
            ],
        },
        {"images": [FIRST], "texts": [{"user": "<image>", "assistant": "<image>"}]},
        {"image": FIRST, "text": "an <image> tag"},
    ):
        sample = read(columns)
        assert len(sample.images) == ("images" in columns or "image" in columns)


def test_caption_with_several_images_is_read(root):
    actual = parse({"images": [FIRST, SECOND], "text": "two"}, root)
    assert [type(s).__name__ for s in actual] == ["ImageSegment", "ImageSegment", "TextSegment"]


# Tools in ShareGPT


def test_sharegpt_tool_calls_become_calls_and_results():
    """Read the keys function_call and observation of LLaMA-Factory, data/README.md."""
    calls = [{"name": "tall", "arguments": {"a": 1}}, {"name": "wide", "arguments": "{}"}]
    entries = [
        say("human", "How large?"),
        say("function_call", json.dumps(calls[0])),
        say("function_call", json.dumps([calls[1]])),
        say("observation", '{"size": 3}'),
        say("gpt", "Three."),
    ]
    tools = '[{"name": "tall"}, {"name": "wide"}]'
    actual = conversation({"conversations": entries, "tools": tools})
    messages = [
        message("user", "How large?"),
        {
            **message("assistant", None),
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        },
        message("tool", '{"size": 3}'),
        message("assistant", "Three."),
    ]
    expected = conversation({"messages": messages, "tools": tools})
    assert actual == expected
    assert [len(turn.tool_calls) for turn in actual.turns] == [0, 2, 0, 0]
    assert [tool["function"]["name"] for tool in actual.tools] == ["tall", "wide"]


def test_assistant_messages_of_prompt_are_not_in_loss(read, tokenizer):
    prompt = [message("user", "a"), message("assistant", "red"), message("user", "c")]
    text = read({"prompt": prompt, "completion": [message("assistant", "blue")]}).text
    loss_ids = [i for i, loss in zip(text.ids, text.loss, strict=True) if loss]
    assert tokenizer.decode(loss_ids) == "blue</s>"


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_messages_may_be_json_text(column):
    messages = [message("user", "a"), message("assistant", "b")]
    assert conversation({column: json.dumps(messages)}) == conversation({column: messages})


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        ({"question": "How many?", "answer": 3}, "3"),
        ({"question": "How much?", "answers": [0.5]}, "0.5"),
        ({"instruction": "Count.", "output": 12}, "12"),
        ({"query": "Count.", "response": -1.25}, "-1.25"),
    ],
)
def test_numbers_are_answers(record, answer):
    assert conversation(record).turns[-1].parts == (answer,)


def test_tool_calls_of_none_are_ignored():
    filled = {**message("assistant", "a"), "tool_calls": None}
    assert parts({"conversations": [filled, filled]}) == ["a", "a"]


def test_documentation_lists_all_record_formats():
    table = (Path(__file__).parents[3] / "docs" / "reference" / "data_formats.md").read_text()
    for layout in RECORD_FORMATS:
        assert re.search(rf"^\| {layout.name} \|", table, re.MULTILINE), layout.name
        for group in layout.required_columns:
            assert all(f"`{name}`" in table for name in group), group


def test_examples_of_documentation_are_read():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "data_formats.md").read_text()
    text = page.partition("One record of each format:\n\n```json\n")[2].partition("```")[0]
    names = []
    while text.strip():
        record, end = json.JSONDecoder().raw_decode(text)
        text = text[end:].lstrip()
        layout = detect_format(Record(record, "/set"))
        layout.read(Record(record, "/set"))
        names.append(layout.name)
    assert names == [layout.name for layout in RECORD_FORMATS]


@pytest.mark.parametrize(
    ("columns", "references"),
    [
        ({"question": "?", "answers": ["a", "b", "a"]}, ("a", "b", "a")),
        ({"question": "?", "answers": [{"answer": "a", "answer_id": 1}]}, ("a",)),
        ({"question": "?", "answer": "a"}, ()),
        ({"question": "?", "choices": ["x", "y"], "answers": ["x"]}, ()),
        ({"text": "a", "references": ["a", "b"]}, ("a", "b")),
        ({"json": '{"text": "a", "references": ["c"]}'}, ("c",)),
        ({"text": "a", "answers": ["b"]}, ()),
    ],
)
def test_references_are_read(columns, references):
    assert read_references(Record(columns)) == references


@pytest.mark.parametrize("references", ["a", [1], [["a"]]])
def test_references_must_be_strings(references):
    with pytest.raises(CorruptSampleError, match="references"):
        read_references(Record({"text": "a", "references": references}))


def test_references_column_can_be_renamed(tmp_path):
    rows = [{"image": b"", "text": "a", "captions": ["b", "c"]}]
    path = write_parquet(tmp_path / "set", rows)
    config = SourceConfig(path=str(path), columns={"references": "captions"})
    source = open_map_source(config, str(tmp_path / "index"), None)
    assert read_references(source.read(0)) == ("b", "c")
