"""Predicted memory of an update with Muon, compared with all allocations of the update."""

import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from model_cases import LLMS
from support.allocations import CountPeak

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.costs.execution import Execution, ParameterStates
from torchmm.models.build import build_model
from torchmm.models.hf.load import local_tensor
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize, module_of
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import start_process_group
from torchmm.recipe.model_section import AdapterConfig, FreezeConfig, LlmConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import (
    ActivationCheckpointConfig,
    CompileConfig,
    OptimizerConfig,
)
from torchmm.training.optim import build_optimizer

WIDE = {"hidden_size": 64, "intermediate_size": 96}
EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 96, "num_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
}
"""Expert counts that all ranks divide, because the prediction assumes equal shards."""
CASES = ["llama", "phi3", "qwen3_moe", "gpt_oss", "llama, adapters", "qwen3_moe, expert parallel"]
"""Model families and variants.

They have separate linear layers, packed linear layers, stacked experts, low-rank matrices, and
experts on a separate mesh.
"""


@pytest.mark.parametrize("ranks", [1, 4])
def test_update_memory_matches_prediction(ranks):
    cases = CASES if ranks > 1 else CASES[:-1]
    for outcomes in zip(*run_distributed(_measure_all, ranks, cases), strict=True):
        case, _, predicted = outcomes[0]
        max_needed = max(needed for _, needed, _ in outcomes)
        assert predicted == pytest.approx(max_needed, rel=0.06), case


def _measure_all(cases: list[str]) -> list[tuple[str, int, int]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    return [(case, *_measure(case)) for case in cases]


def _measure(case: str) -> tuple[int, int]:
    """Return the measured and the predicted peak memory of the update, in bytes."""
    family, _, variant = case.partition(", ")
    ranks = torch.distributed.get_world_size()
    expert = 2 if variant == "expert parallel" else 1
    parallel = ParallelConfig(shard=ranks, expert=expert)
    dimensions = WIDE | EXPERTS.get(family, {})
    config = ModelConfig(llm=LlmConfig(config={**LLMS[family], **dimensions}))
    adapters = {"a": AdapterConfig(modules=["llm"], rank=8)} if variant == "adapters" else {}
    model = build_model(config, FreezeConfig(), adapters=adapters)
    description = model.llm.describe()
    disabled = ActivationCheckpointConfig(), CompileConfig()
    parallelize(model, mesh_for(parallel), parallel, *disabled, torch.float32)
    materialize(model, "cpu")
    init_weights(model, seed=1)
    muon = OptimizerConfig(name="muon")
    optimizer = build_optimizer(model, module_of, muon, (), model.layer_matrices(), torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    for _ in range(2):  # the first step creates states
        for parameter in trained:
            parameter.grad = parameter.detach().clone()
        states = [x for state in optimizer.state.values() for x in state.values()]
        tensors = [*model.parameters(), *(p.grad for p in trained), *states]
        with CountPeak(map(local_tensor, tensors)) as counter:
            optimizer.step()
    states = ParameterStates(layer_moments=4.0, uses_muon=True)
    execution = Execution(shard=ranks, expert=expert, states=states)
    costs = CostModel(load_profile("cpu"), "float32", {"llm": execution})
    return counter.peak_bytes, sum(costs.update_bytes(description, 0, len(description.layers)))
