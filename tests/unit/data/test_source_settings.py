"""Column names, sample counts and length limits from a recipe."""

from __future__ import annotations

import json
import logging
import re
from itertools import islice

import datasets
import pytest
from data_cases import (
    CLIP,
    caption,
    caption_rows,
    data_config,
    training,
    write_jsonl,
    write_parquet,
)

from torchmm.common.errors import CheckpointError, ConfigError, DataError
from torchmm.data.build import build_loader
from torchmm.data.sources.map_sources import load_with_datasets, open_map_source
from torchmm.data.sources.reader import TRUNCATED_SAMPLES
from torchmm.recipe.data_section import LengthFilter, SourceConfig

TEXTS = [" ".join(caption(i + j) for j in range(1 + i % 4)) for i in range(24)]


@pytest.fixture
def make(tmp_path, tokenizer, text_spec):
    """Return a function that builds a loader of one source."""

    def make(path, state=None, accept=False, data=None, **source):
        config = SourceConfig(path=str(path), **{"name": "s", **source})
        return build_loader(
            data_config(tmp_path, config, **(data or {})),
            training(),
            text_spec=text_spec,
            image_specs={"vision": CLIP},
            tokenizer=tokenizer,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=json.loads(json.dumps(state)),
            resume_changed=accept,
        )

    return make


@pytest.fixture
def texts(tmp_path):
    return write_jsonl(tmp_path / "texts" / "a.jsonl", [{"text": text} for text in TEXTS])


def metas(batches):
    return [s for b in batches for m in b.microbatches for s in m.meta.samples]


def take(loader, count):
    return list(islice(loader, count))


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_are_renamed_before_format_detection(make, tmp_path, streaming):
    rows = [{"pic": row["image"], "alt": row["text"], "text": "no"} for row in caption_rows(9)]
    names = {"image": "pic", "text": "alt"}
    renamed = make(write_parquet(tmp_path / "a", rows), columns=names, streaming=streaming)
    plain = make(write_parquet(tmp_path / "b", caption_rows(9)), streaming=streaming)
    assert metas(take(renamed, 4)) == metas(take(plain, 4))


def test_columns_inside_json_are_renamed(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"json": {"alt": "a", "n": 1}}, {"json": {"n": 2}}])
    config = SourceConfig(path=str(path), columns={"text": "alt"})
    source = open_map_source(config)
    first, second = (source.read(i).columns for i in range(2))
    assert first["text"] == "a" and first["n"] == 1 and "text" not in second


