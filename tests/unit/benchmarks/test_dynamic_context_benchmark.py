"""Dynamic context parallelism: equal samples, and times that follow the groups."""

import importlib
from pathlib import Path

import pytest

from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.module_names import VISION


@pytest.fixture(scope="module")
def benchmark():
    """Import the module from benchmarks/, which is not a package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
        yield importlib.import_module("dynamic_context")


@pytest.fixture(scope="module")
def model(benchmark):
    return benchmark.Model(benchmark.CASES[0])


def test_group_time_equals_equal_share_of_work(model):
    samples = tuple(SampleMeta("s", i, 4096) for i in range(4))
    joined = MicrobatchMeta(samples, 4 * 4096)
    alone = MicrobatchMeta(samples[:1], 4096)
    on_one, on_four = model.llm_ms([(alone, 1), (joined, 4)])
    # The same tokens and attention pairs per rank. Four ranks also exchange tokens for heads.
    assert on_one < on_four < 1.2 * on_one


def test_mixtures_have_requested_tokens_and_lengths(benchmark, model):
    case = benchmark.CASES[0]
    for mixture in ("captions", "skewed"):
        samples = benchmark.draw_samples(mixture, case, model.frame, 4_000_000, seed=1)
        lengths = [sample.tokens for sample in samples]
        assert sum(lengths) - lengths[-1] < 4_000_000 <= sum(lengths)
        assert max(lengths) <= case.longest
        assert all(
            sample.tokens > sum(image.tokens for image in sample.images_of_encoder(VISION))
            for sample in samples
        )


def test_one_group_for_all_ranks_equals_fixed_degree(benchmark, model, monkeypatch):
    case = benchmark.CASES[0]
    samples = benchmark.draw_samples("skewed", case, model.frame, 20_000_000, seed=2)
    fixed = benchmark.simulate(model, case, samples, 8, dynamic=False)
    dynamic = benchmark.simulate(model, case, samples, 8, dynamic=True)
    assert fixed.mean_ranks == 8 > dynamic.mean_ranks >= 1
    assert fixed.max_load == 1 <= dynamic.max_load <= 1.05
    monkeypatch.setattr(
        benchmark,
        "group_segments",
        lambda tokens, costs, ranks: [
            benchmark.SequenceGroup(range(ranks), list(range(len(tokens))))
        ],
    )
    assert benchmark.simulate(model, case, samples, 8, dynamic=True) == fixed
