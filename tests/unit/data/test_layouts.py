"""Every layout gives the tokens, labels and files of the same content in our own."""

from __future__ import annotations

import base64
import copy
import json
import re
import socket
from pathlib import Path

import pytest
from data_cases import CLIP, write_parquet
from layout_cases import CASES, COCO, DATA_ADDRESS, FILES, FIRST, SECOND, Case, own_layout, said
from layout_cases import turn as message

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts import columns as columns_module
from torchmm.data.layouts.recognise import LAYOUTS, parse_record, recognise
from torchmm.data.layouts.sample import (
    AudioSegment,
    ImageSegment,
    Record,
    Sample,
    SampleOptions,
    TextSegment,
    VideoSegment,
)
from torchmm.data.sources.local_and_hub import open_map_source
from torchmm.data.sources.reader import SampleReader
from torchmm.recipe.data_section import DataConfig, SourceConfig


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("set")
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return str(directory)


@pytest.fixture(scope="module")
def reader(tokenizer, text_spec):
    return SampleReader(DataConfig(), 2048, text_spec, {"vision": CLIP}, tokenizer)


@pytest.fixture
def read(reader, root):
    return lambda columns: reader.read(Record(columns, root))


def conversation(columns, root=None):
    """What a record says, before any template."""
    record = Record(columns, root)
    return recognise(record).read(record)


def parts(columns, root=None):
    """Everything that is said, in one row."""
    return [part for turn in conversation(columns, root).turns for part in turn.parts]


@pytest.mark.parametrize("name", CASES)
def test_published_records_equal_our_own_layout(read, name):
    case = CASES[name]
    found, expected = read(copy.deepcopy(case.record)), read(own_layout(case))
    assert found.text.ids == expected.text.ids
    assert found.text.loss == expected.text.loss
    assert found.text.image_starts == expected.text.image_starts
    assert found.images == expected.images
    assert found.files == expected.files == [FILES[name] for name in case.images]


def test_the_comparison_sees_a_moved_picture_and_another_speaker(read):
    case = CASES["llama_factory_images"]
    first, answer, *rest = case.turns
    others = [
        [("user", first[1][::-1]), answer, *rest],
        [(answer[0], first[1]), (first[0], answer[1]), *rest],
    ]
    expected = read(own_layout(case)).text
    for turns in others:
        other = read(own_layout(Case({}, turns, case.images))).text
        assert (other.ids, other.loss) != (expected.ids, expected.loss)
    swapped = read(own_layout(Case({}, case.turns, case.images[::-1])))
    assert swapped.files != read(copy.deepcopy(case.record)).files


@pytest.mark.parametrize("name", CASES)
def test_only_answers_count(read, tokenizer, name):
    case = CASES[name]
    text = read(copy.deepcopy(case.record)).text
    learnt = [i for i, loss in zip(text.ids, text.loss, strict=True) if loss]
    answers = [content for role, content in case.turns if role == "assistant"]
    if all(isinstance(answer, str) for answer in answers):
        assert tokenizer.decode(learnt) == "".join(f"{answer}</s>" for answer in answers)


def test_records_are_the_same_through_parquet(reader, root, tmp_path):
    """Parquet gives every record and table all keys that any other has, filled with None."""
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


def test_trl_texts_are_a_caption_with_its_prompt(reader, root):
    """TRL's dataset_formats: standard prompt-completion."""
    published = Record({"prompt": "The sky is", "completion": " blue.", "image": FIRST}, root)
    own = Record({"image": FIRST, "text": " blue."}, root, SampleOptions(prompt="The sky is"))
    found, expected = reader.read(published), reader.read(own)
    assert (found.text, found.files) == (expected.text, expected.files)
    assert parse({"prompt": "The sky is", "completion": " blue."}) == (
        TextSegment("The sky is", False),
        TextSegment(" blue.", True),
    )


def test_placeholders_of_a_prompt_are_kept_in_place(root):
    found = parse({"prompt": "a <image> b", "completion": "c", "images": [FIRST]}, root)
    assert [type(s).__name__ for s in found] == ["TextSegment", "ImageSegment"] + [
        "TextSegment"
    ] * 2


