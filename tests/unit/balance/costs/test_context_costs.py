"""Tests of costs with context parallelism of the LLM and its encoders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_cost_model import DEVICE, LLM, METAS, PROFILE
from test_layer_operators import TOKENS, RealLayer
from torch import Tensor

from torchmm.balance.costs.model import CostModel, StageCosts
from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.layers import layer_operators, layer_saved_bytes
from torchmm.costs.sizes import llm_sizes, module_tasks
from torchmm.models.layers.attention import Segments
from torchmm.parallel.context import ContextParallelHeads
from torchmm.parallel.exchange import ExchangeCounts
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.layouts import ModuleLayers, megatron_layout

TARGETS = [80, 99]
TOWER = ModuleDescription(
    "vision",
    "encoder",
    (LayerDescription(32, 4, 4, 8, 64, gated_ffn=False, causal=False),) * 2,
    0,
    0,
    parameters=20_000,
    dummy_patches=4,
)


def costs(context: int, sizes_for: int | None = None) -> StageCosts:
    model = CostModel(PROFILE, "float32", {"llm": Execution(shard=4, context=context)})
    sizes = llm_sizes(METAS, TARGETS, padding=True, context=sizes_for or context)
    return model.stage_costs(LLM, 1, 3, sizes, True, llm_sizes(METAS, TARGETS, padding=False))


@pytest.mark.parametrize("context", [2, 4])
def test_context_parallel_rank_has_fraction_of_costs(context: int) -> None:
    full, shared = costs(1), costs(1, context)  # without communication
    assert shared.saved_bytes * context == pytest.approx(full.saved_bytes)
    assert shared.flops.forward_N == pytest.approx(full.flops.forward_N)  # of all ranks
    for name in ("forward", "inputs"):
        times = [getattr(stage, name).total_ms for stage in (full, shared)]
        assert (times[0] / context < times[1]).all()  # weights are not sharded
        assert (times[1] < times[0]).all()
    products = [
        sum(
            o.flops
            for o in layer_operators(LLM.layers[0], sizes, CostSetting(Execution(), 4)).forward
        )
        for sizes in (llm_sizes(METAS, TARGETS, padding=True, context=n) for n in (1, context))
    ]
    assert products[1] * context == pytest.approx(products[0])


def test_context_exchanges_twice_per_pass() -> None:
    sizes = llm_sizes(METAS, TARGETS, padding=True, context=2)
    setting = CostSetting(Execution(context=2), 4)
    alone = layer_operators(LLM.layers[0], sizes, setting._replace(execution=Execution()))
    exchanged = layer_operators(LLM.layers[0], sizes, setting)
    assert not any(o.kind == "p2p" for o in (*alone.forward, *alone.inputs))
    for operators in (exchanged.forward, exchanged.inputs):
        [messages] = [o for o in operators if o.kind == "p2p"]
        assert messages.calls == 2
        # 50 tokens with 4 query heads, 4 result heads, 2 key and 2 value heads. Half is not sent.
        assert messages.network_bytes == pytest.approx(
            np.full(2, 4 * 50 * (4 + 4 + 2 + 2) * 16 / 2)
        )
    assert costs(2).forward.total_ms == pytest.approx(
        costs(1, 2).forward.total_ms + exchange_ms(context=2)
    )


def exchange_ms(context: int) -> np.ndarray:
    """Return the expected exchange time of two layers in ms: messages within a node, and copies."""
    tokens = 100 / context
    sent = 4 * tokens * 12 * 16 * (context - 1) / context
    copied = 2 * 4 * tokens * (3 * 8 + 4) * 16
    assert DEVICE.devices_per_node == 4
    return np.full(2, 2 * (sent / 5e9 + copied / 5e10) * 1e3)


def test_encoder_time_follows_rank_with_most_patches() -> None:
    images = tuple(ImageMeta(0, 0, patches, patches // 4) for patches in (8, 4, 12, 4, 4))
    metas = [
        MicrobatchMeta((SampleMeta("s", 0, 40, images, "vision"),), 40),
        MicrobatchMeta((SampleMeta("s", 1, 40),), 40),
    ]
    layers = [
        ModuleLayers("vision", "encoder", (1.0,) * 2, sub_microbatched=True),
        ModuleLayers("llm", "llm", (1.0,) * 4),
    ]
    layout = megatron_layout(layers, 1)
    for parts, max_patches in (((1, 1), [20.0, 4.0]), ((3, 0), [12.0, 4.0, 4.0])):
        graph = StageGraph(layout, 2, {"vision": parts}, context=2)
        tasks = module_tasks(graph, TOWER, metas, [10, 10])
        assert (
            tasks.sizes.inputs_N.tolist() == max_patches
        )  # ranks have 8 and 4, or 12, 4 and 4 patches
        assert tasks.unpadded_sizes.inputs_N.sum() == 32 + 4 * (parts[1] > 0)
    llm = module_tasks(graph, LLM, metas, [10, 10])
    assert llm.sizes.units_N.tolist() == [20, 20]
    assert llm.unpadded_sizes.units_N.tolist() == [40, 40]


class SharedLayer(RealLayer):
    """Layer on rank 0 of several ranks that share a sequence and send equal amounts."""

    def __init__(self, family: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(family, torch.float32)
        self.sent: list[list[int]] = []
        """Number of elements sent to each rank, by exchange."""
        local = TOKENS // ranks
        full, tables = self.hidden, self.tables
        self.hidden = full[:, :local].detach().requires_grad_()
        self.tables = [table[:, :local].clone() for table in tables]
        heads = ContextParallelHeads(None, 0, [local] * ranks)  # type: ignore[arg-type]
        segments = Segments.from_starts([0, 40, TOKENS], full.device, head_exchange=heads)
        samples = (SampleMeta("s", 0, 40), SampleMeta("s", 1, TOKENS - 40))
        metas = [MicrobatchMeta(samples, TOKENS)]
        self.sizes = llm_sizes(metas, [8], padding=True, context=ranks)
        monkeypatch.setattr("torchmm.parallel.context.exchange", self._exchange)
        self._run = lambda: self.layer(
            self.hidden,
            position_embeddings=tuple(self.tables),
            position_ids=torch.arange(local)[None],
            attention_mask=None,
            cu_seq_lens_q=segments,
        )

    def _exchange(self, rows: Tensor, counts: ExchangeCounts, group: object) -> Tensor:
        assert sum(counts.sent) == sum(counts.received) == len(rows)
        self.sent.append(counts.sent)
        return rows.clone()


SHARED = ["llama", "qwen3_5", "qwen3_5, attention", "qwen3_next", "lfm2", "deepseek_v3"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", SHARED)
def test_context_costs_match_real_layers(
    family: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SharedLayer(family, ranks, monkeypatch)
    layer = real.description.layers[0]
    setting = CostSetting(Execution(context=ranks), 4)
    real.run()
    to_others = 4 * sum(sum(sent[1:]) for sent in real.sent)
    [messages] = [o for o in layer_operators(layer, real.sizes, setting).forward if o.kind == "p2p"]
    assert messages.network_bytes == pytest.approx([to_others])
    assert messages.calls == len(real.sent)
    for trained in (True, False):
        predicted = layer_saved_bytes(layer, real.sizes, setting, weights=trained)
        kept, _ = real.live_bytes("none", trained)
        assert predicted == pytest.approx([kept], rel=0.03)
