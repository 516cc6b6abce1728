"""The upper bound on the gain of distributing images over the replicas of pipelines."""

from collections import Counter

import numpy as np
import pytest

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.image_balancing import ImageBalancer
from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.costs.flops import step_flops


@pytest.fixture
def benchmark(load):
    return load("balanced_pipelines")


@pytest.fixture
def sample(load):
    workload = load("support.workloads").Workload("recipes/papers/pipeweaver_vlm_s", 16)
    changes = ("--parallel.tensor=1", "--parallel.pipeline=2", "--parallel.schedule=separated")
    return StepSample(workload.load(*changes))


def test_arms_preserve_images_and_balance_work(benchmark, sample):
    balance = ImageBalancer(tuple(m for m in sample.modules if m.kind == "encoder"))
    shares = sample.shares(sample.recipe, 8)

    def images(arm):
        return Counter(
            i.patches for share in arm for m in share for s in m.samples for i in s.images
        )

    def spread(arm, axis):
        work_RM = np.array([step_flops(balance.modules, share) for share in arm])
        return (work_RM.max(axis) / work_RM.mean(axis)).max()

    over_replicas = benchmark.distribute_over_replicas(balance, shares)
    even = benchmark.distribute_evenly(balance, shares)
    assert images(shares) == images(over_replicas) == images(even)
    assert spread(over_replicas, 0) < spread(shares, 0)
    assert spread(even, None) < spread(over_replicas, None) < spread(shares, None)


def test_replicas_with_balanced_images_have_shorter_steps(benchmark, sample):
    profile = load_profile(sample.recipe.simulation.device)
    steps_ms = {
        arm: forecaster(sample.recipe, 16, profile, sample=sample).simulate_schedule().iteration_ms
        for arm, forecaster in benchmark.ARMS.items()
    }
    assert benchmark.ARMS["own"] is StepSimulator
    assert steps_ms["even"] < steps_ms["replicas"] < steps_ms["own"]


def test_gain_compares_with_best_plan(benchmark):
    def record(plain_s, unbalanced_s, replicas_s):
        arms = {"own": unbalanced_s, "replicas": replicas_s, "even": replicas_s}
        return {
            "workload": "model, 8 GPUs",
            "search_s": 8.0,
            "no pipeline": None if plain_s is None else {"step_s": plain_s, "sizes": ""},
            "pipelines": {arm: {"step_s": step_s, "sizes": ""} for arm, step_s in arms.items()},
        }

    assert benchmark.gain(record(3.0, 2.2, 2.0), "replicas") == pytest.approx(1.1)
    assert benchmark.gain(record(1.0, 2.2, 2.0), "replicas") == 1.0
    assert benchmark.gain(record(None, 2.0, 2.1), "replicas") == 1.0
    table = benchmark.markdown([record(3.0, 2.2, 2.0), record(None, 2.0, 2.1)])
    assert "| 1.100 | 1.100 |" in table and "| - |" in table
