"""Tests of the assignment of images to data-parallel ranks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from pipeline_cases import LAYERS, Case, step_of

from torchmm.balance import image_balancing
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.image_balancing import balance_microbatch_images
from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.costs.sizes import text_tokens
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.schedules.layouts import StageSplit, build_layout

CASE = Case("deepstack", encoder="qwen3_vl", tied=False)


def assign_images(costs: list[list[int]]) -> list[int]:
    homes = np.repeat(np.arange(len(costs)), [len(images) for images in costs])
    flat = np.array([cost for images in costs for cost in images], np.int64)
    owners: list[int] = image_balancing.assign_images(flat, homes, len(costs)).tolist()
    return owners


def slowest(costs: list[list[int]], owners: list[int]) -> int:
    work = [0] * len(costs)
    for cost, owner in zip((c for images in costs for c in images), owners, strict=True):
        work[owner] += cost
    return max(work)


@pytest.mark.parametrize("seed", range(8))
def test_assignment_is_near_optimal(seed):
    rng = Random(seed)
    ranks = rng.choice((2, 3))
    costs = [[rng.randint(1, 30) for _ in range(rng.randint(0, 4))] for _ in range(ranks)]
    count = sum(map(len, costs))
    best = min(slowest(costs, list(o)) for o in product(range(ranks), repeat=count))
    assigned = slowest(costs, assign_images(costs))
    assert best <= assigned <= (4 / 3) * best


@pytest.mark.parametrize("count", [0, 1, 5])
def test_equal_images_stay_on_their_ranks(count):
    owners = assign_images([[7] * count for _ in range(4)])
    assert owners == [rank for rank in range(4) for _ in range(count)]


def test_only_surplus_images_move():
    owners = assign_images([[3] * 6, [3] * 2])
    assert sorted(owners) == [0] * 4 + [1] * 4
    assert owners[6:] == [1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_padded_assignment_is_optimal(seed):
    rng = Random(seed)
    ranks = rng.choice((2, 3))
    costs = [[rng.randint(1, 30) for _ in range(rng.randint(0, 3))] for _ in range(ranks)]
    flat = np.array([cost for images in costs for cost in images], np.int64)
    homes = np.repeat(np.arange(ranks), [len(images) for images in costs])
    owners_ = image_balancing.assign_padded_images(flat, homes, ranks)

    def slowest_padded(owners: Sequence[int]) -> int:
        return int(
            image_balancing.padded_work_per_rank(flat, np.array(owners, np.int64), ranks).max()
        )

    best = min(slowest_padded(owners) for owners in product(range(ranks), repeat=len(flat)))
    assert slowest_padded(owners_) == best


def test_equal_generated_images_stay_on_their_ranks():
    homes = np.repeat(np.arange(4), 3)
    owners = image_balancing.assign_padded_images(np.full(12, 7), homes, 4)
    assert owners.tolist() == homes.tolist()


def test_balanced_sizes_keep_tokens_and_images():
    small, large = ImageMeta(0, 0, 4, 1), ImageMeta(0, 0, 16, 4, encoder="audio")
    metas = [
        MicrobatchMeta((SampleMeta("a", 0, 9, (small, large, small), "vision"),), 12),
        MicrobatchMeta((SampleMeta("a", 1, 7),), 12),
    ]
    first, second = balance_microbatch_images(metas, {"vision": [1, 0], "audio": [1]})
    assert [meta.tokens for meta in (first, second)] == [12, 12]
    assert [meta.used_tokens for meta in (first, second)] == [9, 7]
    assert (first.patches("vision"), second.patches("vision")) == ([4], [4])
    assert (first.patches("audio"), second.patches("audio")) == ([], [16])
    assert first.balanced and second.balanced


def test_owners_compare_slowest_ranks():
    model = CASE.build()
    [vision] = [m.describe() for m in model.modality_modules() if m.kind == "encoder"]
    sizes_I4 = np.tile([0, 16, 4, 1], (4, 1))
    balance = image_balancing.ImageBalancer((vision,)).owners(sizes_I4, np.zeros(4, np.int64), 2)
    assert balance.owners_I.tolist().count(0) == 2
    assert balance.before == 2 * balance.after == 2 * balance.mean > 0


def test_balanced_sizes_move_generated_images():
    small, large = GeneratedMeta((1, 2, 2), 3), GeneratedMeta((2, 2, 2), 5)
    metas = [
        MicrobatchMeta((SampleMeta("a", 0, 9, generated=(small, large)),), 12),
        MicrobatchMeta((SampleMeta("a", 1, 7, generated=(small,)),), 12),
    ]
    first, second = balance_microbatch_images(metas, {"generator": [0, 1, 0]})
    assert (first.generated, second.generated) == ([small, small], [large])
    assert [meta.used_tokens for meta in (first, second)] == [9, 7]


@pytest.mark.parametrize("seed", range(4))
def test_assignment_chooses_least_loaded_rank(seed):
    """Compare with a search over all ranks for every image."""
    rng = Random(seed)
    ranks = rng.randint(1, 9)
    costs = [[rng.randint(1, 5) for _ in range(rng.randint(0, 20))] for _ in range(ranks)]
    images = [
        (-c, index, home)
        for home, rank_costs in enumerate(costs)
        for index, c in enumerate(rank_costs)
    ]
    work = [0] * ranks
    expected = {}
    for cost, index, home in sorted(images):
        owner = home if work[home] == min(work) else work.index(min(work))
        work[owner] -= cost
        expected[home, index] = owner
    assert assign_images(costs) == [expected[key] for key in sorted(expected)]


def test_llm_saves_features_of_other_ranks():
    """Check that costs of balanced images include the features that `index_copy` saves."""
    batch, parts = step_of(CASE, 0)
    model = CASE.build()
    materialize(model, torch.device("cpu"))
    init_weights(model, 0)
    modules = [module.describe() for module in model.modality_modules()]
    cuts = {module.name: [StageSplit(LAYERS, (0,))] for module in modules}
    layout = build_layout(CASE.modules(), cuts)
    graph = StageGraph(layout, len(batch), parts)
    metas = [microbatch.meta.with_images([]) for microbatch in batch]
    costs = CostModel(load_profile("h100"), "float32")
    targets = [text_tokens(meta) for meta in metas]
    with_features, without = (
        compute_plan_costs(graph, modules, m, costs, targets=targets, layerwise=True).saved_bytes
        for m in (metas, [replace(meta, received_tokens=()) for meta in metas])
    )
    [llm] = [stage.index for stage in layout.stages if stage.module == "llm"]
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    for index, microbatch in enumerate(batch):
        tokens = sum(image.tokens for image in microbatch.meta.images_of_encoder("vision"))
        width = model.llm.text_config.hidden_size * (1 + len(modules[0].deepstack_layers))
        features = torch.rand(tokens, width, requires_grad=True) * 1.0
        encoder_outputs = {"vision": features} if "vision" in microbatch.encoders else {}
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model.llm(microbatch, encoder_outputs)
        counted = saved.get(features.untyped_storage().data_ptr(), 0)
        task = Task(llm, index, 0)
        assert with_features[task] - without[task] == counted == 4 * tokens * width
    assert any(meta.received_tokens for meta in metas)


def test_text_tokens_exclude_assigned_images():
    image = ImageMeta(0, 0, 16, 4)
    meta = MicrobatchMeta((SampleMeta("a", 0, 9, (image,), "vision"), SampleMeta("a", 1, 2)), 12)
    assert text_tokens(meta) == 7
    assert text_tokens(meta.with_images([image] * 3)) == 7
