from __future__ import annotations

import json
import multiprocessing.forkserver
import os
import signal
import time
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_cases import (
    CLIP,
    NAFLEX,
    QWEN,
    caption,
    caption_rows,
    data_config,
    png,
    training,
    write_jsonl,
    write_parquet,
)

from torchmm.common.batch import IGNORE_TARGET
from torchmm.common.errors import CheckpointError, ConfigError, DataError
from torchmm.data.build import build_loader
from torchmm.recipe.data_section import SourceConfig


@pytest.fixture
def make(tmp_path, tokenizer, text_spec):
    """Return a function that builds a loader of 23 captions and 11 interleaved documents."""
    write_parquet(tmp_path / "captions", caption_rows(23))
    documents = [
        {
            "images": [None, {"bytes": png(20, 8 + i)}, None, {"bytes": png(9, 30, i)}],
            "texts": [caption(i), None, caption(i + 1), None],
        }
        for i in range(11)
    ]
    write_parquet(tmp_path / "documents", documents)

    def build(
        spec=CLIP,
        rank=0,
        ranks=1,
        state=None,
        streaming=False,
        workers=0,
        sources=None,
        text=text_spec,
        validation=False,
        packing_buffer_size=3,
        packing="best_fit",
        prefetch=2,
        **sizes,
    ):
        configs = sources or [
            SourceConfig(path=str(tmp_path / "captions"), weight=2.0, streaming=streaming),
            SourceConfig(path=str(tmp_path / "documents"), streaming=streaming),
        ]
        data = data_config(
            tmp_path, *configs, workers=workers, packing_buffer_size=packing_buffer_size,
            shuffle_window=7, validation=configs, packing=packing, prefetch=prefetch,
        )  # fmt: skip
        return build_loader(
            data,
            training(**sizes),
            text_spec=text,
            image_specs={"vision": spec} if spec else {},
            tokenizer=tokenizer,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            state=state,
            validation=validation,
        )

    return build


def content(batch):
    """Return all model inputs of a batch as comparable values."""
    return [
        (
            m.input_ids_T.tolist(),
            m.targets_T.tolist(),
            m.position_ids.tolist(),
            m.cu_seqlens,
            {n: (e.pixels.numpy().tobytes(), e.grids_thw, e.positions_K.tolist())
             for n, e in m.encoders.items()},
            m.meta,
        )
        for m in batch.microbatches
    ]  # fmt: skip


def position(batch):
    """Return the state without the stream position of `datasets`, which has several notations."""
    state = json.loads(json.dumps(batch.state))
    for feed in state["feeds"].values():
        if feed.get("oldest"):
            feed["oldest"].pop()
    return state


def sample_names(batches):
    return sorted(
        (s.source, s.index) for b in batches for m in b.microbatches for s in m.meta.samples
    )


def take(loader, count):
    return list(islice(loader, count))


# Content of a microbatch


@pytest.mark.parametrize("spec", [CLIP, NAFLEX, QWEN], ids=lambda s: s.processor_class)
def test_microbatches_are_consistent(make, text_spec, spec):
    for batch in take(make(spec, microbatch_size=2), 5):
        assert len(batch.microbatches) == 2
        for m in batch.microbatches:
            assert m.input_ids_T.shape == m.targets_T.shape == (128,) and m.meta.tokens == 128
            assert m.cu_seqlens[0] == 0 and m.cu_seqlens[-1] == 128 and 64 in m.cu_seqlens
            assert (np.diff(m.cu_seqlens) > 0).all()
            placeholders = (m.input_ids_T == text_spec.image_token_id).nonzero().flatten()
            inputs = m.encoders["vision"]
            assert inputs.positions_K.tolist() == placeholders.tolist()
            assert len(inputs.grids_thw) == m.meta.image_count
            assert [r * c for _, r, c in inputs.grids_thw] == m.meta.patches("vision")
            tokens = [i.tokens for s in m.meta.samples for i in s.images]
            assert sum(tokens) == len(placeholders)
            if spec is not CLIP:
                assert len(inputs.pixels) == sum(m.meta.patches("vision"))
            assert inputs.pixels.dtype == torch.uint8
            assert inputs.values().pixels.dtype == torch.float32


def test_targets_exclude_sample_ends_images_padding(make, text_spec):
    for batch in take(make(microbatch_size=2), 5):
        for m in batch.microbatches:
            for start, end in zip(m.cu_seqlens, m.cu_seqlens[1:], strict=False):
                targets = m.targets_T[start:end].tolist()
                ids = m.input_ids_T[start:end].tolist()
                assert targets[-1] == IGNORE_TARGET
                for i, target in enumerate(targets[:-1]):
                    assert target in (IGNORE_TARGET, ids[i + 1])
                    if ids[i + 1] in (text_spec.image_token_id, text_spec.pad_token_id):
                        assert target == IGNORE_TARGET
                assert m.position_ids[start:end].tolist() == list(range(end - start))


