"""Tests of FLOP counts against the FLOP counter of PyTorch, in forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_cases import build, pair_config
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.flop_counter import FlopCounterMode

from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.flops import microbatch_flops, module_layers

VOCABULARY = 96
LLM = LayerDescription(
    32, heads=4, kv_heads=2, head_dim=8, ffn_size=80, gated_ffn=True, causal=True
)
VIT = LayerDescription(
    24, heads=3, kv_heads=3, head_dim=8, ffn_size=64, gated_ffn=False, causal=False
)
PATCH_PIXELS, MERGE = 12, 2
PATCHES = (16, 36)
TEXT_TOKENS = (25, 40)


class Layer(nn.Module):
    """Transformer layer of the described sizes with unfused matrix products."""

    def __init__(self, sizes: LayerDescription) -> None:
        super().__init__()
        self.sizes = sizes
        inner, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q, self.k = nn.Linear(sizes.hidden_size, inner), nn.Linear(sizes.hidden_size, kv)
        self.v, self.o = nn.Linear(sizes.hidden_size, kv), nn.Linear(inner, sizes.hidden_size)
        self.up = nn.Linear(sizes.hidden_size, sizes.ffn_size)
        self.gate = nn.Linear(sizes.hidden_size, sizes.ffn_size) if sizes.gated_ffn else None
        self.down = nn.Linear(sizes.ffn_size, sizes.hidden_size)

    def attend(self, x_LD: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            y_HLE = y.unflatten(-1, (-1, self.sizes.head_dim)).transpose(0, 1)
            return y_HLE.repeat_interleave(self.sizes.heads // y_HLE.shape[0], 0)

        q, k, v = split(self.q(x_LD)), split(self.k(x_LD)), split(self.v(x_LD))
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(0, 1).flatten(1))

    def forward(self, x_TD: Tensor, lengths: list[int]) -> Tensor:
        x_TD = x_TD + torch.cat([self.attend(x) for x in x_TD.split(lengths)])
        inner = self.up(x_TD)
        inner = inner.relu() if self.gate is None else silu(self.gate(x_TD)) * inner
        return x_TD + self.down(inner)


class Tiny(nn.Module):
    """Vision encoder with a two-layer connector, and an LLM."""

    def __init__(self, width: int = VIT.hidden_size * MERGE**2) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH_PIXELS, VIT.hidden_size)
        self.vision = nn.ModuleList(Layer(VIT) for _ in range(2))
        self.connector = nn.Sequential(
            nn.Linear(width, LLM.hidden_size), nn.GELU(), nn.Linear(LLM.hidden_size, width // 3)
        )
        self.embed = nn.Embedding(VOCABULARY, LLM.hidden_size)
        self.layers = nn.ModuleList(Layer(LLM) for _ in range(3))
        self.head = nn.Linear(LLM.hidden_size, VOCABULARY)

    def forward(self, patches: Tensor | None, ids: list[Tensor], targets: int) -> Tensor:
        lengths = [n + (p // MERGE**2 if patches is not None else 0) for n, p in SIZES]
        x = self.embed(torch.cat(ids))
        if patches is not None:
            y = self.patch(patches)
            for layer in self.vision:
                y = layer(y, list(PATCHES))
            tokens = self.connector(y.unflatten(0, (-1, MERGE**2)).flatten(1))
            x = torch.cat([tokens, x])  # the order does not affect FLOPs
        for layer in self.layers:
            x = layer(x, lengths)
        return self.head(x[:targets]).sum()


SIZES = list(zip(TEXT_TOKENS, PATCHES, strict=True))


def describe(vision: bool, connector: bool, llm: bool) -> list[ModuleDescription]:
    width = VIT.hidden_size * MERGE**2
    connector_flops = 2 * (width * LLM.hidden_size + LLM.hidden_size * (width // 3))
    return [
        ModuleDescription(
            "vision",
            "encoder",
            (VIT,) * 2,
            embedding_flops_per_unit=2 * PATCH_PIXELS * VIT.hidden_size,
            head_flops_per_unit=connector_flops,
            parameters=0,
            trainable=vision,
            connector_trainable=connector,
            patches_per_token=MERGE**2,
        ),
        ModuleDescription(
            "llm",
            "llm",
            (LLM,) * 3,
            embedding_flops_per_unit=0,
            head_flops_per_unit=2 * LLM.hidden_size * VOCABULARY,
            parameters=0,
            trainable=llm,
        ),
    ]


def describe_microbatch(images: bool) -> MicrobatchMeta:
    samples = []
    for index, (text, patches) in enumerate(SIZES):
        image = (ImageMeta(1, 1, patches, patches // MERGE**2),) if images else ()
        tokens = text + sum(i.tokens for i in image)
        samples.append(SampleMeta("s", index, tokens, image, "vision" if images else None))
    return MicrobatchMeta(
        tuple(samples), sum(s.tokens for s in samples) + 17
    )  # 17 tokens of padding


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize(
    ("vision", "connector", "llm"),
    [
        (True, True, True),
        (False, True, False),
        (False, True, True),
        (True, True, False),
        (True, False, False),
        (False, False, True),
    ],
)
def test_flops_match_torch_counter(vision, connector, llm, images):
    model = Tiny()
    for part in (model.patch, model.vision):
        part.requires_grad_(vision)
    model.connector.requires_grad_(connector)
    for part in (model.embed, model.layers, model.head):
        part.requires_grad_(llm)
    patches = torch.randn(sum(PATCHES), PATCH_PIXELS) if images else None
    ids = [torch.zeros(n, dtype=torch.long) for n in TEXT_TOKENS]
    targets = 30
    with FlopCounterMode(display=False) as forward:
        loss = model(patches, ids, targets)
    with FlopCounterMode(display=False) as backward:
        if loss.requires_grad:
            loss.backward()
    meta = describe_microbatch(images)
    counted = microbatch_flops(describe(vision, connector, llm), meta, targets)
    assert sum(m.forward for m in counted.values()) == forward.get_total_flops()
    backward_flops = sum(m.backward for m in counted.values())
    assert backward_flops == pytest.approx(backward.get_total_flops(), rel=0.01)


def test_sliding_window_limits_attention_flops():
    layer = LayerDescription(
        8, heads=1, kv_heads=1, head_dim=8, ffn_size=8, gated_ffn=False, causal=True, window=10
    )
    module = ModuleDescription("llm", "llm", (layer,), 0, 0, 0)
    meta = MicrobatchMeta((SampleMeta("s", 0, 100), SampleMeta("s", 1, 5)), 105)
    weights = 2 * (4 * 64 + 2 * 64) * 105
    pairs = 100 * 10 + 5 * 5
    assert microbatch_flops([module], meta)["llm"].forward == weights + 4 * 8 * pairs


def test_padding_adds_no_flops():
    few = microbatch_flops(describe(True, True, True), describe_microbatch(True))
    meta = describe_microbatch(True)
    padded = MicrobatchMeta(meta.samples, meta.tokens + 1000)
    assert microbatch_flops(describe(True, True, True), padded) == few


@pytest.mark.parametrize("connector", [True, False])
def test_connector_of_encoder_follows_its_layers(connector: bool) -> None:
    """Check that a trained connector needs gradients after the layers, not before them."""
    modules = [m.describe() for m in build(pair_config("llama", "clip")).modality_modules()]
    encoder = next(module for module in modules if module.kind == "encoder")
    frozen = replace(encoder, trainable=False, connector_trainable=connector)
    meta = MicrobatchMeta((SampleMeta("a", 0, 8),), 8)
    (layers,) = module_layers([frozen], [meta])
    assert (layers.embedding_trainable, layers.head_trainable) == (False, connector)
    assert layers.trainable == (False,) * len(encoder.layers)