def test_answers_in_a_prompt_are_not_learnt():
    prompt = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    made = conversation({"prompt": prompt, "completion": [message("assistant", "d")]})
    assert [turn.train for turn in made.turns] == [False, False, False, None]
    made = conversation(
        {"prompt": prompt, "completion": [message("assistant", "d")], "system": "s"}
    )
    assert [turn.train for turn in made.turns] == [False] * 4 + [None]


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
def test_files_of_all_kinds_and_columns_have_placeholders(columns, layout):
    asked = "See <video> and <image>, hear <audio>."
    said_as = {
        "conversations": {"conversations": [said("human", asked), said("gpt", "yes")]},
        "query": {"query": asked, "response": "yes"},
        "messages": {"messages": [message("user", asked), message("assistant", "yes")]},
    }
    expected = [
        "See ", VideoSegment(b"2"), " and ", ImageSegment(b"1"), ", hear ", AudioSegment(b"3"),
        ".", "yes",
    ]  # fmt: skip
    assert parts({**said_as[layout], **columns}) == expected


def test_llava_writes_image_for_a_clip():
    """lmms-lab/LLaVA-Video-178K."""
    entries = [said("human", "<image>\nWhat happens?"), said("gpt", "A dog digs.")]
    record = {"id": "1", "video": b"2", "data_source": "0_30_s", "conversations": entries}
    assert parts(record) == [VideoSegment(b"2"), "\nWhat happens?", "A dog digs."]
    mixed = [said("human", "<image><video>"), said("gpt", "a")]
    assert parts({"image": b"1", "video": b"2", "conversations": mixed})[:2] == [
        ImageSegment(b"1"),
        VideoSegment(b"2"),
    ]


def test_webdataset_members_make_a_llava_record():
    inner = {"conversations": [said("human", "<image>\na"), said("gpt", "b")]}
    seen = []

    def render(conversation, options):
        seen.extend(conversation.turns[0].parts)
        return Sample(())

    parse_record(Record({"jpg": b"1", "json": json.dumps(inner).encode()}), render)
    assert seen == [ImageSegment(b"1"), "\na"]


DATA = DATA_ADDRESS.partition(",")[2]
SOUND = base64.b64encode(b"RIFF").decode()


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
def test_every_spelling_of_an_image_in_a_message(root, part, expected):
    content = [part, {"type": "text", "text": "What?"}]
    found = parts({"messages": [message("user", content)]}, root)
    image = (
        ImageSegment(FILES[FIRST]) if expected == "data" else ImageSegment(None, f"{root}/{FIRST}")
    )
    assert found == [image, "What?"]


def test_addresses_of_files_are_paths_below_the_source(root):
    content = [{"image": f"file://{root}/{FIRST}"}]
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
            {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}},
            AudioSegment(b"RIFF"),
        ),
        ({"type": "audio", "url": f"data:audio/wav;base64,{SOUND}"}, AudioSegment(b"RIFF")),
    ],
)
def test_clips_and_sounds_in_a_message(part, expected):
    assert parts({"messages": [message("user", [part])]}, "/set") == [expected]


def test_named_files_and_columns_may_take_turns(root):
    content = [{"type": "image", "image": FIRST}, {"type": "image"}]
    first = ImageSegment(None, f"{root}/{FIRST}")
    second = ImageSegment(None, f"{root}/{SECOND}")
    one = {"messages": [message("user", content)], "images": [SECOND]}
    assert parts(one, root) == [first, second]
    both = {"messages": [message("user", content)], "images": [SECOND, COCO]}
    assert parts(both, root) == [second, ImageSegment(None, f"{root}/{COCO}")]


def test_words_that_look_like_placeholders_stay_words(read):
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


def test_captions_take_any_number_of_images(root):
    found = parse({"images": [FIRST, SECOND], "text": "two"}, root)
    assert [type(s).__name__ for s in found] == ["ImageSegment", "ImageSegment", "TextSegment"]


# Tools in ShareGPT


def test_calls_of_tools_become_calls_and_answers():
    """LLaMA-Factory, data/README.md: function_call and observation."""
    calls = [{"name": "tall", "arguments": {"a": 1}}, {"name": "wide", "arguments": "{}"}]
    entries = [
        said("human", "How large?"),
        said("function_call", json.dumps(calls[0])),
        said("function_call", json.dumps([calls[1]])),
        said("observation", '{"size": 3}'),
        said("gpt", "Three."),
    ]
    tools = '[{"name": "tall"}, {"name": "wide"}]'
    found = conversation({"conversations": entries, "tools": tools})
    own = [
        message("user", "How large?"),
        {
            **message("assistant", None),
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        },
        message("tool", '{"size": 3}'),
        message("assistant", "Three."),
    ]
    expected = conversation({"messages": own, "tools": tools})
    assert found == expected
    assert [len(turn.tool_calls) for turn in found.turns] == [0, 2, 0, 0]
    assert [tool["function"]["name"] for tool in found.tools] == ["tall", "wide"]


