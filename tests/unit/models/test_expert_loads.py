"""How tokens are spread over experts."""

import pytest
import torch
from model_cases import LLMS, build, microbatch

from torchmm.models.layers.experts import max_expert_load_ratio
from torchmm.recipe.model_section import LlmConfig, ModelConfig


def test_the_busiest_expert_is_compared_with_the_mean() -> None:
    loads_LE = torch.tensor([[2.0, 2.0, 2.0, 2.0], [8.0, 0.0, 0.0, 0.0]])
    assert max_expert_load_ratio(loads_LE).item() == pytest.approx((1 + 4) / 2)
    assert max_expert_load_ratio(torch.zeros(2, 4)).item() == 0.0


def test_tokens_of_training_are_counted_by_layer_and_expert() -> None:
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
    taken_LE = loads.take(torch.device("cpu"))
    assert taken_LE.shape == (len(routers), 6)
    for own_E, chosen_TK in zip(taken_LE, chosen, strict=True):
        assert own_E.tolist() == chosen_TK.flatten().bincount(minlength=6).tolist()
    assert not loads.take(torch.device("cpu")).any(), "only what came since"


def test_models_without_experts_have_nothing_to_count() -> None:
    model = build(ModelConfig(llm=LlmConfig(config=LLMS["llama"])))
    assert not model.llm.expert_loads


def test_stacked_biases_of_experts_are_no_matrices() -> None:
    llm = build(ModelConfig(llm=LlmConfig(config=LLMS["gpt_oss"])))
    matrices = llm.layer_matrices()
    of_experts = {n: p for n, p in llm.named_parameters() if ".experts." in n}
    assert {n.rpartition(".")[2] for n, p in of_experts.items() if p in matrices} == {
        "gate_up_proj",
        "down_proj",
    }
    assert sum(p.ndim == 2 for p in of_experts.values()) == 2 * len(llm.llm.layers)
