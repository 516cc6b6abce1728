"""Distribution of tokens over experts."""

import pytest
import torch
from model_cases import LLMS, build, microbatch

from torchmm.models.layers.experts import max_expert_load_ratio
from torchmm.recipe.model_section import LlmConfig, ModelConfig


def test_maximum_expert_load_is_relative_to_mean() -> None:
    loads_LE = torch.tensor([[2.0, 2.0, 2.0, 2.0], [8.0, 0.0, 0.0, 0.0]])
    assert max_expert_load_ratio(loads_LE).item() == pytest.approx((1 + 4) / 2)
    assert max_expert_load_ratio(torch.zeros(2, 4)).item() == 0.0


def test_training_tokens_are_counted_per_layer_and_expert() -> None:
    model = build(ModelConfig(llm=LlmConfig(config=LLMS["qwen3_moe"])))
    loads = model.llm.expert_loads
    batch = microbatch([5, 9])
    routers = [layer.mlp.gate for layer in model.llm.layers if hasattr(layer.mlp, "gate")]
    chosen = []
    for router in routers:
        router.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    model.eval()
    model(batch)
    chosen.clear()
    model.train()
    model(batch)
    loads_LE = loads.pop_loads(torch.device("cpu"))
    assert loads_LE.shape == (len(routers), 6)
    for loads_E, chosen_TK in zip(loads_LE, chosen, strict=True):
        assert loads_E.tolist() == chosen_TK.flatten().bincount(minlength=6).tolist()
    assert not loads.pop_loads(torch.device("cpu")).any(), "only tokens after the previous call"


def test_model_without_experts_has_no_expert_loads() -> None:
    model = build(ModelConfig(llm=LlmConfig(config=LLMS["llama"])))
    assert not model.llm.expert_loads


def test_stacked_expert_biases_are_not_matrices() -> None:
    llm = build(ModelConfig(llm=LlmConfig(config=LLMS["gpt_oss"])))
    matrices = llm.layer_matrices()
    expert_parameters = {n: p for n, p in llm.named_parameters() if ".experts." in n}
    assert {n.rpartition(".")[2] for n, p in expert_parameters.items() if p in matrices} == {
        "gate_up_proj",
        "down_proj",
    }
    assert sum(p.ndim == 2 for p in expert_parameters.values()) == 2 * len(llm.llm.layers)
