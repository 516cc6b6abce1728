"""Layers and modules as planners see them: sizes, from which FLOPs, bytes and times follow.

Made by the modules of `torchmm.models` (`describe`), read by `torchmm.balance`, which knows no
models. Rejected: that costs read Hugging Face's configurations, in which every family names the
same sizes differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class DeltaSizes(NamedTuple):
    """A gated delta net."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    key_dim: int
    """Features of a query or key of one head."""
    value_dim: int
    filter_width: int
    """Tokens that the convolution sees, its own included."""
    interleaved: bool = False
    """Whether two linears hold everything of a key head together, instead of four."""


class ConvolutionSizes(NamedTuple):
    """A convolution over a few tokens between two gates, each as wide as hidden states."""

    filter_width: int
    """Tokens that it sees, its own included."""


MixerSizes = DeltaSizes | ConvolutionSizes


class LowRank(NamedTuple):
    """Sizes of what an adapter adds to a frozen linear: two trained matrices, and perhaps a
    magnitude for each output."""

    inputs: int
    outputs: int
    rank: int
    divided: Literal["inputs", "outputs"] | None
    """What of the linear tensor-parallel ranks divide; None: every rank has all of it whole."""
    magnitudes: bool = False


class Rounded(NamedTuple):
    """Linears of a layer whose inputs, weights and gradients are cast to float8 for products."""

    linears: tuple[tuple[int, int], ...]
    """Their (inputs, outputs), each once."""
    calls: int
    """Operators of a cast."""
    products: bool
    """Whether products run in float8 then, or in the compute dtype (emulated)."""


@dataclass(frozen=True)
class LayerDescription:
    """Sizes of one kind of transformer layer, from which FLOPs and bytes follow."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    """For experts: the total over those that a token goes through."""
    gated_ffn: bool
    causal: bool
    window: int | None = None
    """Attention reach in tokens (LLM) or patches per window (encoder); None for full attention."""
    cross_attention: bool = False
    """Whether a second attention of the same sizes reads the context (generators), which has
    `hidden_size` features after the connector."""
    norm: Literal["rms", "layer", "centred"] = "rms"
    """Kind of the layer's norms; "centred": Cohere's LayerNorm, call by call and without a bias."""
    norm_place: Literal["before", "behind", "around", "shared"] = "before"
    """Where they are: before attention and feed-forward part, after them ("behind"), or both
    ("around"); "shared": one for both, which read the same."""
    more_norms: int = 0
    """Norms of all features beside these."""
    norms_of_same: int = 0
    """How many of these read what another norm reads."""
    norm_weight_float32: bool = False
    """Whether their weights multiply float32 values, which are then kept for backward."""
    activation: str = "silu"
    """Function inside the feed-forward part, by Hugging Face's name; "clamped_silu": GPT-OSS's."""
    rotary: bool = True
    """Whether queries and keys are rotated."""
    rotary_float32: bool = False
    """Whether that is done in float32, whatever the other values are."""
    qk_norm: bool = False
    """Whether queries and keys are normalized."""
    value_norm: bool = False
    """Whether values are, by norms without weights."""
    value_is_key: bool = False
    """Whether one linear computes keys and values, which are the same before norms and rotation."""
    packed_qkv: bool = False
    """Whether one linear computes queries, keys and values."""
    packed_gate_up: bool = False
    """Whether one linear computes gate and up projection."""
    experts: int = 0
    """Experts among which a router chooses for every token; 0: one feed-forward part for all."""
    experts_per_token: int = 0
    """How many of them a token goes through."""
    router_norm: bool = False
    """Whether the router has a norm without weight, and scales, of what another norm reads too."""
    plain_scores: bool = False
    """Whether scores are computed by plain products (caps, sinks), which keep no result."""
    expert_biases: bool = False
    """Whether experts' products have biases."""
    router_float32: bool = False
    """Whether the router computes in float32, whatever the other weights are."""
    batched: bool = False
    """Whether images of one size are rows of a batch instead of packed into a single row."""
    mixer: MixerSizes | None = None
    """What the layer has in place of attention; None: it has attention."""
    output_gate: bool = False
    """Whether the queries' linear also gives a gate of attention's result."""
    shared_ffn_size: int = 0
    """Of an expert, or several together, that all tokens go through (beside `experts`)."""
    shared_gate: bool = False
    """Whether its result has a gate."""
    value_dim: int = 0
    """Features of a head's values; 0: `head_dim`."""
    query_rank: int = 0
    """Features between the two products that give queries; 0: one product does."""
    key_value_rank: int = 0
    """Features from which a product gives keys and values of all heads (latent attention), or 0."""
    shared_key_dim: int = 0
    """Features of a key that all heads share (latent attention)."""
    other_weights: int = 0
    """Weights of products beside those that the other sizes say, which every position passes."""
    adapters: tuple[LowRank, ...] = ()
    """Of its linears; all else of the module is then frozen, and it does not count as trainable."""
    rounded: Rounded | None = None
    """Which of its linears multiply in float8."""
    parameters: int = 0
    """All of the layer, with biases, norms and adapters; 0: those of its matrix products."""