def test_segments_are_samples_and_padding(make):
    for batch in take(make(), 5):
        for m in batch.microbatches:
            lengths = np.diff(m.cu_seqlens).tolist()
            tokens = [s.tokens for s in m.meta.samples]
            assert lengths[: len(tokens)] == tokens and len(lengths) - len(tokens) in (0, 1)


def test_mrope_positions_restart_in_each_segment(make, text_spec):
    spec = text_spec.__class__(**{**vars(text_spec), "positions": "mrope"})
    m = take(make(QWEN, text=spec), 1)[0].microbatches[0]
    assert m.position_ids.shape == (3, 64)
    assert not m.position_ids[:, m.cu_seqlens[:-1]].any()
    assert (m.position_ids[0] != m.position_ids[2]).any()


def test_loader_without_encoders_is_text_only(make, text_spec):
    batch = take(make(None), 1)[0]
    for m in batch.microbatches:
        assert not m.encoders and not (m.input_ids_T == text_spec.image_token_id).any()
        assert m.target_count > 0


# Order


def test_two_epochs_have_each_sample_twice(make, tmp_path):
    source = SourceConfig(path=str(tmp_path / "captions"), name="c")
    loader = make(sources=[source], global_batch_size=1, packing_buffer_size=1)
    sample_indices = [
        s.index for b in take(loader, 30) for m in b.microbatches for s in m.meta.samples
    ]
    assert len(sample_indices) > 46
    counts = np.bincount(sample_indices[:46], minlength=23)
    # A single open pack preserves the order of the stream, so two epochs are the first 46 samples.
    assert (counts == 2).all()


@pytest.mark.parametrize("streaming", [False, True])
def test_step_samples_are_independent_of_ranks(make, streaming):
    reference = take(make(streaming=streaming), 6)
    for ranks, microbatch_size, workers in ((2, 1, 0), (4, 1, 0), (1, 4, 0), (2, 2, 2)):
        loaders = [
            make(
                rank=rank, ranks=ranks, microbatch_size=microbatch_size, workers=workers,
                streaming=streaming,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        shares = [take(loader, 6) for loader in loaders]
        for expected, *parts in zip(reference, *shares, strict=True):
            assert sample_names(parts) == sample_names([expected])
            ids = torch.cat([m.input_ids_T for b in parts for m in b.microbatches])
            assert torch.equal(ids, torch.cat([m.input_ids_T for m in expected.microbatches]))
            assert all(b.state == expected.state for b in parts)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["best_fit", "balanced"])
def test_resume_is_exact_with_any_workers(make, streaming, packing):
    expected = take(make(streaming=streaming, packing=packing), 9)
    for stop in range(9):
        state = json.loads(json.dumps(expected[stop].state))
        resumed = take(make(streaming=streaming, packing=packing, state=state), 8 - stop)
        assert [content(b) for b in resumed] == [content(b) for b in expected[stop + 1 :]]
        assert [position(b) for b in resumed] == [position(b) for b in expected[stop + 1 :]]
    with_workers = take(make(streaming=streaming, packing=packing, workers=2), 4)
    assert [content(b) for b in with_workers] == [content(b) for b in expected[:4]]
    state = json.loads(json.dumps(with_workers[3].state))
    resumed = take(make(streaming=streaming, packing=packing, workers=1, state=state), 3)
    assert [content(b) for b in resumed] == [content(b) for b in expected[4:7]]


@pytest.mark.parametrize("streaming", [False, True])
def test_epoch_counts_trained_samples(make, tmp_path, streaming):
    source = SourceConfig(path=str(tmp_path / "captions"), streaming=streaming)
    state, trained = None, 0
    for stop in (20, 10):  # the second part is resumed
        loader = make(sources=[source], global_batch_size=1, packing_buffer_size=8, state=state)
        for batch in take(loader, stop):
            trained += len(batch.microbatches[0].meta.samples)
            in_first_pass = streaming and batch.epoch == 0.0  # its length is unknown
            assert batch.epoch == trained / 23 or (in_first_pass and trained < 23)
        state = json.loads(json.dumps(batch.state))
    assert batch.epoch >= 2


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 2), (2, 1), (2, 3)])
def test_chain_state_is_state_of_last_batch(make, workers, prefetch):
    expected = take(make(), 6)
    loader = make(workers=workers, prefetch=prefetch)
    for batch, reference in zip(take(loader, 3), expected, strict=False):
        assert content(batch) == content(reference) and batch.state == reference.state
    assert len(take(loader, 2)) == 2  # The chain still has steps of the unfinished pass.
    steps = loader._steps
    steps.reset(steps.state_dict())
    for reference in expected[2:]:
        plan, decoded = next(steps)
        assert [m.meta for m in decoded.microbatches] == [m.meta for m in reference.microbatches]
        assert plan.state == steps.state_dict() == reference.state
        assert repr(plan.state) in repr(steps._chain.state_dict())  # Nested, by node.


