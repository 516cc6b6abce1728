"""Cost of dividing a matrix product into blocks of rows, without any transfer.

Blocks are those of `torchmm.extensions.async_tp.backends.RingBackend`: the local slice in one
block, every other slice in several chunks.
"""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

import torch

from support.harness import Row

CHUNKS = (1, 2, 4)
"""Blocks per slice."""


class Products(NamedTuple):
    """A column-wise linear of one of `ranks` ranks: (tokens, inputs) times (inputs, outputs)."""

    name: str
    ranks: int
    tokens: int
    inputs: int
    outputs: int


CPU_PRODUCTS = [Products("768 features", ranks, 1024, 768, 2 * 2048 // ranks) for ranks in (2, 4)]
TINY_PRODUCTS = [Products("32 features", 2, 32, 32, 64)]
CUDA_PRODUCTS = [
    Products(name, ranks, 8192, hidden, 2 * ffn // ranks)
    for name, hidden, ffn in (("Llama 3 8B", 4096, 14336), ("Llama 3 70B", 8192, 28672))
    for ranks in (4, 8)
]


def product_rows(products: Products, device: torch.device, repetitions: int) -> list[Row]:
    """Return times of a product in blocks (`RingBackend`) and of the full product."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.zeros(products.tokens, products.inputs, device=device, dtype=dtype)
    weight = x.new_zeros(products.outputs, products.inputs).t()
    out = x.new_empty(products.tokens, products.outputs)
    times_s: dict[int, list[float]] = {chunks: [] for chunks in (0, *CHUNKS)}
    for _ in range(1 + repetitions):
        for chunks, samples_s in times_s.items():
            size = products.tokens // products.ranks
            lengths = [size] + [size // max(chunks, 1)] * (products.ranks - 1) * chunks
            lengths = lengths if chunks else [products.tokens]
            begin_s = _now_s(device)
            start = 0
            for length in lengths:
                torch.mm(x[start : start + length], weight, out=out[start : start + length])
                start += length
            samples_s.append(_now_s(device) - begin_s)
    whole_ms = median(times_s[0][1:]) * 1e3
    return [
        Row(
            f"{products.name}, tensor {products.ranks}, {products.tokens} tokens",
            f"matmul in {(products.ranks - 1) * chunks + 1} blocks",
            "ms",
            median(times_s[chunks][1:]) * 1e3,
            whole_ms,
            better="lower",
        )
        for chunks in CHUNKS
    ]


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
