"""The benchmark of balanced encoders: batches, configurations, and planning rows."""

import importlib

import numpy as np
import pytest


@pytest.fixture(scope="module")
def benchmark():
    return importlib.import_module("balanced_encoders")


@pytest.fixture(scope="module")
def streams(benchmark):
    return {case.key: case for case in benchmark.STREAMS}


def test_image_counts_are_within_limits(benchmark):
    counts = benchmark.image_counts(2, 3, 4)
    assert counts.shape == (2, 3, 4)
    assert 0 <= counts.min() < counts.max() <= 48 // benchmark.SHORTEN


def test_planning_rows_show_even_work(benchmark):
    rows = {row.metric: row for row in benchmark.host_rows(1)}
    work = rows["work of the slowest rank / mean"]
    assert 1 <= work.ours < 1.34 < work.baseline
    assert rows["assignment of a microbatch"].ours > 0
    assert rows["assignment of a step, in the foreground"].ours > 0


@pytest.mark.parametrize("key", ["vlm_s", "vlm_s_tail", "video"])
def test_balanced_packing_lowers_patch_variation(benchmark, streams, key):
    recipe = streams[key].recipe()
    spread = []
    for is_even in (False, True):
        packed = benchmark.draw_batches(streams[key], recipe, 2, is_even)
        metas = [meta for batch in packed.batches for meta in batch]
        assert len(metas) == 2 * recipe.training.global_batch_size
        used = [sum(sample.tokens for sample in meta.samples) for meta in metas]
        assert max(used) <= recipe.training.sequence_length
        assert packed.fill() > 0.98
        samples = [(s.source, s.index) for meta in metas for s in meta.samples]
        assert len(set(samples)) == len(samples), "a sample is packed once"
        spread.append(np.std([sum(s.patches for s in meta.samples) for meta in metas]))
    assert spread[1] < spread[0]


def test_later_steps_reuse_first_stages(benchmark, streams):
    arms = importlib.import_module("support.cases.balance_arms")
    case = streams["vlm_s"]
    recipe = case.recipe()
    model = benchmark.recipe_model(recipe)
    packed = benchmark.draw_batches(case, recipe, 2)
    samples = [benchmark.BatchSample(recipe, model, packs) for packs in packed.batches]
    profile = benchmark.load_profile(recipe.simulation.device)
    chain = arms.in_one_chain(
        arms.recomputing(recipe, "full"), schedule="megatron_balanced", pipeline=4, tensor=4,
        virtual_stages=1, sequence_parallel=True,
    )  # fmt: skip
    first, second = (arms.StepSimulator(chain, 16, profile, sample=sample) for sample in samples)
    later = arms.LaterStep(first, samples[1])
    stages = later.simulate_parallel(chain.parallel).step.plan.graph.layout
    assert stages == first.layout(chain.parallel) != second.layout(chain.parallel)
    steps = list(benchmark.Setup(recipe, 16, profile, samples).steps(chain, [0, 1]))
    assert steps[0].step_s != steps[1].step_s