@pytest.mark.parametrize("streaming", [False, True])
def test_missing_columns_are_rejected(make, texts, streaming):
    with pytest.raises(
        DataError, match=r"maps 'txet', .*did you mean \"text\"\?; existing columns are text"
    ):
        make(texts, columns={"text": "txet"}, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_max_samples_limits_source(make, texts, streaming):
    loader = make(texts, max_samples=5, streaming=streaming, data={"shuffle_window": 2})
    batches = take(loader, 6)
    assert {s.index for s in metas(batches)} == set(range(5))
    assert batches[-1].epoch > 1
    again = make(
        texts, batches[2].state, max_samples=5, streaming=streaming, data={"shuffle_window": 2}
    )
    assert metas(take(again, 3)) == metas(batches[3:])


@pytest.mark.parametrize("streaming", [False, True])
def test_filtered_samples_are_skipped_and_logged(make, texts, streaming, caplog):
    lengths = {s.index: s.tokens for s in metas(take(make(texts), 20))}
    limits = LengthFilter(min_tokens=12, max_tokens=30)
    used = {index for index, tokens in lengths.items() if 12 <= tokens <= 30}
    assert 3 < len(used) < len(lengths) == len(TEXTS)
    caplog.set_level(logging.INFO, "torchmm")
    batches = take(make(texts, filter=limits, streaming=streaming), 8)
    assert {s.index for s in metas(batches)} == used
    assert not any(b.skipped for b in batches)
    message = (
        f"'s': {len(used)} of 24 samples are used: 0 are corrupt, {24 - len(used)} are removed"
    )
    assert streaming or message in caplog.text
    again = make(texts, batches[3].state, filter=limits, streaming=streaming)
    assert metas(take(again, 4)) == metas(batches[4:])
    with pytest.raises(CheckpointError, match=r"filter of source 's'"):
        make(texts, batches[3].state, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_samples_beyond_limits_are_counted(make, tmp_path, streaming, caplog):
    prompt = " ".join(TEXTS)  # longer than a sequence: truncation removes the answer
    rows = [{"text": "a red dog"}] * 6 + [{"text": prompt}] * 2
    rows += [{"prompt": prompt, "completion": "red"}] * 3
    path = write_jsonl(tmp_path / "long.jsonl", rows)
    caplog.set_level(logging.INFO, "torchmm")
    loader = make(path, streaming=streaming, data={"max_corrupt_samples": 0})
    batches = take(loader, 6)
    assert {s.index for s in metas(batches)} <= set(range(8))
    assert not any(b.skipped for b in batches)
    limit = "no text in the loss within training.sequence_length"
    if not streaming:
        assert "8 of 11 samples are used: 0 are corrupt, 0 are removed" in caplog.text
        assert f"3 (27.3%): {limit}" in caplog.text
        assert f"2 {TRUNCATED_SAMPLES} (25.0%)" in caplog.text
        assert batches[-1].stream_total("filtered") is None
        return
    assert f"samples so far: filtered: {limit}" in caplog.text
    assert f"truncated samples: {TRUNCATED_SAMPLES}" in caplog.text
    counts = [batch.stream_total("filtered") for batch in batches]
    assert counts[-1] >= 3 and counts == sorted(counts)
    resumed = take(make(path, batches[2].state, streaming=True), 3)
    assert [b.state for b in resumed] == [b.state for b in batches[3:]]
    assert [b.stream_total("dropped") for b in resumed] == [
        b.stream_total("dropped") for b in batches[3:]
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_source_beyond_limits_is_rejected(make, tmp_path, streaming):
    row = {"prompt": " ".join(TEXTS), "completion": "red"}
    path = write_jsonl(tmp_path / "long.jsonl", [row] * 3)
    with pytest.raises(DataError, match=r"3 \(100.0%\): no text in the loss") as raised:
        make(path, streaming=streaming)
    assert "training.sequence_length = 64; raise it" in str(raised.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_filter_that_removes_all_samples_is_rejected(make, texts, streaming):
    with pytest.raises(DataError, match=r"(?s)24 .*0 are corrupt, 24 are removed by its `filter`"):
        make(texts, filter=LengthFilter(min_tokens=64, max_tokens=64), streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_unusable_source_reports_ten_samples(make, tmp_path, streaming):
    rows = [{"labels": i} for i in range(25)]
    path = write_jsonl(tmp_path / "none" / "a.jsonl", rows)
    with pytest.raises(DataError) as caught:
        make(path, streaming=streaming)
    lines = str(caught.value).splitlines()
    assert [line for line in lines if "a.jsonl:10: no record format" in line]
    assert len(lines) == 13 and "and 15 more" in lines[-2] and "`columns`" in lines[-1]


@pytest.mark.parametrize("streaming", [False, True])
def test_first_ten_corrupt_samples_are_logged(make, tmp_path, streaming, caplog):
    rows = [{"labels": i} if i % 2 else {"text": caption(i)} for i in range(30)]
    path = write_jsonl(tmp_path / "half" / "a.jsonl", rows)
    batches = take(make(path, streaming=streaming), 8)
    assert sum(len(b.skipped) for b in batches) == 15
    named = re.findall(r"skipped: s\[(\d+)\]: \S*a\.jsonl:(\d+): no record format", caplog.text)
    assert len(named) == 10 and all(int(line) == int(index) + 1 for index, line in named)
    assert caplog.text.count("source 's' has more corrupt samples") == 1


@pytest.mark.parametrize("change", [{"max_samples": 20}, {"columns": {"text": "caption"}}])
@pytest.mark.parametrize("streaming", [False, True])
def test_resume_rejects_changed_source_options(make, tmp_path, change, streaming):
    rows = [{"text": text, "caption": text[::-1]} for text in TEXTS]
    path = write_jsonl(tmp_path / "two" / "a.jsonl", rows)
    state = take(make(path, streaming=streaming), 1)[0].state
    with pytest.raises(CheckpointError, match=rf"{next(iter(change))} of source 's'"):
        make(path, state, streaming=streaming, **change)


def test_state_without_source_options_resumes(make, texts):
    batches = take(make(texts), 3)
    state = json.loads(json.dumps(batches[1].state))
    for key in ("epochs", "filter", "config", "columns", "max_samples"):
        del state["content"]["sources"][0][key]
    del state["steps"]
    assert metas(take(make(texts, state), 1)) == metas(batches[2:])


def test_dataset_config_requires_hub(make, texts, monkeypatch):
    with pytest.raises(ConfigError, match=r"config = 'en' selects a subset of a Hub data set"):
        make(texts, config="en")
    requests = []

    def load_dataset(*args, **more):
        requests.append(args)
        return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    load_with_datasets(SourceConfig(path="owner/name", config="en"), "hub", [], streaming=False)
    assert requests == [("owner/name", "en")]