def test_loader_resumes_with_different_world_size(make):
    expected = take(make(), 6)
    parts = [take(make(rank=r, ranks=2, state=expected[2].state), 3) for r in range(2)]
    for batch, *shares in zip(expected[3:], *parts, strict=True):
        assert sample_names(shares) == sample_names([batch])


@pytest.mark.parametrize("change", [{"seed": 9}, {"sequence_length": 72}, {"sources": "other"}])
def test_state_of_different_data_is_rejected(make, tmp_path, change):
    state = take(make(), 1)[0].state
    if "sources" in change:
        change = {"sources": [SourceConfig(path=str(tmp_path / "captions"))]}
    with pytest.raises(CheckpointError, match="different data"):
        make(state=state, **change)


def test_loader_preserves_global_rng_state(make):
    before = torch.get_rng_state()
    take(make(workers=2), 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_next_metas_match_next_batches(make, workers):
    loaders = [make(rank=rank, ranks=2, workers=workers) for rank in range(2)]
    for loader in loaders:
        assert len(loader.next_metas()) == 2
    running = [iter(loader) for loader in loaders]
    for _ in range(4):
        metas = [list(loader.next_metas()) for loader in loaders]
        assert metas[0] == metas[1]
        batches = [next(r) for r in running]
        assert metas[0] == [[m.meta for m in b.microbatches] for b in batches]


@pytest.mark.parametrize("streaming", [False, True])
def test_validation_is_one_epoch_and_repeats(make, streaming):
    loader = make(validation=True, streaming=streaming)
    first, second = list(loader), list(loader)
    names = sample_names(first)
    assert names == sample_names(second) and len(set(names)) == len(names) == 34
    assert all(len(b.microbatches) == 4 for b in first)
    assert loader.next_metas() is None


def test_validation_order_is_independent_of_seed(make):
    def order(seed):
        batches = list(make(validation=True, seed=seed, packing_buffer_size=1))
        samples = [s for b in batches for m in b.microbatches for s in m.meta.samples]
        return [s.index for s in samples if s.source == samples[0].source]

    assert order(0) == order(1) != sorted(order(0))


def test_batch_size_must_be_divisible(make):
    with pytest.raises(ConfigError, match="global_batch_size = 4 is not a multiple"):
        make(ranks=3)


def test_missing_sources_are_rejected(make, tmp_path, tokenizer, text_spec):
    with pytest.raises(ConfigError, match=r"data\.sources: no source"):
        build_loader(
            data_config(tmp_path),
            training(),
            text_spec=text_spec,
            image_specs={},
            tokenizer=tokenizer,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
        )


# Corrupt samples


def corrupt_set(tmp_path):
    """Write 26 captions: image 3 is invalid, image 5 has a header and truncated pixels."""
    rows = caption_rows(26)
    rows[3]["image"]["bytes"] = b"<html>"
    rows[5]["image"]["bytes"] = png(40, 24, 5)[:-800]
    write_parquet(tmp_path / "corrupt", rows)
    return [SourceConfig(path=str(tmp_path / "corrupt"), name="corrupt")]


def test_corrupt_samples_are_reported_and_masked(make, tmp_path, text_spec):
    loader = make(sources=corrupt_set(tmp_path))
    batches = take(loader, 8)
    skipped = [message for b in batches for message in b.skipped]
    assert sorted(message[:10] for message in skipped) == ["corrupt[3]", "corrupt[5]"]
    for message, row, reason in zip(skipped, (3, 5), ("not an image", "cannot be"), strict=True):
        assert f"part-0.parquet row {row}: " in message and reason in message
    samples = [s for b in batches for m in b.microbatches for s in m.meta.samples]
    assert 3 not in {s.index for s in samples} and 5 in {s.index for s in samples}
    for batch in batches:
        for m in batch.microbatches:
            for s, start in zip(m.meta.samples, m.cu_seqlens, strict=False):
                targets_L = m.targets_T[start : start + s.tokens]
                assert (targets_L != IGNORE_TARGET).any() == (s.index != 5)


def test_corrupt_samples_do_not_move_others(make, tmp_path):
    sources = corrupt_set(tmp_path)
    damaged = take(make(sources=sources), 8)
    rows = caption_rows(26)
    rows[3]["image"]["bytes"] = b"<html>"
    rows[5]["image"]["bytes"] = png(40, 24, 5)
    write_parquet(tmp_path / "corrupt", rows)
    intact = take(make(sources=sources), 8)
    for a, b in zip(damaged, intact, strict=True):
        assert [m.meta for m in a.microbatches] == [m.meta for m in b.microbatches]
        for x, y in zip(a.microbatches, b.microbatches, strict=True):
            for s, start in zip(x.meta.samples, x.cu_seqlens, strict=False):
                same = torch.equal(
                    x.input_ids_T[start : start + s.tokens], y.input_ids_T[start : start + s.tokens]
                )
                assert same == (s.index != 5)


def test_indexed_corruption_is_reported_by_one_rank(make, tmp_path):
    sources = corrupt_set(tmp_path)
    reports = [take(make(sources=sources, rank=r, ranks=2), 1)[0].skipped for r in (0, 1)]
    assert sum(message.startswith("corrupt[3]") for report in reports for message in report) == 1


def test_stream_skips_corrupt_samples(make, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": caption(i)} for i in range(9)])
    path.write_text(path.read_text() + "broken\n" + '{"label": 3}\n')
    loader = make(sources=[SourceConfig(path=str(path), streaming=True)])
    skipped = [message for b in take(loader, 3) for message in b.skipped]
    assert sorted(m.split(":")[0].rsplit("/")[-1] for m in skipped) == ["a.jsonl[10]", "a.jsonl[9]"]


def test_source_without_usable_samples_is_rejected(make, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"label": 1}, {"image": "x.png", "text": "a"}])
    with pytest.raises(DataError, match=r"(?s)none of its 2 samples.*no record format.*x\.png"):
        make(sources=[SourceConfig(path=str(path))])


