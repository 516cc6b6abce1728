"""Measure samples per second of published record formats, compared with the native format.

All formats have the same content as the native one (`messages` with content parts, files in
`images`): an image, a question and its answer, or two of these. A sample is parsed, image headers
are read, the chat template is applied and text is tokenized. Pixels are not decoded, because this
costs the same in all formats. Both formats are read in interleaved pairs and compared by CPU time.
Tokens, labels and files have to be identical.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from PIL import Image
from support.harness import Row, describe_machine, make_parser, report, time_pairs
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchmm.common.batch import ImageSpec, TextSpec
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.reader import SampleReader
from torchmm.recipe.data_section import DataConfig

SEED = 0
GOAL = 0.9
"""A layout is read at 90 % of our own layout's speed at least."""
SENTENCE = "a red green blue small large round square picture of one two three dogs in the sun"
WORDS = SENTENCE.split()
CHOOSE = "Answer with the option's letter from the given choices directly."
SPEC = ImageSpec(
    encoder="vision",
    inputs="fixed",
    processor_class="CLIPImageProcessor",
    processor={"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}},
    patch_size_px=14,
)

Message = dict[str, Any]


class Content(NamedTuple):
    """Content that every record format represents."""

    image: bytes
    question: str
    answer: str
    second_question: str
    second_answer: str


def make_contents(count: int) -> list[Content]:
    """Return contents with images of one size and random words."""
    draw = random.Random(SEED)
    contents = []
    for number in range(count):
        stream = io.BytesIO()
        Image.new("RGB", (320, 240), (number % 256, 100, 50)).save(stream, "JPEG")
        texts = [" ".join(draw.choices(WORDS, k=size)) for size in (20, 60, 20, 60)]
        contents.append(Content(stream.getvalue(), *texts))
    return contents


def make_reader() -> SampleReader:
    """Return a reader whose tokens are words, so that tokenization costs as little as possible."""
    special = ["<unk>", "<pad>", "<image>", "<|user|>", "<|assistant|>", "</s>"]
    vocabulary = {word: i for i, word in enumerate([*special, *sorted(set(WORDS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="</s>",
        additional_special_tokens=special[2:],
        chat_template="{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}",
    )
    text_spec = TextSpec(vocab_size=len(tokenizer), image_token_id=2)
    return SampleReader(DataConfig(), 2048, text_spec, {"vision": SPEC}, tokenizer)


def turn(role: str, content: Any) -> Message:
    """Return a message of the torchmm format."""
    return {"role": role, "content": content}


def asked(text: str, **file: Any) -> Message:
    """Return a question after an image."""
    return turn("user", [{"type": "image", **file}, {"type": "text", "text": text}])


def own(content: Content, turns: int = 2, question: str | None = None) -> dict[str, Any]:
    """Return a record of the torchmm format."""
    messages = [asked(question or content.question), turn("assistant", content.answer)]
    if turns == 2:
        messages.append(turn("user", content.second_question))
        messages.append(turn("assistant", content.second_answer))
    return {"images": [content.image], "messages": messages}


def llava(content: Content) -> dict[str, Any]:
    """Return a LLaVA record with `conversations`."""
    said = zip(("human", "gpt") * 2, content[1:], strict=True)
    entries = [{"from": speaker, "value": text} for speaker, text in said]
    entries[0]["value"] = "<image>" + content.question
    return {"id": "1", "image": content.image, "conversations": entries}


def placeholders(content: Content) -> dict[str, Any]:
    """Return a record with `messages` as in ms-swift and LLaMA-Factory."""
    said = zip(("user", "assistant") * 2, content[1:], strict=True)
    messages = [turn(role, text) for role, text in said]
    messages[0]["content"] = "<image>" + content.question
    return {"images": [content.image], "messages": messages}


def named_parts(content: Content) -> dict[str, Any]:
    """Return a Hugging Face record with `messages` whose content parts have a file."""
    messages = own(content)["messages"]
    return {"messages": [asked(content.question, image=content.image), *messages[1:]]}


def openai(content: Content) -> dict[str, Any]:
    """Return an OpenAI record with `messages` and base64 images."""
    address = "data:image/jpeg;base64," + base64.b64encode(content.image).decode()
    part = {"type": "image_url", "image_url": {"url": address}}
    first = turn("user", [part, {"type": "text", "text": content.question}])
    return {"messages": [first, *own(content)["messages"][1:]]}


def finevision(content: Content) -> dict[str, Any]:
    """Return a FineVision record with `texts` of questions and answers, and ratings."""
    texts = [
        {"user": content.question, "assistant": content.answer},
        {"user": content.second_question, "assistant": content.second_answer},
    ]
    ratings = {"relevance_ratings": [5, 5], "formatting_ratings": [5, 4], "source": "ai2d"}
    return {"images": [{"bytes": content.image, "path": None}], "texts": texts, **ratings}


def trl(content: Content) -> dict[str, Any]:
    """Return a TRL record with messages in `prompt` and `completion`."""
    return {
        "images": [content.image],
        "prompt": [turn("user", content.question)],
        "completion": [turn("assistant", content.answer)],
    }


def alpaca(content: Content) -> dict[str, Any]:
    """Return an Alpaca record with `instruction` and `output`."""
    first, _, rest = content.question.partition(" ")
    return {
        "instruction": "<image>" + first,
        "input": rest,
        "output": content.answer,
        "images": [content.image],
    }


def alpaca_own(content: Content) -> dict[str, Any]:
    """Return the torchmm record of `alpaca`, which has a newline before its input."""
    return own(content, 1, content.question.replace(" ", "\n", 1))


def query(content: Content) -> dict[str, Any]:
    """Return a record with `query`, `response` and a history."""
    return {
        "history": [["<image>" + content.question, content.answer]],
        "query": content.second_question,
        "response": content.second_answer,
        "images": [content.image],
    }


def vqa(content: Content) -> dict[str, Any]:
    """Return a VQA record with `question` and ten answers."""
    answers = [{"answer": content.answer, "answer_id": number} for number in range(10)]
    return {"image": content.image, "question": content.question, "answers": answers}


def choice(content: Content) -> dict[str, Any]:
    """Return a multiple-choice record with `question` and `choices`."""
    choices = [content.second_answer, content.answer]
    return {
        "image": content.image,
        "question": content.question,
        "choices": choices,
        "answer": 1,
    }


def choice_own(content: Content) -> dict[str, Any]:
    """Return the torchmm record of `choice`, whose question contains the choices."""
    listed = f"A. {content.second_answer}\nB. {content.answer}"
    return own(content._replace(answer="B"), 1, f"{content.question}\n{listed}\n{CHOOSE}")


def own_once(content: Content) -> dict[str, Any]:
    """Return a torchmm record with a single question."""
    return own(content, 1)


Writer = Callable[[Content], dict[str, Any]]
CASES: dict[str, tuple[Writer, Writer]] = {
    "conversations (LLaVA)": (llava, own),
    "messages with placeholders (ms-swift)": (placeholders, own),
    "messages with named files (Hugging Face)": (named_parts, own),
    "messages with base64 (OpenAI)": (openai, own),
    "pairs (FineVision)": (finevision, own),
    "prompt and completion (TRL)": (trl, own_once),
    "instruction (Alpaca)": (alpaca, alpaca_own),
    "query (ms-swift)": (query, own),
    "question (VQA)": (vqa, own_once),
    "question with choices (ScienceQA)": (choice, choice_own),
}
"""Writers of a layout, and of the same content in our own."""


def case_rows(name: str, reader: SampleReader, count: int, pairs: int) -> list[Row]:
    """Return the speed of one record format.

    Args:
        count: Number of records per measurement.
        pairs: Number of measurements of both formats.
    """
    contents = make_contents(count)
    published, ours = ([Record(write(content)) for content in contents] for write in CASES[name])
    for one, other in zip(published, ours, strict=True):
        found, expected = reader.read(one), reader.read(other)
        if (found.text, found.files) != (expected.text, expected.files):
            raise AssertionError(f"{name}: the sample differs from the native format")

    def read_all(records: list[Record]) -> None:
        for record in records:
            reader.read(record)

    times = time_pairs(
        lambda: read_all(published), lambda: read_all(ours), pairs, torch.device("cpu")
    )
    found_per_s, own_per_s = count / times.median_ours_s, count / times.median_baseline_s
    return [
        Row(name, "samples per second", "1/s", found_per_s, own_per_s),
        Row(name, "speed / native format", "", times.cpu_ratio, 1, None, GOAL),
    ]


def main() -> None:
    """Print the table."""
    arguments = make_parser((__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    print(describe_machine(torch.device("cpu")))
    print(f"seed {SEED}")
    reader = make_reader()
    rows: list[Row] = []
    for name in CASES:
        rows += case_rows(name, reader, *((50, 5) if arguments.quick else (200, 21)))
    report("Record formats, baseline: the native format", rows, arguments.json)


if __name__ == "__main__":
    main()
