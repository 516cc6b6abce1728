"""Tests of memory of tuned steps with experts, for balanced and unbalanced routing.

The tokens of all experts are one tensor, and so are the gradients of their weights.
"""

import pytest
import torch
from pipeline_cases import LLM
from tuned_steps import TunedStep, cut_in_two

from torchmm.common.batch import Microbatch, MicrobatchMeta, SampleMeta

MIXTURE = {
    **LLM,
    "model_type": "qwen3_moe",
    "hidden_size": 192,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}
SIZES = {"few wide": (8, 256), "many narrow": (32, 64)}
"""Number of experts, and intermediate size of each expert."""
TOKENS = (200, 300, 150, 256)
"""Tokens per microbatch."""


def text(seed: int, tokens: int) -> Microbatch:
    ids = torch.randint(5, 64, (tokens,), generator=torch.Generator().manual_seed(seed))
    meta = MicrobatchMeta((SampleMeta("text", 0, tokens),), tokens)
    return Microbatch(ids, ids.roll(-1), torch.arange(tokens), [0, tokens], {}, meta)


def routed(sizes: str, *, unevenly: bool) -> TunedStep:
    """Return a step with experts.

    Args:
        sizes: A key of `SIZES`.
        unevenly: Whether all tokens are routed to the same two experts.
    """
    experts, inner = SIZES[sizes]
    llm = {"config": {**MIXTURE, "num_experts": experts, "moe_intermediate_size": inner}}
    step = cut_in_two({"llm": llm}, [text(0, 64).meta])
    if unevenly:
        routers = [p for n, p in step.model.named_parameters() if n.endswith("mlp.gate.weight")]
        assert len(routers) == 4
        with torch.no_grad():
            for router in routers:
                router.zero_()  # equal scores select the first experts
    return step


@pytest.mark.parametrize(
    ("sizes", "schedule", "unevenly"),
    [
        ("many narrow", "zero_bubble", True),
        ("few wide", "zero_bubble", False),
        pytest.param("many narrow", "gpipe", False, marks=pytest.mark.campaign),
        pytest.param("few wide", "gpipe", True, marks=pytest.mark.campaign),
    ],
)
def test_tuned_step_with_experts_stays_within_limit(sizes, schedule, unevenly):
    step = routed(sizes, unevenly=unevenly)
    batch = [text(seed, tokens) for seed, tokens in enumerate(TOKENS)]
    for limit, predicted, measured in step.tuned(step.plan(schedule, batch, {}), batch):
        assert measured <= predicted <= limit, measured / limit
        assert measured >= 0.93 * predicted, measured / predicted
