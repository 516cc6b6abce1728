"""FLOPs of one microbatch, forward and backward, for the LLM, the encoders *and* the generator.

Counted is what the mathematics needs, not what a kernel executes: two FLOPs per multiply-add of
matrix products; norms, softmax and element-wise work are left out, padding and recomputed
activations count nothing. Attention among L tokens costs 4 * heads * head_dim * L * min(L, window)
with L per packed segment (or per image), *without* halving it for causal masks: the convention
of `torch.utils.flop_counter` and of PaLM's formula (arXiv 2204.02311, appendix B).

Backward costs once the forward per gradient that is needed: weight gradients (trainable module),
input gradients (something upstream is trainable). Attention products have two inputs and no
weights: twice. So a frozen encoder has no backward, and a frozen LLM behind a trainable encoder
has only input gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchmm.batch import LayerDescription, MicrobatchMeta, ModuleDescription
from torchmm.generated import GeneratedMeta


class ModuleFlops(NamedTuple):
    """FLOPs of one module for one microbatch, over all tensor-parallel ranks together."""

    forward: int
    backward: int


def microbatch_flops(
    modules: Sequence[ModuleDescription], meta: MicrobatchMeta, targets: int | None = None
) -> dict[str, ModuleFlops]:
    """FLOPs by module name.

    Args:
        modules: encoders, LLM and generator.
        meta: what the microbatch contains.
        targets: positions that count in the loss, for the LM head; None: all used tokens.
    """
    result = {}
    gradient_reaches_llm = False
    for module in modules:
        if module.kind == "encoder":
            patches = meta.patches(module.name)
            result[module.name] = _encoder_flops(module, patches)
            trained = module.trainable or module.connector_trainable
            gradient_reaches_llm |= bool(patches) and trained
    for module in modules:
        if module.kind == "llm":
            lengths = [sample.tokens for sample in meta.samples]
            heads = meta.used_tokens if targets is None else targets
            result[module.name] = _llm_flops(module, lengths, heads, gradient_reaches_llm)
    llm_has_backward = gradient_reaches_llm or any(
        module.trainable for module in modules if module.kind == "llm"
    )
    for module in modules:
        if module.kind == "generator":
            result[module.name] = _generator_flops(module, meta.generated, llm_has_backward)
    return result


def _encoder_flops(module: ModuleDescription, patches: list[int]) -> ModuleFlops:
    """Pixels need no gradient: the patch embedding has weight gradients only."""
    units, outputs = sum(patches), sum(patches) // module.merge**2
    pre = units * module.pre_flops_per_unit
    post = outputs * module.post_flops_per_unit
    dense, attention = _layer_flops(module.layers, patches)
    backward = post * (module.trainable + module.connector_trainable)
    if module.connector_trainable and not module.trainable:
        # Two linear layers, the first without input gradient; taken as equally large.
        backward = 3 * post // 2
    if module.trainable:
        backward += pre + 2 * dense + 2 * attention
    return ModuleFlops(pre + dense + attention + post, backward)


def _llm_flops(
    module: ModuleDescription, lengths: list[int], targets: int, gradient_arrives: bool
) -> ModuleFlops:
    pre = sum(lengths) * module.pre_flops_per_unit
    post = targets * module.post_flops_per_unit
    dense, attention = _layer_flops(module.layers, lengths)
    forward = pre + dense + attention + post
    if module.trainable:  # the embedding is trained, so every layer passes gradients on
        return ModuleFlops(forward, pre + 2 * (dense + attention + post))
    if gradient_arrives:
        return ModuleFlops(forward, dense + 2 * attention + post)
    return ModuleFlops(forward, 0)


def _generator_flops(
    module: ModuleDescription, images: list[GeneratedMeta], context_needs_gradient: bool
) -> ModuleFlops:
    """Its loss is behind its layers, so whatever is trained before them needs their gradients.

    Noisy pixels and times need none; every layer's context does, if the connector is trained or
    what comes before it.
    """
    patches, contexts = [i.patches for i in images], [i.context for i in images]
    embedding = sum(patches) * module.pre_flops_per_unit + len(images) * module.flops_per_image
    connector = sum(contexts) * module.context_flops_per_unit
    post = sum(patches) * module.post_flops_per_unit
    dense, attention = _layer_flops(module.layers, patches)
    cross_dense, cross_attention = _cross_flops(module.layers, patches, contexts)
    dense, attention = dense + cross_dense, attention + cross_attention
    forward = embedding + connector + dense + attention + post
    connector_trained = module.connector_trainable
    if not (module.trainable or connector_trained or context_needs_gradient):
        return ModuleFlops(forward, 0)
    backward = dense + 2 * attention + post + connector * connector_trained
    if context_needs_gradient:
        backward += connector
    elif connector_trained:
        backward += connector // 2  # the first of two linear layers has no input gradient
    if module.trainable:
        backward += embedding + dense + post
    return ModuleFlops(forward, backward)


def _cross_flops(
    layers: Sequence[LayerDescription], lengths: list[int], contexts: list[int]
) -> tuple[int, int]:
    """What attention to the context adds to `_layer_flops`."""
    dense = attention = 0
    for layer in layers:
        if layer.cross_attention:
            query, key_value = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
            dense += 4 * layer.hidden_size * (query * sum(lengths) + key_value * sum(contexts))
            pairs = sum(n * m for n, m in zip(lengths, contexts, strict=True))
            attention += 4 * query * pairs
    return dense, attention


def _layer_flops(layers: Sequence[LayerDescription], lengths: list[int]) -> tuple[int, int]:
    """Forward FLOPs of all layers: (products with weights, products between activations)."""
    dense = attention = 0
    for layer in layers:
        query = layer.heads * layer.head_dim
        key_value = layer.kv_heads * layer.head_dim
        weights = layer.hidden_size * (
            2 * query + 2 * key_value + (3 if layer.gated_ffn else 2) * layer.ffn_size
        )
        dense += 2 * weights * sum(lengths)
        pairs = sum(n * min(n, layer.window or n) for n in lengths)
        attention += 4 * query * pairs
    return dense, attention
