"""Sizes of layers and modules for planning, from which FLOPs, bytes and times are computed.

Modules of `torchmm.models` create them (`describe`), and cost models use them. Cost models do not
depend on Hugging Face configs, in which each model family has different names for the same sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net."""

    key_heads: int
    """Number of query and key heads."""
    value_heads: int
    key_dim: int
    """Features per head of queries and keys."""
    value_dim: int
    filter_width: int
    """Kernel size of the convolution in tokens."""
    interleaved: bool = False
    """Whether two linears compute all values of a key head together, instead of four linears."""


class ConvolutionSizes(NamedTuple):
    """Sizes of a short convolution between two gates. Its width is the hidden size."""

    filter_width: int
    """Kernel size of the convolution in tokens."""


MixerSizes = DeltaSizes | ConvolutionSizes


class AdapterSizes(NamedTuple):
    """Sizes of the adapter of a frozen linear: two trainable matrices and optional magnitudes."""

    inputs: int
    outputs: int
    rank: int
    sharded_dim: Literal["inputs", "outputs"] | None
    """Sharded dimension of the linear under tensor parallelism. None if it is replicated."""
    magnitudes: bool = False


class QuantizedLinear(NamedTuple):
    """Sizes of a frozen linear whose weight is stored in few bits and decoded for each matmul."""

    inputs: int
    outputs: int
    is_sharded: bool
    """Whether tensor-parallel ranks shard the weight. Otherwise it is replicated."""
    value_bytes: float
    """Stored bytes per weight, including scales."""

    def local_weights(self, tensor: int) -> float:
        """Return the number of weights on one tensor-parallel rank."""
        return self.inputs * self.outputs / (tensor if self.is_sharded else 1)


class Float8Linears(NamedTuple):
    """Linears of a layer whose inputs, weights and gradients are cast to float8 for matmuls."""

    linears: tuple[tuple[int, int], ...]
    """(inputs, outputs) of each linear."""
    cast_calls: int
    """Number of operators of a cast."""
    has_float8_matmuls: bool
    """Whether matmuls run in float8, or in the compute dtype (emulated)."""


