"""Small models of a few layers, for measuring what a call costs among others.

Operators measured alone find their code and the framework's in caches. In a layer every call
follows another one, with views, modules and autograd's bookkeeping between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from torchmm.balance.execution import Execution
from torchmm.balance.operators import Operator
from torchmm.balance.part_operators import Setting, part_operators
from torchmm.balance.parts import stage_parts
from torchmm.balance.task_sizes import llm_sizes
from torchmm.batch import Microbatch, MicrobatchMeta, SampleMeta
from torchmm.config import FreezeConfig, LlmConfig, ModelConfig
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize
from torchmm.models.registry import build_model

DEPTHS = (2, 6)


class LayerCase(NamedTuple):
    """A model, by what runs in it."""

    operators: list[Operator]
    """Of forward and backward."""
    run: Callable[[], None]
    """Forward and backward of one microbatch."""

    @property
    def calls(self) -> float:
        """Of all operators."""
        return sum(float(np.sum(operator.calls)) for operator in self.operators)


def layer_cases(device: torch.device, width: int, tokens: int) -> list[LayerCase]:
    """Llamas of few layers, float32.

    Args:
        width: of the layers.
        tokens: in their microbatch.
    """
    return [_case(device, width, tokens, depth) for depth in DEPTHS]


def _case(device: torch.device, width: int, tokens: int, depth: int) -> LayerCase:
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": depth, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    model = build_model(ModelConfig(llm=LlmConfig(config=config)), FreezeConfig())
    materialize(model, device)
    init_weights(model, seed=0)
    ids = torch.ones(tokens, dtype=torch.int64)
    meta = MicrobatchMeta((SampleMeta("small", 0, tokens),), tokens)
    microbatch = Microbatch(ids, ids, torch.arange(tokens), [0, tokens], {}, meta).to(device)

    def run() -> None:
        model(microbatch).backward()

    module = model.llm.describe()
    sizes = llm_sizes([meta], [tokens], padding=True)
    operators: list[Operator] = []
    for part in stage_parts(module, 0, depth):
        passes = part_operators(module, part, sizes, Setting(Execution(), 4))
        operators += [operator for own in passes[:3] for operator in own] * part.count
    return LayerCase(operators, run)
