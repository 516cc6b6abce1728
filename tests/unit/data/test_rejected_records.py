"""Rejected records and their error messages: numbers of files, keys and entries."""

from __future__ import annotations

import copy
import socket

import pytest
from layout_cases import FIRST, SECOND, say
from layout_cases import turn as message

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats import columns as columns_module
from torchmm.data.record_formats.detect import detect_format
from torchmm.data.record_formats.sample import Record


def chat(*entries, **columns):
    return {"conversations": [*entries], **columns}


def messages(*entries, **columns):
    return {"messages": [*entries], **columns}


def ask(part, **columns):
    return messages(message("user", [part]), message("assistant", "a"), **columns)


Q, A = say("human", "<image>\nWhat?"), say("gpt", "A bus.")
SKY = {"prompt": "The sky is", "completion": " blue."}
ASK = {"question": "What?", "choices": ["red", "blue"]}
TURNS = [message("user", "a"), message("assistant", "b")]
DOG = {"ref": ["dog"], "bbox": [[10, 20, 30, 40]]}

REJECTED = [
    # Numbers of files
    (chat(Q, A), "1 <image> placeholders but 0 image files"),
    (chat(say("human", "What?"), A, image=FIRST), "0 <image> placeholders but 1 image files"),
    (chat(Q, A, image=[FIRST, SECOND]), "1 <image> placeholders but 2 image files"),
    (chat(Q, say("gpt", "<image>"), image=FIRST), "2 <image> placeholders but 1 image files"),
    (chat(Q, A, image=FIRST, video="a.mp4"), "0 <video> placeholders but 1 video files"),
    (chat(Q, Q, A, video="a.mp4"), "2 <video> placeholders but 1 video files"),
    (chat(Q, say("human", "<video>"), A, video="a.mp4"), "1 <image> placeholders but 0 image"),
    (chat(say("human", "<audio>?"), A), "1 <audio> placeholders but 0 audio files"),
    (chat(Q, A, image=FIRST, images=[SECOND]), "columns images and image both contain image files"),
    (
        messages(message("user", "<image> <image>"), message("assistant", "a"), images=[FIRST]),
        "2 <image> placeholders but 1 image files",
    ),
    (
        messages(message("user", "What?"), message("assistant", "a"), image=FIRST),
        "0 <image> placeholders but 1 image files",
    ),
    ({"query": "<image>?", "response": "a"}, "1 <image> placeholders but 0 image files"),
    (
        {"instruction": "a", "output": "b", "images": [FIRST]},
        "0 <image> placeholders but 1 image files",
    ),
    ({**SKY, "prompt": "<image><image>", "image": FIRST}, "2 <image> placeholders but 1 image"),
    ({"question": "<image> <image>?", "answer": "a", "image": FIRST}, "2 <image> placeholders"),
    (ask({"type": "image"}), "1 image parts in messages, 0 of which have a file, but 0 image"),
    (ask({"type": "image"}, images=[FIRST, SECOND]), "1 image parts .* but 2 image files"),
    (
        messages(
            message("user", [{"type": "image", "image": FIRST}] * 2 + [{"type": "image"}]),
            message("assistant", "a"),
            images=[FIRST, SECOND],
        ),
        "3 image parts in messages, 2 of which have a file, but 2 image files",
    ),
    # Incomplete record formats
    (
        chat(Q, A, {"speaker": "human", "utterance": "x"}, image=FIRST),
        "`conversations` exists, but entry 3 has neither from/value nor role/content, only speaker",
    ),
    (chat(Q, {}, image=FIRST), "entry 2 has neither from/value nor role/content, because it is"),
    (chat("a"), "`conversations` exists, but entry 1 is str, not an object"),
    (chat({"from": "human"}), "entry 1 has from but no value"),
    (chat(say("robot", "a")), "entry 1 has from = 'robot'; use one of system, human, user"),
    ({"conversation": [{"human": "a"}]}, "`conversation` exists, but entry 1 has neither"),
    ({"conversations": "a"}, "column conversations is str, not a list"),
    ({"conversations": []}, "the chat has no messages"),
    ({"question": "a"}, "`question` exists, but none of answer, answers, correct_choice_idx"),
    ({"prompt": "a"}, "`prompt` exists, but no completion"),
    ({"instruction": "a", "input": "b"}, "`instruction` exists, but no output"),
    ({"query": "a", "label": ["b"]}, "`query` exists, but no response"),
    ({"image": FIRST, "id": 3}, "`image` exists, but none of text, txt, caption"),
    ({"images": [FIRST]}, "`images` exists, but none of texts, messages, conversations"),
    ({"texts": [{"user": "a"}]}, "`texts` exists, but entry 1 has no assistant text"),
    ({"texts": [{"user": "a", "assistant": "b"}, None]}, "`texts` exists, but entry 2 has no user"),
    ({"label": 3}, r"no record format matches the columns \['label'\]"),
    # Wrong values
    (chat(Q, say("gpt", " "), image=FIRST), "assistant message has no content"),
    (chat(say("human", 3), A), "content is int, not a string or a list"),
    (chat(say("function_call", "f(x)")), "entry 1 contains a tool call that is not valid JSON"),
    (chat(say("function_call", "{}")), "entry 1 contains a tool call without a name"),
    (chat(say("function_call", '{"name": "f"}')), "entry 1 contains a call of f without"),
    (chat(say("system", "a"), Q, A, image=FIRST, system="b"), r"column system \('b'\) and a"),
    ({"query": 3, "response": "a"}, "column query is int, not a string"),
    ({"query": "a", "response": ["b"]}, "column response is list, not a string"),
    ({"query": "a", "response": "b", "history": [["c"]]}, "history entry 1 is list of 1, not"),
    ({"query": "a", "response": "b", "history": ["c"]}, "history entry 1 is str, not"),
    ({"query": "a", "response": "b", "history": [["c", None]]}, "history entry 1 is NoneType"),
    (
        {"question": "a", "choices": [], "answer": 3},
        "column answer is int, not a string or a list, and there are",
    ),
    ({"question": "a", "answer": float("inf")}, "column answer is float, not a string"),
    ({"question": "a", "answer": True}, "column answer is bool, not a string or a list"),
    ({"messages": '[{"role": "user"'}, "column messages: .* is not valid JSON"),
    ({"messages": '[{"role": "user", "role": "tool"}]'}, "column messages: .*a key appears twice"),
    ({"question": "a", "answers": []}, "column answers is an empty list"),
    ({"question": "a", "answers": {"text": ["b"]}}, "column answers is dict, not a string or a"),
    ({"question": "a", "answers": ["b", None]}, "an answer in column answers is NoneType"),
    ({**ASK, "answer": 2}, "answer = 2 matches none of 2 choices; use a number from 0 to 1"),
    ({**ASK, "answer": "C"}, "answer = 'C' matches none of 2 choices"),
    ({**ASK, "answer": True}, "answer = True matches none of 2 choices"),
    ({**ASK, "answer": -1}, "answer = -1 matches none of 2 choices"),
    ({**ASK, "choices": ["B", "A"], "answer": "A"}, "answer = 'A' is ambiguous: it matches"),
    ({**ASK, "choices": "['a']", "answer": 0}, "column choices: .* is not valid JSON"),
    ({**ASK, "choices": ["a"] * 27, "answer": 0}, "column choices has 27 choices, but at most 26"),
    ({**ASK, "answers": ["a"]}, "`choices` exists, but none of answer, correct_choice_idx"),
    ({**SKY, "completion": [message("assistant", "a")]}, "prompt is str and completion is list"),
    ({**SKY, "completion": " "}, "completion is empty"),
    (
        {"prompt": [message("user", "a")], "completion": [message("user", "b")]},
        "1 messages in completion, but no assistant message",
    ),
    ({"prompt": ["a"], "completion": [message("assistant", "b")]}, "message 1 of 2 .* is str"),
    (
        {"prompt": [], "completion": [message("assistant", "b")], "images": [FIRST]},
        "1 files but no user message that could contain them",
    ),
    (
        {"prompt": [message("user", 3)], "completion": [message("assistant", "b")],
         "image": FIRST},
        "content part an object with type, text is not supported; use one of text, image, video,",
    ),
    # Preference data
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "column chosen belongs to preference"),
    (
        messages(message("user", "a"), message("assistant", "b"), rejected_response="c"),
        "column rejected_response belongs to preference data",
    ),
    ({**SKY, "label": False}, "column label belongs to preference data"),
    ({"instruction": "a", "output": "b", "kto_tag": True}, "column kto_tag belongs to preference"),
    ({**SKY, "label": "True"}, "column label belongs to preference data"),
    (chat(say("human", "a"), A, label=True), "column label belongs to preference data"),
    ({"query": "a", "response": "b", "label": False}, "column label belongs to preference"),
    (
        messages(*TURNS, rejected_messages=TURNS),
        "column rejected_messages belongs to preference data",
    ),
    # Columns that change a chat
    (messages(*TURNS, documents=[{"text": "c"}]), "column documents is not supported for chats"),
    (messages(*TURNS, system_prompt="c"), r"system_prompt = 'c' .* \{ system = \"system_prompt"),
    (messages(*TURNS, system="d", system_prompt="c"), "column system_prompt = 'c' is not"),
    (messages(*TURNS, loss_scale=0.5), "column loss_scale = 0.5 is not supported for chats"),
    (messages(*TURNS, continue_final_message=True), "column continue_final_message = True"),
    ({**SKY, "documents": ["c"]}, "column documents is not supported for chats"),
    ({**SKY, "system": "c"}, "column system requires a chat, but prompt and completion are"),
    ({**SKY, "tools": [{"name": "f"}]}, "column tools requires a chat, but prompt and"),
    ({"instruction": "a", "output": "b", "context": "c"}, r"columns = \{ input = \"context\" \}"),
    # Placeholders that require a column
    (
        messages(message("user", "the <ref-object>"), message("assistant", "a"), objects=DOG),
        "text contains <ref-object>, but column objects is not supported",
    ),
    (
        messages(message("user", "where?"), message("assistant", "at <bbox>"), objects=DOG),
        "text contains <bbox>, but column objects is not supported",
    ),
    ({"query": "where?", "response": "<bbox>", "objects": DOG}, "but column objects is not supp"),
    ({"text": "a dog at <bbox>", "objects": DOG}, "but column objects is not supp"),
    ({"texts": ["a dog at <bbox>"], "objects": DOG}, "but column objects is not supp"),
    ({"text": "a dog at <bbox>", "bbox": [1, 2, 3, 4]}, "text contains <bbox>, but column bbox is"),
    (messages(*TURNS, image_1=FIRST), "column image_1 contains a file that is not used"),
    ({"text": "two", "video2": FIRST}, "column video2 contains a file that is not used"),
    *(
        (
            messages(message("user", "<image>"), message("assistant", "a"), images=empty),
            "text contains <image>, but column images has no file",
        )
        for empty in ([], "", [None], [""], float("nan"))
    ),
    ({"text": "<image> a", "image": ""}, "text contains <image>, but column image has no file"),
    # Decoded audio
    ({"audio": {"array": [0.5]}, "text": "a"}, "sampling_rate = None; use samples per second"),
    *(
        ({"audio": {"array": [0.5], "sampling_rate": rate}, "text": "a"}, "but sampling_rate = ")
        for rate in (0, -1, 0.5, 10**9, 10**400, float("inf"), float("nan"), "8000", True)
    ),
    *(
        ({"audio": {"array": array, "sampling_rate": 8000}, "text": "a"}, f"`array` .*{reason}")
        for array, reason in (
            ([], "shape"),
            ([[]], "shape"),
            ([[[0.1]]], "shape"),
            ([[0.1, 0.2], [0.1, 0.2]], r"shape \(2, 2\), in which the channel dimension is"),
            ([[0.1], [0.1, 0.2]], "not rectangular"),
            (["0.1"], "not numbers"),
            ([None, 0.1], "not numbers"),
            ([True], "not numbers"),
            ("0.1", "not numbers"),
            ([0.1, float("nan")], "magnitude nan"),
            ([0.1, float("inf")], "magnitude inf"),
            ([12000.0], "magnitude 12000; scale samples"),
            ([120, -3], "magnitude 120; scale samples"),
        )
    ),
    ({"image": {"array": [0.5], "sampling_rate": 8000}, "text": "a"}, "supported only for audio"),
    # Files inside of messages
    (ask({"type": "image", "image": "http://a/b.png"}), "does not download"),
    (ask({"type": "image_url", "image_url": {"url": "https://a/b.png"}}), "does not download"),
    (ask({"type": "image", "image": "../b.png"}), "is outside"),
    (ask({"image": "file:///etc/passwd"}), "is outside"),
    (ask({"type": "image_url", "image_url": {"url": "data:image/png,x"}}), "not data:TYPE;"),
    (ask({"type": "image", "image": "data:image/png;base64,?"}), "image data is not valid"),
    (ask({"type": "image", "image": "data:video/mp4;base64,AA"}), "data of another type"),
    (ask({"type": "image", "source": {"type": "file", "file_id": "f1"}}), "file_id 'f1'"),
    (ask({"type": "image", "image": ["1.jpg", "2.jpg"]}), "a list of 2 files, not one file"),
    (
        ask({"type": "image", "image": FIRST, "url": SECOND}),
        "image part of a user message specifies its file as image and url; keep one",
    ),
    (ask({"type": "image", "image": 3}), "image is int, not bytes or a path"),
    (ask({"type": "image", "image": FIRST, "fps": 9}), "image part of a user message has"),
    (ask({"type": "audio", "audio": {"path": None, "data": 3}}), "audio data is int, not base64"),
    (ask({"type": "document", "title": "x"}), "use one of text, image, video, audio"),
    (ask({"image": FIRST, "video": "a.mp4"}), "use one of text, image, video, audio"),
    (ask({"type": "text", "text": None}), "use one of text, image, video, audio"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "reason"), REJECTED)