@dataclass(frozen=True)
class LayerDescription:
    """Sizes of a kind of transformer layer, from which FLOPs and bytes are computed."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    """Intermediate size of the MLP. For experts, the sum over the experts of a token."""
    gated_ffn: bool
    causal: bool
    window: int | None = None
    """Attention window in tokens (LLM) or patches (encoder). None for full attention."""
    cross_attention: bool = False
    """Whether the layer of a generator has a second attention of the same sizes, which reads the
    context. The context has `hidden_size` features after the connector."""
    norm: Literal["rms", "layer", "centered"] = "rms"
    """Kind of norms in the layer. "centered" is the LayerNorm of Cohere: eager, without a bias."""
    norm_place: Literal["before", "behind", "around", "shared"] = "before"
    """Positions of norms: before attention and MLP, after them ("behind"), or both ("around").
    "shared": attention and MLP read the output of one norm."""
    extra_norms: int = 0
    """Number of additional norms over all features."""
    norms_sharing_input: int = 0
    """Number of additional norms that have the same input as a different norm."""
    norm_weight_float32: bool = False
    """Whether norm weights are multiplied with float32 values, which are saved for backward."""
    activation: str = "silu"
    """Activation function of the MLP in Hugging Face. "clamped_silu" is that of GPT-OSS."""
    rotary: bool = True
    """Whether queries and keys have rotary embeddings."""
    rotary_float32: bool = False
    """Whether rotary embeddings are computed in float32, for any compute dtype."""
    qk_norm: bool = False
    """Whether queries and keys are normalized."""
    value_norm: bool = False
    """Whether values are normalized, by norms without weights."""
    value_is_key: bool = False
    """Whether keys and values are the output of one linear, before norms and rotary embeddings."""
    packed_qkv: bool = False
    """Whether one linear computes queries, keys and values."""
    packed_gate_up: bool = False
    """Whether one linear computes gate and up projection."""
    experts: int = 0
    """Number of experts of a router. 0 for a dense MLP."""
    experts_per_token: int = 0
    """Number of experts per token."""
    router_norm: bool = False
    """Whether the router has a norm without weight and scales. It shares its input with a norm."""
    has_eager_scores: bool = False
    """Whether attention scores are eager matmuls (caps, sinks), whose results are not saved."""
    expert_biases: bool = False
    """Whether the linears of experts have biases."""
    router_float32: bool = False
    """Whether the router computes in float32, for any parameter dtype."""
    batched: bool = False
    """Whether images of one size form a batch, instead of a packed sequence."""
    mixer: MixerSizes | None = None
    """Token mixer that replaces attention. None for attention."""
    output_gate: bool = False
    """Whether the query linear also computes a gate of the attention output."""
    shared_ffn_size: int = 0
    """Total intermediate size of shared experts, which all tokens use in addition to `experts`."""
    shared_gate: bool = False
    """Whether the output of shared experts has a gate."""
    value_dim: int = 0
    """Features of a value head. 0: `head_dim`."""
    query_rank: int = 0
    """Features between the two linears that compute queries. 0 for a single linear."""
    key_value_rank: int = 0
    """Features from which keys and values of all heads are computed (latent attention), or 0."""
    shared_key_dim: int = 0
    """Features of the key that all heads share (latent attention)."""
    extra_matmul_weights: int = 0
    """Weights of additional matmuls that all positions use and other sizes do not include."""
    adapters: tuple[AdapterSizes, ...] = ()
    """Adapters of linears. All other parameters of the module are frozen and not trainable."""
    rounded: Float8Linears | None = None
    """Linears with float8 matmuls."""
    quantized: tuple[QuantizedLinear, ...] = ()
    """Frozen linears with weights in few bits. `parameters` counts their weights."""
    parameters: int = 0
    """Number of parameters with biases, norms and adapters. 0: those of matmuls."""


class AutoencoderOperators(NamedTuple):
    """Operators of one kind in the encoder of an autoencoder, per patch of the generator."""

    kind: Literal["matmul", "norm", "activation", "elementwise"]
    """Kind of operators. Convolutions are matmuls."""
    flops: float
    elements: float
    """Elements read and written, without weights."""
    calls: int
    """Number of operators for frames that are encoded together."""


class AutoencoderSizes(NamedTuple):
    """Frozen autoencoder whose latents a generator produces."""

    work: tuple[AutoencoderOperators, ...]
    pair_flops: float
    """FLOPs of attention per pair of patches of a frame."""
    attentions: int
    attention_elements: float
    """Elements per patch that attentions read and write."""
    peak_elements: float
    """Peak number of live elements per patch."""
    encode_batch_size: int
    encoder_parameters: int
    decoder_parameters: int
    latents_per_patch: int
    """Number of latents per patch."""
    pixels_per_patch: int
    """Number of pixel values per patch."""
    noise_per_patch: int
    """Number of random values per patch in the data."""


@dataclass(frozen=True)
class ModuleDescription:
    """Sizes of a modality module for planning: layers, and modules before and after them."""

    name: str
    kind: Literal["llm", "encoder", "generator"]
    layers: tuple[LayerDescription, ...]
    embedding_flops_per_unit: int
    """Forward FLOPs per unit (token or patch) before the layers, such as the patch embedding."""
    head_flops_per_unit: int
    """Forward FLOPs per output unit after the layers: the connector of an encoder per token, the LM
    head per target, the output layer of a generator per patch."""
    parameters: int
    trainable: bool = True
    connector_trainable: bool = True
    """Whether the connector is trainable. That of an encoder is part of `head_flops_per_unit`, that
    of a generator has `context_flops_per_unit`."""
    token_rows_trainable: bool = False
    """Whether rows of new tokens in embedding and head are trained, although the other parameters
    are not `trainable` (LLMs)."""
    connector_adapters: tuple[AdapterSizes | None, ...] = ()
    """Encoders: adapter of each linear of the connector, whose other parameters are frozen. Empty
    without adapters."""
    connector_norm: bool = False
    """Whether the connector of an encoder starts with a norm with weights."""
    connector_linears: int = 2
    """Number of `head_linears`, from the end, that belong to the connector of an encoder."""
    patches_per_token: int = 1
    """Number of patches per output token (encoders)."""
    tied: bool = False
    """Whether input and output embeddings share a weight (LLMs)."""
    embedding_linears: tuple[tuple[int, int], ...] = ()
    """(inputs, outputs) of the matmuls in `embedding_flops_per_unit`, for memory traffic only."""
    head_linears: tuple[tuple[int, int], ...] = ()
    """(inputs, outputs) of the matmuls in `head_flops_per_unit`, for memory traffic only."""
    embedding_parameters: int = 0
    """Number of parameters before the layers: patch embedding, or embedding of the LLM."""
    head_parameters: int = 0
    """Number of parameters after the layers: connector, or final norm and head, tied or not."""
    loss_chunk_targets: int = 0
    """LLMs: targets per chunk of the loss with gradients computed in forward. 0: no chunks."""
    sharded_loss_chunk_targets: int = 0
    """LLMs: `loss_chunk_targets` if tensor-parallel ranks shard the vocabulary and
    `loss_chunk_targets` is 0."""
    deepstack_layers: tuple[int, ...] = ()
    """Encoders: layers whose outputs are passed to the connector in addition to the hidden states.
    They become additional feature blocks. LLMs: layers after which one of these blocks is added."""
    input_value_bytes: int = 4
    """Bytes per input value of the module in a microbatch. Pixels are uint8 until they are needed.
    Those of a generator have float32 noise."""
    extra_tokens: int = 0
    """Additional positions per image besides patches: a class token (encoders)."""
    dummy_patches: int = 0
    """Number of patches of the dummy image in microbatches without images (encoders)."""
    context_flops_per_unit: int = 0
    """Generators: forward FLOPs of the connector per context token, before the layers."""
    flops_per_image: int = 0
    """Generators: forward FLOPs per image before the layers, for any size (time embedding)."""
    latents: AutoencoderSizes | None = None
    """Generators: frozen autoencoder. None if pixels are generated. Its parameters are included in
    those before and after the layers."""
    is_sequence_sharded: bool = True
    """Whether ranks have slices of the sequence between layers with sequence parallelism."""

    @property
    def autoencoder_parameters(self) -> tuple[int, int]:
        """(before the layers, after them) numbers of frozen parameters of the autoencoder."""
        if self.latents is None:
            return 0, 0
        return self.latents.encoder_parameters, self.latents.decoder_parameters
