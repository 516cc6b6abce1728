"""Preference pairs have the tokens, labels and files of their two answers as separate samples."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from data_cases import CLIP, QWEN, png, write_parquet
from layout_cases import FILES, FIRST, SECOND, say
from layout_cases import turn as message

from torchmm.common.batch import IGNORE_TARGET
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError
from torchmm.data.items import Item
from torchmm.data.microbatch_builder import MicrobatchBuilder, mask_corrupt_samples
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.index.index_builder import IndexBuilder
from torchmm.data.sources.map_sources import open_map_source
from torchmm.data.sources.reader import SampleReader
from torchmm.recipe.data_section import DataConfig, SourceConfig

QUESTION, GOOD, BAD = "What is it?", "A red bus.", "Two dogs."
SEES = [{"type": "image"}, {"type": "text", "text": QUESTION}]


def says(text):
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


CASES = {
    # trl-lib/rlaif-v
    "trl_parts": {
        "images": [FIRST],
        "prompt": [{"role": "user", "content": SEES}],
        "chosen": says(GOOD),
        "rejected": says(BAD),
    },
    "trl_implicit_prompt": {
        "images": [FIRST],
        "chosen": [{"role": "user", "content": SEES}, *says(GOOD)],
        "rejected": [{"role": "user", "content": SEES}, *says(BAD)],
    },
    # openbmb/RLAIF-V-Dataset
    "rlaif_v": {
        "image": FIRST,
        "question": QUESTION,
        "chosen": GOOD,
        "rejected": BAD,
        "ds_name": "RLAIF-V",
        "idx": 0,
    },
    # openbmb/RLHF-V-Dataset
    "rlhf_v": {
        "image": FIRST,
        "text": json.dumps({"question": QUESTION, "chosen": GOOD, "rejected": BAD}),
        "ds_name": "RLHF-V",
    },
    "llama_factory_sharegpt": {
        "images": [FIRST],
        "conversations": [say("human", f"<image>{QUESTION}")],
        "chosen": say("gpt", GOOD),
        "rejected": say("gpt", BAD),
    },
    "llama_factory_openai": {
        "images": [FIRST],
        "messages": [message("user", f"<image>{QUESTION}")],
        "chosen": message("assistant", GOOD),
        "rejected": message("assistant", BAD),
    },
    "llama_factory_alpaca": {
        "images": [FIRST],
        "instruction": f"<image>{QUESTION}",
        "chosen": GOOD,
        "rejected": BAD,
    },
    "ms_swift": {
        "images": [FIRST],
        "messages": [message("user", f"<image>{QUESTION}"), message("assistant", GOOD)],
        "rejected_response": BAD,
    },
}
"""Records of the same pair in published formats."""


@pytest.fixture
def pair_reader(tokenizer, text_spec):
    def make(length=2048, encoder=CLIP):
        return SampleReader(
            DataConfig(), length, text_spec, {"vision": encoder}, tokenizer, reads_pairs=True
        )

    return make


def answer_record(answer):
    chat = [{"role": "user", "content": SEES}, *says(answer)]
    return {"images": [FIRST], "messages": chat}


@pytest.mark.parametrize("name", CASES)
def test_published_pair_is_both_samples(pair_reader, read, root, name):
    pair = pair_reader().read(Record(copy.deepcopy(CASES[name]), root))
    chosen, rejected = read(answer_record(GOOD)), read(answer_record(BAD))
    assert pair.chosen_tokens == len(chosen.text.ids)
    assert pair.text.ids == chosen.text.ids + rejected.text.ids
    assert pair.text.loss == chosen.text.loss + rejected.text.loss
    assert pair.images == chosen.images + rejected.images
    assert pair.files == [FILES[FIRST]] * 2


def test_text_pair_is_split_at_common_prompt(pair_reader, reader):
    pair = pair_reader().read(Record({"chosen": "The sky is blue.", "rejected": "The sky is up."}))
    expected = [
        reader.read(Record({"prompt": "The sky is", "completion": answer})).text
        for answer in (" blue.", " up.")
    ]
    assert pair.text.ids == expected[0].ids + expected[1].ids
    assert pair.text.loss == expected[0].loss + expected[1].loss


def test_only_last_answer_of_chat_is_compared(pair_reader, tokenizer):
    turns = [say("human", "a"), say("gpt", "b"), say("human", "c")]
    record = {"conversations": turns, "chosen": say("gpt", "red"), "rejected": say("gpt", "dog")}
    text = pair_reader().read(Record(record)).text
    learned = [i for i, loss in zip(text.ids, text.loss, strict=True) if loss]
    assert tokenizer.decode(learned) == "red</s>dog</s>"


REJECTED = [
    ({"prompt": "a", "chosen": "b"}, "no rejected answer"),
    ({"question": "a", "rejected": "b"}, "no chosen answer"),
    ({"messages": [message("user", "a"), message("assistant", "b")]}, "no chosen answer"),
    ({"chosen": "a", "rejected": "b"}, "no common start"),
    (
        {"chosen": "a", "rejected": [message("assistant", "b")]},
        "chosen is str and rejected is list",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "label": True}, "column label"),
    (
        {**CASES["ms_swift"], "rejected_images": [SECOND]},
        "column rejected_images is not supported",
    ),
    (
        {"messages": [message("user", "a")], "rejected_response": "c"},
        "last of the messages is not an assistant",
    ),
]


@pytest.mark.parametrize(("columns", "error"), REJECTED)
def test_incomplete_pairs_are_rejected(pair_reader, root, columns, error):
    with pytest.raises(CorruptSampleError, match=error):
        pair_reader().read(Record(copy.deepcopy(columns), root))


def test_truncated_pair_is_filtered(pair_reader):
    record = Record({"prompt": "red", "chosen": " red dog", "rejected": " two red dogs"})
    tokens = len(pair_reader().read(record).text.ids)
    assert pair_reader(tokens).read(record).chosen_tokens > 0
    with pytest.raises(BeyondLimitError, match=f"sequence_length = {tokens - 1}"):
        pair_reader(tokens - 1).read(record)


def test_index_keeps_size_of_chosen_answer(pair_reader, tmp_path):
    rows = [
        {"image": png(16 * n, 32), "question": "red", "chosen": "dog " * n, "rejected": "red"}
        for n in (1, 2, 3)
    ]
    write_parquet(tmp_path / "set", rows)
    source = open_map_source(SourceConfig(path=str(tmp_path / "set")))
    reader = pair_reader()
    index = IndexBuilder("set", source, reader, tmp_path / "index", 0).load()
    for number in range(3):
        sample = reader.read(source.read(number))
        meta = index.meta("set", number, reader.encoders)
        assert meta == reader.meta("set", number, sample)
        assert meta.segment_lengths == (
            sample.chosen_tokens,
            len(sample.text.ids) - sample.chosen_tokens,
        )
        again = reader.read(source.read(number), meta)
        assert (again.text, again.images) == (sample.text, sample.images)


@pytest.mark.parametrize("encoder", [CLIP, QWEN])
def test_answers_are_separate_segments(pair_reader, tokenizer, text_spec, root, encoder):
    """Positions and segments of a packed pair are those of two samples."""
    spec = (
        text_spec
        if encoder is CLIP
        else text_spec.__class__(**{**vars(text_spec), "positions": "mrope"})
    )
    pairs, single = (
        SampleReader(
            DataConfig(), 512, spec, {"vision": encoder}, tokenizer, reads_pairs=reads_pairs
        )
        for reads_pairs in (True, False)
    )
    packed = packed_samples(pairs, [Record(CASES["rlaif_v"], root)] * 2, padding=3)
    answers = [Record(answer_record(text), root) for text in (GOOD, BAD)] * 2
    expected = packed_samples(single, answers, padding=3)
    assert packed.cu_seqlens == expected.cu_seqlens
    for name in ("input_ids_T", "targets_T", "position_ids"):
        torch.testing.assert_close(getattr(packed, name), getattr(expected, name))
    lengths = np.diff(packed.cu_seqlens)
    assert packed.answers_T.tolist() == np.repeat([0, 1, 2, 3, -1], lengths).tolist()
    assert (packed.loss_count, expected.loss_count) == (2, expected.target_count)
    for ours, theirs in zip(
        vars(packed.encoders["vision"]).values(),
        vars(expected.encoders["vision"]).values(),
        strict=True,
    ):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def packed_samples(reader, records, padding):
    """Return the microbatch of records, decoded as in `StepDecoder`."""
    builder = MicrobatchBuilder(reader)
    items = []
    for number, record in enumerate(records):
        sample = decoded(reader, record)
        meta = reader.meta("set", number, reader.read(record))
        items.append(Item(0, 0, meta))
        builder.append(sample, meta)
    builder.append_padding(padding)
    return builder.microbatch([items], sum(item.meta.tokens for item in items) + padding)


def decoded(reader, record):
    from torchmm.data.microbatch_builder import DecodedSample  # noqa: PLC0415

    sample = reader.read(record)
    return DecodedSample(
        np.asarray(sample.text.ids, np.int64),
        sample.text.targets_L,
        sample.text.image_starts,
        [reader.pixels(f, i) for f, i in zip(sample.files, sample.images, strict=True)],
        [None] * len(sample.images),
        [np.arange(image.tokens) for image in sample.images],
    )


def test_masked_pair_keeps_its_segments_without_loss(pair_reader, root):
    reader = pair_reader()
    records = [Record(CASES["rlaif_v"], root)] * 2
    packed = packed_samples(reader, records, padding=0)
    metas = [Item(0, 0, meta) for meta in packed.meta.samples]
    before = packed.position_ids.clone()
    masked = mask_corrupt_samples(reader, packed, [metas], packed.meta.tokens, {"set[1]"})
    start = packed.meta.samples[0].tokens
    assert (masked.targets_T[start:] == IGNORE_TARGET).all()
    assert torch.equal(masked.position_ids, before)
    assert masked.loss_count == 1
