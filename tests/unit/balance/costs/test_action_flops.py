"""Tests of FLOPs per action, compared with the FLOP counter of PyTorch."""

from dataclasses import replace

import pytest
from test_real_flops import FREEZES, batch_of, build, case_of, combine, padding_as_sample

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.costs.flops import task_durations
from torchmm.pipelining.plan.graph import StageGraph


@pytest.mark.parametrize(("encoder", "freeze"), combine(FREEZES))
def test_cost_model_flops_match_torch(encoder: str, freeze: tuple[str, ...]) -> None:
    encoder, _, chunks = encoder.partition("; ")
    case = replace(case_of(encoder, freeze), chunked_loss=bool(chunks))
    batch = batch_of(case, [3, 0, 2], seed=7)
    modules = [m.describe() for m in build(case).modality_modules()]
    graph = StageGraph(case.layout(), len(batch), dict.fromkeys(case.kinds, (2, 0, 1)))
    metas = [padding_as_sample(m.meta) for m in batch]
    targets = [m.target_count for m in batch]
    model = CostModel(load_profile("cpu"), "float32")
    costs = compute_plan_costs(graph, modules, metas, model, targets=targets)
    durations = task_durations(graph, modules, metas, targets)
    assert costs.flops
    assert all(durations(action) == flops for action, flops in costs.flops.items())
