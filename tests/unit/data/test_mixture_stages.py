"""Mixtures by epochs, and mixtures that change during a run."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest
from data_cases import caption, data_config, training, write_jsonl

from torchmm.common.errors import CheckpointError
from torchmm.data.build import build_loader
from torchmm.recipe.data_section import SourceConfig, StageConfig

STAGES = [
    {"until_step": 3, "weights": {"a": 1.0}},
    {"until_step": 6, "weights": {"a": 1.0, "b": 3.0}},
    {"weights": {"b": 1.0}},
]


@pytest.fixture
def make(tmp_path, tokenizer, text_spec):
    """Return a function that builds a loader of sources a and b with 10 and 40 samples."""
    for name, count in (("a", 10), ("b", 40)):
        rows = [{"text": caption(i)} for i in range(count)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)

    def make(state=None, *, ranks=(0, 1), stages=(), streaming=False, accept=False, **sources):
        configs = [
            SourceConfig(
                path=str(tmp_path / f"{name}.jsonl"), name=name, streaming=streaming, **keys
            )
            for name, keys in {"a": {}, "b": {}, **sources}.items()
        ]
        staged = [StageConfig(**stage) for stage in stages]
        return build_loader(
            data_config(tmp_path, *configs, mixture_schedule=staged, shuffle_window=6),
            training(),
            text_spec=text_spec,
            image_specs={},
            tokenizer=tokenizer,
            data_parallel_rank=ranks[0],
            data_parallel_size=ranks[1],
            state=json.loads(json.dumps(state)),
            resume_changed=accept,
        )

    return make


def take(loader, count):
    return list(islice(loader, count))


def names(batch):
    return [(s.source, s.index) for m in batch.microbatches for s in m.meta.samples]


def sources(batch):
    return Counter(source for source, _ in names(batch))


def test_epochs_limit_use_of_sources(make):
    batches = take(make(a={"epochs": 3.0}, b={"epochs": 0.5}), 10)
    samples = [name for batch in batches for name in names(batch)][:50]
    counts = Counter(samples)
    of_a = [counts["a", i] for i in range(10)]
    of_b = [counts["b", i] for i in range(40)]
    # 30 samples of 10 and 20 of 40. Packing changes the order slightly.
    assert abs(sum(of_a) - 30) <= 3 and max(of_a) <= 4 and min(of_a) >= 2
    assert abs(sum(of_b) - 20) <= 3 and max(of_b) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_mixture_stages_change_and_resume_exactly(make, streaming):
    options = {"stages": STAGES, "streaming": streaming}
    batches = take(make(**options), 11)
    assert all(set(sources(b)) == {"a"} for b in batches[:3])
    both = sum((sources(b) for b in batches[3:6]), Counter())
    assert 1.5 < both["b"] / both["a"] < 4
    late = sum((sources(b) for b in batches[8:]), Counter())
    assert late["a"] <= 3 < late["b"], "only earlier packs"
    for done in (1, 3, 4, 6, 7):
        resumed = take(make(batches[done - 1].state, **options), 11 - done)
        assert list(map(names, resumed)) == list(map(names, batches[done:])), done


def test_mixture_stages_are_independent_of_ranks(make):
    single = take(make(stages=STAGES), 9)
    pairs = [take(make(stages=STAGES, ranks=(rank, 2)), 9) for rank in (0, 1)]
    assert [names(b) for b in single] == [names(x) + names(y) for x, y in zip(*pairs, strict=True)]
    resumed = [take(make(single[4].state, stages=STAGES, ranks=(rank, 2)), 4) for rank in (0, 1)]
    assert [names(x) + names(y) for x, y in zip(*resumed, strict=True)] == list(
        map(names, single[5:])
    )


def test_changed_mixture_stages_are_rejected(make):
    state = take(make(stages=STAGES), 4)[-1].state
    later = [{**STAGES[0], "until_step": 2}, *STAGES[1:]]
    with pytest.raises(CheckpointError, match=r"data\.mixture_schedule"):
        make(state, stages=later)
    only_b = [{"until_step": 4, "weights": {"a": 1.0}}, {"weights": {"b": 1.0}}]
    continued = take(make(state, stages=only_b, accept=True), 6)
    assert sources(continued[-1])["b"] > sources(continued[-1])["a"]
    with pytest.raises(CheckpointError, match=r"epochs of source 'a' null -> 2\.0"):
        make(take(make(), 1)[0].state, a={"epochs": 2.0}, b={"epochs": 1.0})
