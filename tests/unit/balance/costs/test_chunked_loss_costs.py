"""Tests of the costs of the chunked loss."""

from dataclasses import replace

import numpy as np

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.costs.blocks import HeadBlock
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.sizes import llm_sizes, sequence_sizes
from torchmm.models.build import build_model
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig


def test_tensor_parallel_loss_costs_use_chunks() -> None:
    """Check that costs use chunks if ranks shard the vocabulary, and all logits otherwise."""
    meta = MicrobatchMeta((SampleMeta("a", 0, 4096),), 4096)
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 1 << 17}
    module = build_model(ModelConfig(llm=LlmConfig(config=config)), FreezeConfig()).llm.describe()
    variants = {
        "all": module,
        "default": replace(module, sharded_loss_chunk_targets=331),
        "always": replace(module, loss_chunk_targets=331),
    }
    _, sizes = sequence_sizes(module, [meta])
    assert sizes is not None
    for tensor, same in ((1, "all"), (2, "always")):
        executions = {"llm": Execution(tensor=tensor)}
        model = CostModel(load_profile("h100"), "bfloat16", executions)
        results = {}
        for name, variant in variants.items():
            costs = model.stage_costs(variant, 0, 1, sizes, np.array([True]))
            results[name] = (
                costs.saved_bytes[0],
                costs.workspace_bytes[0],
                costs.forward.total_ms[0],
            )
        assert results["default"] == results[same]
        assert results["all"][1] > 2 * results["always"][1]


def test_only_complete_logits_are_gathered() -> None:
    sizes = llm_sizes([MicrobatchMeta((SampleMeta("s", 0, 8),), 8)], [8], padding=True)
    setting = CostSetting(Execution(tensor=2), 4)
    for chunk_targets, kinds in ((0, ["all_gather"]), (4, [])):
        head = HeadBlock(True, linear=(16, 64), norm="rms", chunk_targets=chunk_targets)
        forward = head.operators(sizes, setting).forward
        assert [operator.kind for operator in forward if operator.network_bytes] == kinds