class LatentWork(NamedTuple):
    """Operators of one kind in an autoencoder's first half; numbers are of a generator's patch."""

    kind: Literal["matmul", "norm", "activation", "elementwise"]
    """Convolutions are products."""
    flops: float
    elements: float
    """Read and written, without weights."""
    calls: int
    """For frames that are encoded together."""


class LatentSizes(NamedTuple):
    """A frozen autoencoder whose latents a generator draws."""

    work: tuple[LatentWork, ...]
    pair_flops: float
    """Of attention, for every pair of patches of a frame."""
    attentions: int
    attended: float
    """Elements that these read and write, of a patch."""
    live: float
    """Most elements of a patch that are there at a time."""
    encode_batch_size: int
    encoder_parameters: int
    decoder_parameters: int
    values: int
    """Latents of a patch."""
    pixels: int
    """Pixel values of a patch."""
    noise: int
    """Random numbers that come with a patch."""


@dataclass(frozen=True)
class ModuleDescription:
    """A modality module as the planners see it: layers and what is around them."""

    name: str
    kind: Literal["llm", "encoder", "generator"]
    layers: tuple[LayerDescription, ...]
    pre_flops_per_unit: int
    """Forward FLOPs per unit (token or patch) before the layers, e.g. the patch embedding."""
    post_flops_per_unit: int
    """Forward FLOPs per output unit after the layers: an encoder's connector per token, the LM
    head per target, a generator's output per patch."""
    parameters: int
    trainable: bool = True
    connector_trainable: bool = True
    """Whether the connector is trained: an encoder's is part of post_flops_per_unit, a generator's
    has context_flops_per_unit."""
    connector_adapters: tuple[LowRank | None, ...] = ()
    """Encoders: of each of the connector's linears, in order, what an adapter adds to it; all else
    of the connector is frozen then. Empty: there are none."""
    connector_norm: bool = False
    """Whether an encoder's connector begins with a norm that has weights."""
    connector_linears: int = 2
    """How many of `post_linears`, the last ones, are an encoder's connector's."""
    patches_per_token: int = 1
    """Patches that become one output token (encoders)."""
    tied: bool = False
    """Whether input and output embeddings are one weight (LLMs)."""
    pre_linears: tuple[tuple[int, int], ...] = ()
    """(inputs, outputs) of the matrix products in `pre_flops_per_unit`; for their traffic only."""
    post_linears: tuple[tuple[int, int], ...] = ()
    """The same for `post_flops_per_unit`."""
    pre_parameters: int = 0
    """Parameters before the layers: patch embedding, or the LLM's table of embeddings."""
    post_parameters: int = 0
    """Parameters after the layers: connector, or final norm and head, tied or not."""
    loss_rows: int = 0
    """LLMs: targets whose logits and gradients are computed at a time, in forward; 0: all later."""
    sharded_loss_rows: int = 0
    """LLMs: `loss_rows` if tensor-parallel ranks share the vocabulary and `loss_rows` is 0."""
    taps: tuple[int, ...] = ()
    """Encoders: layers whose outputs travel on to the connector beside the hidden states, and
    leave it as further blocks of features. LLMs: layers behind which one of these is added."""
    value_bytes: int = 4
    """Of a value that a step's microbatches hold for the module: pixels are bytes until they are
    read, a generator's come with float32 noise."""
    extra_tokens: int = 0
    """Positions per image in addition to its patches: a class token (encoders)."""
    dummy_patches: int = 0
    """Patches of the dummy image that a microbatch without images gets (encoders)."""
    context_flops_per_unit: int = 0
    """Generators: forward FLOPs of the connector per context token, before the layers."""
    flops_per_image: int = 0
    """Generators: forward FLOPs per image before the layers, whatever its size (time embedding)."""
    latents: LatentSizes | None = None
    """Generators: the frozen autoencoder before them; None: they draw pixels. Its parameters are
    among those before and after the layers."""
    keeps_slices: bool = True
    """Whether under sequence parallelism a rank has a slice of the sequence between its layers."""

    @property
    def given_parameters(self) -> tuple[int, int]:
        """Of an autoencoder, never trained: before the layers, and after them."""
        if self.latents is None:
            return 0, 0
        return self.latents.encoder_parameters, self.latents.decoder_parameters