def test_rejected_record_reports_reason(read, columns, reason, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    with pytest.raises(CorruptSampleError, match=reason):
        read(copy.deepcopy(columns))


def test_similar_valid_records_are_read(read):
    """Check that only the reported problem makes the rejected records above invalid."""
    assert len(REJECTED) >= 40
    for columns in (
        chat(Q, A, image=FIRST),
        chat(say("human", "What?"), A),
        messages(message("user", "<image> <image>"), message("assistant", "a"),
                 images=[FIRST, SECOND]),
        {"query": "<image>?", "response": "a", "image": FIRST, "history": [["c", "d"]]},
        ask({"type": "image"}, images=[FIRST]),
        ask({"type": "image", "image": FIRST}),
        {**ASK, "answer": 1}, {**ASK, "answer": "(B)"}, {**ASK, "answer": "blue"},
        {**ASK, "answer": "0"}, {"question": "a", "answer": "b"},
        {**SKY, "label": 1}, SKY,
        {"text": "a dog", "objects": DOG}, {"text": "<bbox> is a tag"},
        messages(message("user", "<bbox>, <ref-object>"), message("assistant", "<image>")),
        messages(*TURNS, documents=[], system_prompt="", loss_scale=1.0, bbox=[1, 2, 3, 4]),
        messages(message("system", "c"), *TURNS, system_prompt="c"),
        messages(*TURNS, system="c", system_prompt="c", continue_final_message=False),
        {"text": "a", "image_512": FIRST, "image_1": "", "video_1": 0.5},
        {"prompt": [], "completion": [message("assistant", "b")]},
    ):  # fmt: skip
        assert any(read(columns).text.loss)


def test_inline_files_have_size_limit(monkeypatch):
    monkeypatch.setattr(columns_module, "MAX_INLINE_BYTES", 10)
    record = ask({"type": "image", "image": "data:image/png;base64," + "A" * 16})
    with pytest.raises(
        CorruptSampleError, match="image of 12 bytes inside the record, but the limit is 10"
    ):
        detect_format(Record(record)).read(Record(record))


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
        chat(say("function_call", "[" * 100_000)),
        {**ASK, "answer": nested(100_000)},
        {"query": "a", "response": "b", "history": nested(100_000)},
        {"texts": [{"user": nested(100_000), "assistant": "b"}]},
    ],
)
def test_deeply_nested_values_cost_one_sample(columns, read):
    with pytest.raises(CorruptSampleError):
        read(columns)


def test_million_placeholders_are_counted(read):
    with pytest.raises(CorruptSampleError, match="1000000 <image> placeholders but 1 image files"):
        read(chat(say("human", "<image>" * 1_000_000), A, image=FIRST))