def test_answers_in_a_prompt_stay_out_of_the_loss(read, tokenizer):
    prompt = [message("user", "a"), message("assistant", "red"), message("user", "c")]
    text = read({"prompt": prompt, "completion": [message("assistant", "blue")]}).text
    learnt = [i for i, loss in zip(text.ids, text.loss, strict=True) if loss]
    assert tokenizer.decode(learnt) == "blue</s>"


def test_calls_that_parquet_filled_in_are_none():
    filled = {**message("assistant", "a"), "tool_calls": None}
    assert parts({"conversations": [filled, filled]}) == ["a", "a"]


# What is refused


def chat(*entries, **columns):
    return {"conversations": [*entries], **columns}


def messages(*said, **columns):
    return {"messages": [*said], **columns}


def asked(part, **columns):
    return messages(message("user", [part]), message("assistant", "a"), **columns)


Q, A = said("human", "<image>\nWhat?"), said("gpt", "A bus.")
SKY = {"prompt": "The sky is", "completion": " blue."}
ASK = {"question": "What?", "choices": ["red", "blue"]}

REFUSED = [
    # numbers of files
    (chat(Q, A), "1 <image> placeholders but 0 images"),
    (chat(said("human", "What?"), A, image=FIRST), "0 <image> placeholders but 1 images"),
    (chat(Q, A, image=[FIRST, SECOND]), "1 <image> placeholders but 2 images"),
    (chat(Q, said("gpt", "<image>"), image=FIRST), "2 <image> placeholders but 1 images"),
    (chat(Q, A, image=FIRST, video="a.mp4"), "0 <video> placeholders but 1 videos"),
    (chat(Q, Q, A, video="a.mp4"), "2 <video> placeholders but 1 videos"),
    (chat(Q, said("human", "<video>"), A, video="a.mp4"), "1 <image> placeholders but 0 images"),
    (chat(said("human", "<audio>?"), A), "1 <audio> placeholders but 0 audios"),
    (chat(Q, A, image=FIRST, images=[SECOND]), "columns images and image both have images"),
    (
        messages(message("user", "<image> <image>"), message("assistant", "a"), images=[FIRST]),
        "2 <image> placeholders but 1 images",
    ),
    (
        messages(message("user", "What?"), message("assistant", "a"), image=FIRST),
        "0 <image> placeholders but 1 images",
    ),
    ({"query": "<image>?", "response": "a"}, "1 <image> placeholders but 0 images"),
    (
        {"instruction": "a", "output": "b", "images": [FIRST]},
        "0 <image> placeholders but 1 images",
    ),
    ({**SKY, "prompt": "<image><image>", "image": FIRST}, "2 <image> placeholders but 1 images"),
    ({"question": "<image> <image>?", "answer": "a", "image": FIRST}, "2 <image> placeholders"),
    (asked({"type": "image"}), "1 image parts in messages, 0 of them with a file, but 0 images"),
    (asked({"type": "image"}, images=[FIRST, SECOND]), "1 image parts .* but 2 images"),
    (
        messages(
            message("user", [{"type": "image", "image": FIRST}] * 2 + [{"type": "image"}]),
            message("assistant", "a"),
            images=[FIRST, SECOND],
        ),
        "3 image parts in messages, 2 of them with a file, but 2 images",
    ),
    # nearly a layout
    (
        chat(Q, A, {"speaker": "human", "utterance": "x"}, image=FIRST),
        "`conversations` found, but entry 3 has neither from/value nor role/content, but speaker",
    ),
    (chat(Q, {}, image=FIRST), "entry 2 has neither from/value nor role/content: it is empty"),
    (chat("a"), "`conversations` found, but entry 1 is str, not a table"),
    (chat({"from": "human"}), "entry 1 has from but no value"),
    (chat(said("robot", "a")), "entry 1 has from = 'robot', none of system, human, user"),
    ({"conversation": [{"human": "a"}]}, "`conversation` found, but entry 1 has neither"),
    ({"conversations": "a"}, "column conversations is str, not a list"),
    ({"conversations": []}, "a chat without messages"),
    ({"question": "a"}, "`question` found, but none of answer, answers, correct_choice_idx"),
    ({"prompt": "a"}, "`prompt` found, but no completion"),
    ({"instruction": "a", "input": "b"}, "`instruction` found, but no output"),
    ({"query": "a", "label": ["b"]}, "`query` found, but no response"),
    ({"image": FIRST, "id": 3}, "`image` found, but none of text, txt, caption"),
    ({"images": [FIRST]}, "`images` found, but none of texts, messages, conversations"),
    ({"texts": [{"user": "a"}]}, "`texts` found, but entry 1 has no assistant text"),
    ({"texts": [{"user": "a", "assistant": "b"}, None]}, "`texts` found, but entry 2 has no user"),
    ({"label": 3}, r"no format for columns \['label'\]"),
    # wrong values
    (chat(Q, said("gpt", " "), image=FIRST), "assistant message has no content"),
    (chat(said("human", 3), A), "content is int, not text or a list"),
    (chat(said("function_call", "f(x)")), "entry 1 calls a tool, but is no JSON"),
    (chat(said("function_call", "{}")), "entry 1 calls a tool without a name"),
    (chat(said("function_call", '{"name": "f"}')), "entry 1 calls f without arguments"),
    (chat(said("system", "a"), Q, A, image=FIRST, system="b"), r"column system \('b'\) and a"),
    ({"query": 3, "response": "a"}, "column query is int, not a string"),
    ({"query": "a", "response": ["b"]}, "column response is list, not a string"),
    ({"query": "a", "response": "b", "history": [["c"]]}, "history entry 1 is list of 1, not"),
    ({"query": "a", "response": "b", "history": ["c"]}, "history entry 1 is str, not"),
    ({"query": "a", "response": "b", "history": [["c", None]]}, "history entry 1 is NoneType"),
    ({"question": "a", "answer": 3}, "column answer is int, not text or a list, and there are no"),
    ({"question": "a", "answers": []}, "column answers is an empty list"),
    ({"question": "a", "answers": {"text": ["b"]}}, "column answers is dict, not text or a list"),
    ({"question": "a", "answers": ["b", 3]}, "an answer in column answers is int"),
    ({**ASK, "answer": 2}, "answer = 2 is none of 2 choices: no number from 0 to 1"),
    ({**ASK, "answer": "C"}, "answer = 'C' is none of 2 choices"),
    ({**ASK, "answer": True}, "answer = True is none of 2 choices"),
    ({**ASK, "answer": -1}, "answer = -1 is none of 2 choices"),
    ({**ASK, "choices": ["B", "A"], "answer": "A"}, "answer = 'A' may be choice 0 or 1 of 2"),
    ({**ASK, "choices": "['a']", "answer": 0}, "column choices is str, not a list"),
    ({**ASK, "choices": ["a"] * 27, "answer": 0}, "column choices has 27 choices, at most 26"),
    ({**ASK, "answers": ["a"]}, "`choices` found, but none of answer, correct_choice_idx"),
    ({**SKY, "completion": [message("assistant", "a")]}, "prompt is str and completion list"),
    ({**SKY, "completion": " "}, "completion is empty"),
    (
        {"prompt": [message("user", "a")], "completion": [message("user", "b")]},
        "1 messages in completion, none of which is an assistant's",
    ),
    ({"prompt": ["a"], "completion": [message("assistant", "b")]}, "message 1 of 2 .* is str"),
    (
        {"prompt": [], "completion": [message("assistant", "b")], "images": [FIRST]},
        "1 files but no user message to put them into",
    ),
    (
        {"prompt": [message("user", 3)], "completion": [message("assistant", "b")],
         "image": FIRST},
        "content part a table of type, text is none of text, image, video, audio",
    ),
    # preferences
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "column chosen belongs to a set of pref"),
    (
        messages(message("user", "a"), message("assistant", "b"), rejected_response="c"),
        "column rejected_response belongs to a set of preferences",
    ),
    ({**SKY, "label": False}, "column label belongs to a set of preferences"),
    ({"instruction": "a", "output": "b", "kto_tag": True}, "column kto_tag belongs to a set"),
    # files inside of messages
    (asked({"type": "image", "image": "http://a/b.png"}), "never fetched"),
    (asked({"type": "image_url", "image_url": {"url": "https://a/b.png"}}), "never fetched"),
    (asked({"type": "image", "image": "../b.png"}), "leaves"),
    (asked({"image": "file:///etc/passwd"}), "leaves"),
    (asked({"type": "image_url", "image_url": {"url": "data:image/png,x"}}), "not data:TYPE;"),
    (asked({"type": "image", "image": "data:image/png;base64,?"}), "image data is no base64"),
    (asked({"type": "image", "image": "data:video/mp4;base64,AA"}), "data of another kind"),
    (asked({"type": "image", "source": {"type": "file", "file_id": "f1"}}), "file_id 'f1'"),
    (asked({"type": "video", "video": ["1.jpg", "2.jpg"]}), "a list of 2, not one file"),
    (
        asked({"type": "image", "image": FIRST, "url": SECOND}),
        "image part of a user message names its file as image and url; keep one",
    ),
    (asked({"type": "image", "image": 3}), "image is int, not bytes or a path"),
    (asked({"type": "image", "image": FIRST, "max_pixels": 9}), "image part of a user message has"),
    (asked({"type": "audio", "audio": {"path": None, "data": 3}}), "audio data is int, not base64"),
    (asked({"type": "document", "title": "x"}), "none of text, image, video, audio"),
    (asked({"image": FIRST, "video": "a.mp4"}), "none of text, image, video, audio"),
    (asked({"type": "text", "text": None}), "none of text, image, video, audio"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "reason"), REFUSED)
