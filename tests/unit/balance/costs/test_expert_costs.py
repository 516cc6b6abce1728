"""Tests of expert parallelism: effects on all-gathers, memory and messages."""

from dataclasses import replace

import pytest
from model_cases import LLMS, build

from torchmm.balance.costs.model import CostModel, ShardLinks, all_gather_operators
from torchmm.balance.costs.profiles import load_profile
from torchmm.costs.devices import WITHIN_NODE, Device
from torchmm.costs.execution import Execution
from torchmm.costs.layers import (
    expert_parameters,
    layer_parameters,
    muon_rounds,
    stage_parameters,
)
from torchmm.costs.operators import KINDS, DeviceProfile, EfficiencyCurve
from torchmm.models.layers.experts import expert_modules
from torchmm.recipe.model_section import LlmConfig, ModelConfig


@pytest.fixture(scope="module")
def llm():
    wide = {**LLMS["qwen3_moe"], "hidden_size": 128, "num_experts": 8}
    return build(ModelConfig(llm=LlmConfig(config=wide))).llm


def test_expert_parameters_match_real_layer(llm) -> None:
    for description, layer in zip(llm.describe().layers, llm.layers, strict=True):
        real = sum(p.numel() for part in expert_modules([layer]) for p in part.parameters())
        assert expert_parameters(description) == pytest.approx(real, rel=0.01)
        total = layer_parameters(description)
        fewer = total - layer_parameters(description, expert=4)
        assert fewer == pytest.approx(real * 3 / 4, rel=0.01)


def test_muon_separates_expert_parallel_matrices(llm) -> None:
    module = llm.describe()
    both = {matrix.matrix_count > 1 for matrix in muon_rounds(module, 0, 1, 100, 1)[0]}
    assert both == {True, False}
    dense, experts = muon_rounds(module, 0, 1, 100, expert=2)
    assert {matrix.matrix_count for matrix in dense} == {1}
    assert {matrix.matrix_count for matrix in experts} == {8}


def test_expert_parallel_rank_gathers_local_experts(llm) -> None:
    module = llm.describe()
    count = len(module.layers)
    shared = Execution(shard=4)
    divided = replace(shared, expert=4)
    experts = sum(expert_parameters(layer) for layer in module.layers)
    dense = stage_parameters(module, 0, count).total - experts
    sent = {
        execution.expert: next(
            o.network_bytes
            for o in all_gather_operators(module, 0, count, execution, 2, ShardLinks(WITHIN_NODE))
            if o.kind == "all_gather"
        )
        for execution in (shared, divided)
    }
    assert sent[1] == pytest.approx(2 * (dense + experts) * 3 / 4)
    assert sent[4] == pytest.approx(2 * dense * 3 / 4), "no other rank has the same experts"
    profile = load_profile("h100")
    bytes_of = {
        execution.expert: CostModel(profile, "bfloat16", {"llm": execution}).static_bytes(
            module, 0, count
        )
        for execution in (shared, divided)
    }
    # Gathered weights (2 bytes) and gradients (4 bytes) of three quarters of the experts.
    assert bytes_of[1] - bytes_of[4] == pytest.approx(6 * experts * 3 / 4, rel=1e-6)


def test_experts_across_nodes_use_one_network_card(llm) -> None:
    module = llm.describe()
    count = len(module.layers)
    experts = sum(expert_parameters(layer) for layer in module.layers)
    dense = stage_parameters(module, 0, count).total - experts
    device = Device("toy", {"float32": 1e12}, 1e11, 1e9, 400e9, 50e9, 8, False, "8 cards")
    profile = DeviceProfile(device, dict.fromkeys(KINDS, EfficiencyCurve((1.0,), (1.0,))))

    def gather_ms(expert: int) -> float:
        execution = Execution(shard=16, expert=expert)
        work = CostModel(profile, "float32", {"llm": execution}).gather_work(module, 0, count)
        return float(work.network_ms[0])

    # 16 ranks on two nodes all-gather over eight network cards.
    assert gather_ms(1) == pytest.approx(4e3 * (dense + experts) * 15 / 16 / 400e9)
    # Two ranks on different nodes have the same experts, and one network card each.
    dense_ms = 4e3 * dense * 15 / 16 / 400e9
    assert gather_ms(8) == pytest.approx(dense_ms + 4e3 * experts / 8 / 2 / 50e9)