def test_corrupt_stream_is_rejected(make, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"label": 1}])
    with pytest.raises(DataError, match="none of its first 1 records are usable: 1 are corrupt"):
        make(sources=[SourceConfig(path=str(path), streaming=True)])


def test_file_changed_after_indexing_is_corrupt(make, tmp_path):
    (tmp_path / "x.png").write_bytes(png(16, 16))
    rows = [{"image": "x.png", "text": caption(i)} for i in range(4)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    loader = make(NAFLEX, sources=[SourceConfig(path=str(path))])
    (tmp_path / "x.png").write_bytes(png(16, 160))
    assert "changed since it was indexed" in take(loader, 1)[0].skipped[0]


def test_truncated_index_is_rebuilt(make, tmp_path):
    expected = [content(b) for b in take(make(), 2)]
    caches = sorted((tmp_path / "index").glob("*/000000.sizes"))
    assert len(caches) == 2
    for cache in caches:
        cache.write_bytes(cache.read_bytes()[:100])
    assert [content(b) for b in take(make(), 2)] == expected


# Worker processes


def worker_pids(loader):
    return [w.pid for w in loader._steps.processes]


def test_killed_worker_raises_within_ten_seconds(make):
    loader = make(workers=2)
    batches = iter(loader)
    next(batches)
    start = time.monotonic()
    for pid in worker_pids(loader):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        DataError,
        match=r"data worker exited unexpectedly while the run waited for \d+ samples starting with",
    ):
        take(batches, 100)
    assert time.monotonic() - start < 10


def test_workers_ignore_launcher_signals(make):
    loader = make(workers=2)
    batches = iter(loader)
    next(batches)
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    for number in (signal.SIGTERM, signal.SIGINT):
        for pid in (*worker_pids(loader), server):
            os.kill(pid, number)
    time.sleep(0.2)
    assert len(take(batches, 20)) == 20


@pytest.mark.parametrize("spec", [CLIP, NAFLEX])
def test_step_bytes_match_decoded_step(make, spec):
    loader = make(spec, microbatch_size=2)
    packs = loader._steps.peek().ranks[0]
    step = loader._decoder[packs]
    nbytes = sum(m.nbytes - m.target_positions_L.nbytes for m in step.microbatches)
    assert nbytes > sum(m.encoders["vision"].pixels.nbytes for m in step.microbatches) > 0
    assert loader._decoder.step_bytes(packs) == nbytes


@pytest.mark.parametrize(("missing_bytes", "warnings"), [(1, 1), (0, 0)])
def test_small_shared_memory_warns_before_first_step(
    make, monkeypatch, caplog, missing_bytes, warnings
):
    loader = make(workers=1)
    step = loader._decoder.step_bytes(loader._steps.peek().ranks[0])
    size = SimpleNamespace(total=step * loader._prefetched * 3 - missing_bytes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr("torchmm.data.loader.shutil.disk_usage", lambda _: size)
    monkeypatch.setattr("torchmm.data.loader.TimedCall.get", lambda *_: None)  # No step arrives.
    assert list(loader.batches()) == []
    assert caplog.text.count("/dev/shm has") == warnings