def test_what_is_refused_says_why(read, columns, reason, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    with pytest.raises(CorruptSampleError, match=reason):
        read(copy.deepcopy(columns))


def test_the_neighbours_of_what_is_refused_are_fine(read):
    """What is wrong with the records above is what they are refused for."""
    assert len(REFUSED) >= 40
    for columns in (
        chat(Q, A, image=FIRST),
        chat(said("human", "What?"), A),
        messages(message("user", "<image> <image>"), message("assistant", "a"),
                 images=[FIRST, SECOND]),
        {"query": "<image>?", "response": "a", "image": FIRST, "history": [["c", "d"]]},
        asked({"type": "image"}, images=[FIRST]),
        asked({"type": "image", "image": FIRST}),
        {**ASK, "answer": 1}, {**ASK, "answer": "(B)"}, {**ASK, "answer": "blue"},
        {**ASK, "answer": "0"}, {"question": "a", "answer": "b"},
        {**SKY, "label": 1}, SKY,
        {"prompt": [], "completion": [message("assistant", "b")]},
    ):  # fmt: skip
        assert any(read(columns).text.loss)


def test_files_inside_of_records_have_a_limit(monkeypatch):
    monkeypatch.setattr(columns_module, "MAX_INLINE_BYTES", 10)
    record = asked({"type": "image", "image": "data:image/png;base64," + "A" * 16})
    with pytest.raises(CorruptSampleError, match="image of 12 bytes inside the record, at most 10"):
        conversation(record)


def nested(levels):
    deep: list = ["x"]
    for _ in range(levels):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": [message("user", [{"type": "x", "y": nested(100_000)}])]},
        {"messages": [message("user", [{"type": "image", "image": nested(100_000)}])]},
        {"messages": [message(nested(100_000), "a")]},
        chat({"from": nested(100_000), "value": "a"}),
        chat(said("function_call", "[" * 100_000)),
        {**ASK, "answer": nested(100_000)},
        {"query": "a", "response": "b", "history": nested(100_000)},
        {"texts": [{"user": nested(100_000), "assistant": "b"}]},
    ],
)
def test_deeply_nested_values_cost_one_sample(columns, read):
    with pytest.raises(CorruptSampleError):
        read(columns)


def test_a_million_placeholders_are_counted_not_split(read):
    with pytest.raises(CorruptSampleError, match="1000000 <image> placeholders but 1 images"):
        read(chat(said("human", "<image>" * 1_000_000), A, image=FIRST))


def test_every_layout_is_in_the_documents():
    table = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    for layout in LAYOUTS:
        assert re.search(rf"^\| {layout.name} \|", table, re.MULTILINE), layout.name
        for group in layout.needs:
            assert all(f"`{name}`" in table for name in group), group


def test_the_examples_of_the_documents_are_read():
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    text = page.partition("One record of each:\n\n```json\n")[2].partition("```")[0]
    found = []
    while text.strip():
        record, end = json.JSONDecoder().raw_decode(text)
        text = text[end:].lstrip()
        layout = recognise(Record(record, "/set"))
        layout.read(Record(record, "/set"))
        found.append(layout.name)
    assert found == [layout.name for layout in LAYOUTS]
