"""Resume with changed data: rejected with the change, unless the recipe accepts it."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from itertools import islice

import pytest
from data_cases import CLIP, caption, data_config, png, training, write_jsonl

from torchmm.common.errors import CheckpointError
from torchmm.data.build import build_loader
from torchmm.recipe.data_section import SourceConfig

ROWS = 23


@pytest.fixture
def site(tmp_path, tokenizer, text_spec):
    """Return a site with two sources in `tmp_path`/data and a function that builds loaders."""
    return Site(tmp_path, tokenizer, text_spec)


class Site:
    def __init__(self, tmp_path, tokenizer, text_spec):
        self.root, self.place = tmp_path, tmp_path / "data"
        self.common = {"tokenizer": tokenizer, "text_spec": text_spec}
        self.spec = CLIP
        self.rows = [{"image": f"{i}.png", "text": caption(i)} for i in range(ROWS)]
        self.texts = [{"text": caption(i + 2)} for i in range(11)]
        self.write()

    def write(self):
        write_jsonl(self.place / "shown" / "rows.jsonl", self.rows)
        write_jsonl(self.place / "captions" / "rows.jsonl", self.texts)
        for i in range(ROWS):
            (self.place / "shown" / f"{i}.png").write_bytes(png(16 + i % 3 * 8, 24, i))

    def loader(self, state=None, *, accept=False, streaming=False, first=(), sizes=(), **data):
        path = self.place
        options = {"weight": 2.0, **dict(first)}
        sources = [
            SourceConfig(path=str(path / "shown"), name="shown", streaming=streaming, **options),
            SourceConfig(path=str(path / "captions"), name="captions"),
        ]
        return build_loader(
            data_config(self.root, *sources, **{"shuffle_window": 7, **data}),
            training(**dict(sizes)),
            image_specs={"vision": self.spec},
            data_parallel_rank=0,
            data_parallel_size=1,
            state=json.loads(json.dumps(state)) if state else None,
            resume_changed=accept,
            **self.common,
        )


def take(loader, count):
    return list(islice(loader, count))


def names(batches):
    return [(s.source, s.index) for b in batches for m in b.microbatches for s in m.meta.samples]


def rewrite(site):
    site.rows[3]["text"] = " ".join(reversed(site.rows[3]["text"].split()))
    site.write()


def reverse(site):
    site.rows.reverse()
    site.write()


def lengthen(site):
    for row in site.rows:
        row["text"] += " " + caption(5)
    site.write()


def repaint(site):
    (site.place / "shown" / "4.png").write_bytes(png(16 + 4 % 3 * 8, 24, 99))
    (
        site.place / "shown" / "rows.jsonl"
    ).touch()  # the loader compares only the timestamp of this file


def change_normalization(site):
    site.spec = replace(CLIP, processor={**CLIP.processor, "image_mean": [0.1, 0.2, 0.3]})


CHANGES = {
    "texts": (rewrite, {}, r"samples of source 'shown'"),
    "order of lines": (reverse, {}, r"samples of source 'shown'"),
    "longer samples": (lengthen, {}, r"samples of source 'shown'"),
    "an image": (repaint, {}, r"samples of source 'shown'"),
    "image processing": (change_normalization, {}, "image processing of vision"),
    "prompt": (None, {"first": {"prompt": "a small picture of"}}, "prompt of source 'shown'"),
    "weight": (None, {"first": {"weight": 3.0}}, r"weight of source 'shown' 2.0 -> 3.0"),
    "shuffle": (None, {"shuffle": False}, r"data.shuffle true -> false"),
    "delay": (None, {"packing_max_wait_steps": 2}, r"data.packing_max_wait_steps 32 -> 2"),
    "open packs": (None, {"packing_buffer_size": 2}, r"data.packing_buffer_size 3 -> 2"),
    "seed": (None, {"sizes": {"seed": 4}}, r"training.seed 3 -> 4"),
    "length": (None, {"sizes": {"sequence_length": 72}}, r"training.sequence_length 64 -> 72"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_data_is_rejected_unless_accepted(site, name, caplog):
    state = take(site.loader(), 2)[-1].state
    change, options, reason = CHANGES[name]
    if change:
        change(site)
    with pytest.raises(CheckpointError, match=f"(?s)different data.*{reason}.*allow_data_change"):
        site.loader(state, **options)
    with caplog.at_level(logging.WARNING, "torchmm"):
        batches = take(site.loader(state, accept=True, **options), 12)
    assert "allow_data_change" in caplog.text
    observed = names(batches)
    assert {n for n, _ in observed} == {"shown", "captions"}
    again = take(site.loader(batches[4].state, **options), 3)
    assert names(again) == names(batches[5:8])


@pytest.mark.parametrize("streaming", [False, True])
def test_changed_chat_loss_mask_is_rejected(site, streaming):
    turns = [{"role": role, "content": caption(5)} for role in ("user", "assistant")]
    site.rows = [{"messages": turns * 2} for _ in range(ROWS)]
    site.write()
    state = take(site.loader(streaming=streaming), 2)[-1].state
    change = {"train_on": "last"}
    with pytest.raises(
        CheckpointError, match=r'train_on of source .shown. "?assistant"? -> "?last'
    ):
        site.loader(state, streaming=streaming, first=change)


@pytest.mark.parametrize("change", [{"shuffle_window": 5}, {"first": {"prompt": "an image"}}])
def test_changed_stream_restarts(site, change, caplog):
    state = take(site.loader(streaming=True), 2)[-1].state
    with pytest.raises(CheckpointError, match="different data"):
        site.loader(state, streaming=True, **change)
    with caplog.at_level(logging.WARNING, "torchmm"):
        batches = take(site.loader(state, accept=True, streaming=True, **change), 4)
    assert "source 'shown' from the start" in caplog.text
    shown = [i for n, i in names(batches) if n == "shown"]
    window = change.get("shuffle_window", 7)
    assert min(shown) < window, "the beginning of the stream"


def test_unchanged_stream_continues_after_other_changes(site, caplog):
    state = take(site.loader(streaming=True), 2)[-1].state
    with caplog.at_level(logging.WARNING, "torchmm"):
        take(site.loader(state, accept=True, streaming=True, packing_buffer_size=2), 1)
    draws = state["feeds"]["shown"]["draws"]
    assert f"source 'shown' after {draws} samples" in caplog.text and draws > 0


def test_changed_stream_files_are_rejected(site):
    state = take(site.loader(streaming=True), 2)[-1].state
    site.rows[3]["text"] = site.rows[3]["text"][::-1]
    site.write()
    with pytest.raises(CheckpointError, match="samples of source 'shown'"):
        site.loader(state, streaming=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_unrelated_options_do_not_prevent_resume(site, streaming):
    reference = take(site.loader(streaming=streaming), 6)
    moved = site.root / "moved"
    shutil.copytree(site.place, moved)
    site.place = moved
    options = {"prefetch": 3, "max_corrupt_samples": 7, "sizes": {"steps": 77}}
    resumed = take(site.loader(reference[1].state, streaming=streaming, **options), 4)
    assert names(resumed) == names(reference[2:])


def test_changed_weight_applies_to_later_samples(site):
    state = take(site.loader(), 6)[-1].state
    batches = take(site.loader(state, accept=True, first={"weight": 0.25}), 6)
    shown = [n for n, _ in names(batches)].count("shown")
    assert 0 < shown < 0.4 * len(names(batches))
    first_sources = [n for n, _ in names(batches[:1])]
    assert "shown" in first_sources, "earlier samples must not affect the new weights"


def test_sequences_without_free_tokens_resume(site):
    site.rows = site.texts = [{"text": caption(4)} for _ in range(40)]
    site.write()
    length = take(site.loader(), 1)[0].microbatches[0].meta.samples[0].tokens
    options = {"packing": "balanced", "sizes": {"sequence_length": 3 * length}}
    batches = take(site.loader(**options), 5)
    assert {len(sequence) for sequence in batches[1].state["closed"]} == {3}
    assert names(take(site.loader(batches[1].state, **options), 3)) == names(batches[2:])


def test_state_without_content_resumes(site, caplog):
    batches = take(site.loader(), 5)
    old = {key: value for key, value in batches[1].state.items() if key != "content"}
    with caplog.at_level(logging.WARNING, "torchmm"):
        assert names(take(site.loader(old), 3)) == names(batches[2:])
    assert "could be compared" in caplog.text
    with pytest.raises(CheckpointError, match=r"training.seed 3 -> 4"):
        site.loader(old, sizes={"seed": 4})
    lengthen(site)
    with pytest.raises(CheckpointError, match="different data"):
        take(site.loader(old), 1)


def test_state_of_older_sample_order_is_rejected(site, caplog):
    state = take(site.loader(), 2)[-1].state
    old = {key: value for key, value in state.items() if key != "opened"} | {"version": 1}
    with pytest.raises(CheckpointError, match=r"the sample order.*allow_data_change"):
        site.loader(old)
    with caplog.at_level(logging.WARNING, "torchmm"):
        batches = take(site.loader(old, accept=True), 3)
    assert "continuing" in caplog.text and {n for n, _ in names(batches)} == {"shown", "captions"}
    with pytest.raises(CheckpointError, match="has version 3"):
        site.loader(state | {"version": 3})
