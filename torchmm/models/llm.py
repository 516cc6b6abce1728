"""The LLM backbone: a complete Hugging Face causal LM with the interface of `LayeredModule`.

The Hugging Face forward runs unmodified, so that details of each family apply (soft caps, scales,
rotary variants). Calling the layers directly would skip these details. The input are embeddings, in
which encoder outputs replace the placeholders. Logits are computed only for positions with a
target.

Shape legend: T tokens of the microbatch, K output tokens of one encoder, L positions with logits,
N positions of a chunk of the loss, D features, B DeepStack features (see `layers.deepstack`),
V vocabulary, A answers of preference pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from torchmm.common.batch import IGNORE_TARGET, Microbatch
from torchmm.common.device_copies import to_device
from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.common.module_names import VISION
from torchmm.common.sequence_slices import SlicedMicrobatch, full_sequence
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.llms.matmul_shapes import find_attention, layer_matmul_sizes
from torchmm.models.hf.config import layer_config
from torchmm.models.hf.float32 import float32_names, keep_in_float32
from torchmm.models.layered import LayeredModule, NewRows, StageRange, WeightFiles
from torchmm.models.layers.attention import Segments, image_blocks, prompt_blocks
from torchmm.models.layers.deepstack import AddFeatures, deepstack_features
from torchmm.models.layers.experts import ExpertLoads, balance_routers, has_experts
from torchmm.models.layers.kv_cache import PackedCache
from torchmm.models.layers.loss import (
    MIN_CHUNKED_VOCABULARY,
    NO_TERMS,
    ChunkHead,
    RowLosses,
    chunk_rows,
    cross_entropy_in_chunks,
    row_cross_entropies,
    summed_cross_entropy,
)
from torchmm.models.layers.rotary import RotaryLimits, sample_frequencies
from torchmm.models.layers.sequence_exchange import SequenceRanks
from torchmm.models.source_losses import SourceLosses
from torchmm.recipe.model_section import NewTokens

StageInput = dict[str, Tensor] | Tensor | tuple[Tensor, ...]
"""Input of a stage: encoder outputs by name, or the output of the previous stage."""
AnswerLoss = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function that returns the summed loss of preference pairs, a float32 scalar.

Its arguments have the shape (A,), A = 2 x pairs, in the order of `Microbatch.answers_T`:
log-probabilities of the answers, their numbers of targets (0 in corrupt samples), and the
log-probabilities under the reference model, or None without a reference.
"""


_QUERY_NORMS = ("q_norm", "q_layernorm")


class LlmModule(LayeredModule):
    """The embedding, layers, head and loss of the LLM.

    Args:
        config: Config of the causal LM, or of the multimodal model (see `LlmFamily.build`).
        family: Model family of the LLM.
        dtype: dtype of the parameters.
        weights: Location and names of the pretrained weights.
        feeds_generator: Whether a generator reads the hidden states of the LLM.
        chunked_loss: Whether to always compute the loss in chunks of targets. Logits of all targets
            are then never stored at once.

    Attributes:
        trained_token_ids: Tokens whose rows are trained, although the other rows are frozen.
        sequence_ranks: Context-parallel ranks that share each packed sequence with this rank. The
            microbatches are then slices (`torchmm.common.sequence_slices`). None without them.
        answer_loss: Loss of preference pairs. None: cross entropy of the targets.

    Raises:
        ConfigError: The loss of this LLM cannot be computed in chunks.
    """

    kind = "llm"
    forward_methods = ("logits", "answer_log_probs")

    def __init__(
        self,
        config: PreTrainedConfig,
        family: LlmFamily,
        dtype: torch.dtype,
        weights: WeightFiles,
        feeds_generator: bool = False,
        chunked_loss: bool = False,
    ) -> None:
        super().__init__("llm", weights)
        self.feeds_generator = feeds_generator
        self.sequence_ranks: SequenceRanks | None = None
        self.answer_loss: AnswerLoss | None = None
        self.deepstack_layers = tuple(range(family.deepstack_layers))
        self.dtype = dtype
        self.config = config
        self.text_config = config.get_text_config()
        self.family = family = family.variant(self.text_config)
        self.supports_tensor_parallel = family.is_registered
        self.rotary_limits = RotaryLimits(self.text_config)
        self.linears_outside_layers = (
            (),
            ((self.text_config.hidden_size, self.text_config.vocab_size),),
        )
        # Copied, because building writes dtype and attention function into the config.
        self.backbone = family.build(copy.deepcopy(config), dtype)
        keep_in_float32(self.backbone, float32_names(self.backbone, dtype))
        self.text_fqn = f"backbone.{family.text_model}"
        self.layers_fqn = f"{self.text_fqn}.{family.layers}"
        self.loss_chunk_targets = chunk_rows(self.text_config.vocab_size) if chunked_loss else 0
        if chunked_loss and not self._has_linear_head:
            raise ConfigError(
                f"[model] chunked_loss = true: the head of {self.text_config.model_type!r} is "
                "not a linear layer without bias; set it to false"
            )
        head = f"backbone.{family.head}.weight"
        table = f"{self.text_fqn}.{family.embedding}.weight"
        self._tied = self.get_parameter(head) is self.get_parameter(table)
        self._tie = {head: table}
        # Read now from all layers: `reduce_to_stages` replaces layers of other stages, and layers
        # may differ in type.
        all_layers = self._layer_list()
        _check_submodules(all_layers, family, self.text_config.model_type)
        self._has_layer_norm = any(isinstance(part, nn.LayerNorm) for part in all_layers.modules())
        self._has_qk_norm = any(
            name.endswith(_QUERY_NORMS) for name, _ in all_layers.named_modules()
        )
        self.balance = balance_routers(all_layers, self.text_config)
        self.expert_loads = ExpertLoads(all_layers)
        self.source_losses = SourceLosses()
        self.loss_terms = NO_TERMS
        self.trained_token_ids: tuple[int, ...] = ()
        self._view_of: tuple[LlmModule, ...] = ()
        """Module with the loss settings, if this module is one of its stages. Not registered."""
        self._experts = [has_experts(layer) for layer in all_layers]
        self._windows = [
            _sliding_window(i, layer, self.text_config) for i, layer in enumerate(all_layers)
        ]
        self._sizes = [
            layer_matmul_sizes(layer, layer_config(self.text_config, i), family)
            for i, layer in enumerate(all_layers)
        ]

    @property
    def hf(self) -> PreTrainedModel:
        # The config of a multimodal model may lack keys that its text config has.
        return self.backbone if self.config is self.text_config else self.text_model

    @property
    def text_model(self) -> Any:
        """The submodule of the backbone with embedding, layers and final norm."""
        return self.get_submodule(self.text_fqn)

    @property
    def embedding(self) -> Any:
        """The token embedding."""
        return self.text_model.get_submodule(self.family.embedding)

    @property
    def head(self) -> Any:
        """The output head, which computes the logits."""
        return self.backbone.get_submodule(self.family.head)

    @property
    def _has_linear_head(self) -> bool:
        """True if the head is a linear layer without a bias."""
        return type(self.head) is nn.Linear and self.head.bias is None

    def chunk_sharded_loss(self) -> None:
        """Compute the loss in chunks if tensor-parallel ranks share a large vocabulary.

        Without chunks, all logits are all-gathered and cast to float32, which is slower and uses
        more memory. The call has no effect if the head is not a linear layer without a bias.
        """
        vocab_size = self.text_config.vocab_size
        if vocab_size >= MIN_CHUNKED_VOCABULARY and self._has_linear_head:
            self.sharded_loss_chunk_targets = chunk_rows(vocab_size)

    def build_without_adapters(self) -> LlmModule:
        module = LlmModule(
            self.config,
            self.family,
            self.dtype,
            self.weights,
            self.feeds_generator,
            self.loss_chunk_targets > 0,
        )
        module.sharded_loss_chunk_targets = self.sharded_loss_chunk_targets
        return module

    def stage_view(self, stage: StageRange) -> LayeredModule:
        """Return a stage, which reads the loss settings of this module."""
        view = super().stage_view(stage)
        assert isinstance(view, LlmModule)
        view._view_of = (self,)
        view.trained_token_ids = self.trained_token_ids
        return view

    def add_tokens(self, tokens: NewTokens | None, stored: int) -> None:
        """Set the initial rows of new tokens in the embedding and the head.

        Args:
            tokens: Ids of the tokens, or None without new tokens.
            stored: Number of rows in the weight files.

        Raises:
            ConfigError: Other parameters depend on the size of the vocabulary.
        """
        if tokens is None:
            return
        names = (*self._tie.values(), *self._tie)
        size = self.text_config.vocab_size
        others = [
            name
            for name, parameter in self.named_parameters()
            if parameter.shape[0] == size != stored and name not in names
            if not name.startswith(f"{self.layers_fqn}.")
        ]
        if others or not self._has_linear_head:
            raise ConfigError(
                f"model.new_tokens: {self.text_config.model_type!r} is not supported, because "
                f"{others[0] if others else 'its head'} is not a matrix without bias that has one "
                "row per token; use tokens of the tokenizer"
            )
        new_rows = NewRows(names, stored, tokens.known, tokens.added)
        self.weights = replace(self.weights, new_rows=new_rows)

    def train_token_rows(self, token_ids: Sequence[int]) -> None:
        """Train only these rows of the embedding and the head, whose other rows are frozen."""
        self.trained_token_ids = tuple(token_ids)
        for name in self.token_weights:
            self.get_parameter(name).requires_grad_(True)

    @property
    def token_weights(self) -> tuple[str, ...]:
        """Names of embedding and head if only rows of new tokens are trained."""
        return (*self._tie.values(), *self._tie) if self.trained_token_ids else ()

    def tied_parameters(self) -> dict[str, str]:
        return self._tie if self._tied and self.is_first and self.is_last else {}

    def tied_replicas(self) -> dict[str, str]:
        return self._tie if self._tied and self.is_last and not self.is_first else {}

    def reduce_to_stages(self, stages: Sequence[StageRange]) -> None:
        super().reduce_to_stages(stages)
        has_full_stage = any(stage.has_pre and stage.has_post for stage in stages)
        if self._tied and self.is_first and self.is_last and not has_full_stage:
            raise ValueError(
                f"{self.name}: embedding and head are tied, but belong to two stages of the "
                "same rank; put the first and the last stage on different ranks, or merge "
                "them"
            )
        if self.family.embedding_scale_attribute and not self.is_first:
            setattr(self.text_model, self.family.embedding_scale_attribute, 1.0)

    def _pre_fqns(self) -> tuple[str, ...]:
        return (f"{self.text_fqn}.{self.family.embedding}",)

    def _post_fqns(self) -> tuple[str, ...]:
        norm = self.family.final_norm
        return (*((f"{self.text_fqn}.{norm}",) if norm else ()), f"backbone.{self.family.head}")

    def _tensor_parallel_styles(self) -> dict[str, str]:
        text = self.text_fqn
        plan = self.text_config.base_model_tp_plan or {}
        styles = {f"{text}.{pattern}": style for pattern, style in plan.items()}
        of_family = self.family.tensor_parallel
        styles |= {f"{self.layers_fqn}.*.{part}": style for part, style in of_family.items()}
        styles |= {f"{self.layers_fqn}.*.{norm}": "sequence" for norm in self.family.norms}
        styles[f"{text}.embed_tokens"] = "embedding"
        styles["backbone.lm_head"] = "colwise_gather_output"
        return {pattern: style for pattern, style in styles.items() if style}

    def _describe_layer(self, index: int) -> LayerDescription:
        c = layer_config(self.text_config, index)
        named = (getattr(c, name, None) for name in ("hidden_act", "hidden_activation"))
        activation = self.family.activation or next(filter(None, named), "silu")
        sizes = self._sizes[index]
        return LayerDescription(
            hidden_size=c.hidden_size,
            causal=True,
            window=self._windows[index],
            activation=activation,
            packed_qkv=self.family.packed_qkv,
            packed_gate_up=self.family.tensor_parallel.get("mlp") == "packed_gate_up",
            norm=self.family.norm_kind or ("layer" if self._has_layer_norm else "rms"),
            norm_place=self.family.norm_place,
            extra_norms=self.family.extra_norms,
            norms_sharing_input=self.family.norms_sharing_input,
            router_norm=self.family.router_norm,
            norm_weight_float32=self.family.norm_weight_float32,
            rotary_float32=self.family.rotary_float32,
            qk_norm=self._has_qk_norm and sizes["mixer"] is None,
            **sizes,
        )

    def forward(
        self, microbatch: Microbatch, inputs: StageInput, cache: PackedCache | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss of a microbatch, or the output of this stage.

        Args:
            microbatch: Packed sequence, or the slice of a context-parallel rank.
            inputs: First stage: encoder outputs (K, D) by name. With DeepStack they are
                (K, (1 + taps) D). Outputs of an encoder without images in the microbatch are
                multiplied by zero. Later stages: output of the previous stage.
            cache: Cache of all stages but the last, as for `logits`.

        Returns:
            Last stage: float32 scalar, the *sum* of the cross entropies of all targets, or of the
            losses of all preference pairs. If a
            generator follows, also its context: (K, D) hidden states of the context tokens, or
            (1, D), those of the first token, without images to generate. Earlier stages: hidden
            states (T, D). If later layers add DeepStack features, also these features (K, B).

        Raises:
            ValueError: The outputs of an encoder do not fit its placeholders.
        """
        if not self.is_last:
            output, blocks_KB = self._run_layers(microbatch, inputs, cache)
            hidden_TD = self.sequence_ops.to_next_stage(output.last_hidden_state[0])
            added = len(self.layers) * self.text_config.hidden_size
            if blocks_KB is None or blocks_KB.shape[1] <= added:
                return hidden_TD
            return hidden_TD, blocks_KB[:, added:]  # features that layers of later stages add
        # Not `logits`: FSDP all-gathers before it and would free the parameters after it, in the
        # middle of this forward pass.
        if not self.feeds_generator:
            return self._loss(microbatch, inputs)
        outputs: list[Any] = []  # of the text model; the causal LM returns only logits
        handle = self.text_model.register_forward_hook(lambda _, __, out: outputs.append(out))
        try:
            loss = self._loss(microbatch, inputs)
        finally:
            handle.remove()
        hidden_TD = outputs[0].last_hidden_state[0]
        if microbatch.generator is None:
            return loss, hidden_TD[:1]
        return loss, hidden_TD.index_select(0, microbatch.generator.context_positions_K)

    def _loss(self, microbatch: Microbatch, inputs: StageInput) -> Tensor:
        """Return the loss summed over targets or preference pairs, a float32 scalar."""
        settings = self._view_of[0] if self._view_of else self
        if settings.answer_loss is not None:
            log_probs_A, counts_A = self._answer_log_probs(microbatch, inputs)
            bits_A = microbatch.reference_bits_A
            reference_A = None if bits_A is None else bits_A.view(torch.float32)
            loss = settings.answer_loss(log_probs_A, counts_A, reference_A)
            # Ranks of a packed sequence share the loss, and each has the gradient of its targets.
            ranks = 1 if self.sequence_ranks is None else self.sequence_ranks.size
            return loss - loss.detach() + loss.detach() / ranks
        assert microbatch.answers_T is None, "preference pairs require `answer_loss`"
        positions_L = microbatch.target_positions_L
        targets_L = microbatch.targets_T[positions_L]
        source_losses = settings.source_losses
        terms = settings.loss_terms
        sources_T = microbatch.sources_T if source_losses else None
        losses: RowLosses | None = None if sources_T is None else []
        rows = self.loss_chunk_targets
        if isinstance(self.head.weight, DTensor):
            rows = rows or self.sharded_loss_chunk_targets
        if not rows:
            logits_LV = self._logits(microbatch, inputs, positions_L)
            loss = summed_cross_entropy(logits_LV, targets_L, losses, terms)
        else:
            output, _ = self._run_layers(microbatch, inputs)
            rows_LD = output.last_hidden_state[0].index_select(0, positions_L)
            head = ChunkHead(self.head, rows)
            with self._logits_after_layers(microbatch, type(output), head) as compute_logits:
                loss = cross_entropy_in_chunks(
                    head, compute_logits, rows_LD, targets_L, losses, terms
                )
        if losses and sources_T is not None:
            source_losses.add(torch.cat(losses), sources_T[positions_L])
        return loss

    def answer_log_probs(self, microbatch: Microbatch, inputs: StageInput) -> Tensor:
        """Return the log-probability of each answer of preference pairs, (A,), float32.

        Args:
            microbatch: Packed preference pairs.
            inputs: As in `forward`.
        """
        return self._answer_log_probs(microbatch, inputs)[0]

    def _answer_log_probs(
        self, microbatch: Microbatch, inputs: StageInput
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (A,) and numbers of targets (A,) of answers, float32."""
        assert microbatch.answers_T is not None, "the samples are not preference pairs"
        positions_L = microbatch.target_positions_L
        logits_LV = self._logits(microbatch, inputs, positions_L)
        loss_L = row_cross_entropies(logits_LV, microbatch.targets_T[positions_L])
        values_2L = torch.stack([-loss_L, torch.ones_like(loss_L)])
        sums_2A = values_2L.new_zeros(2, 2 * len(microbatch.meta.samples))
        sums_2A = sums_2A.index_add(1, microbatch.answers_T[positions_L], values_2L)
        if self.sequence_ranks is not None:
            # The sum of all ranks, with the gradient of the targets of this rank.
            sums_2A = sums_2A - sums_2A.detach() + self.sequence_ranks.summed(sums_2A.detach())
        return sums_2A[0], sums_2A[1]

    @contextmanager
    def _logits_after_layers(
        self, microbatch: Microbatch, output: type, head: ChunkHead
    ) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield a function that maps hidden states (1, N, D) to logits (1, N, V).

        The function runs the backbone forward after the text model, with `head` as the head.

        Args:
            microbatch: Packed sequence.
            output: Output class of the text model.
            head: Replacement of the head.
        """
        if not self.family.logits_to_keep:
            yield head
            return

        def compute_logits(rows_1ND: Tensor) -> Tensor:
            text.forward = lambda **_: output(last_hidden_state=rows_1ND)
            positions_N = microbatch.position_ids[..., : rows_1ND.shape[1]]
            return self.backbone(
                inputs_embeds=rows_1ND,
                position_ids=positions_N.unsqueeze(-2),
                **self._disabled_outputs(),
            ).logits

        text = self.text_model
        original_head = self.head
        self.backbone.set_submodule(self.family.head, head)
        try:
            yield compute_logits
        finally:
            self.backbone.set_submodule(self.family.head, original_head)
            text.__dict__.pop("forward", None)

    def logits(
        self,
        microbatch: Microbatch,
        inputs: StageInput,
        positions_L: Tensor,
        cache: PackedCache | None = None,
    ) -> Tensor:
        """Return the logits (L, V) at the given positions, in the compute dtype.

        Args:
            microbatch: Packed sequence.
            inputs: As in `forward`.
            positions_L: (L,), int64, positions within the packed sequence.
            cache: Keys, values and states of previous tokens in the layers of this stage. The first
                microbatch has complete prompts, later microbatches have one new token per prompt.
        """
        return self._logits(microbatch, inputs, positions_L, cache)

    def new_cache(self) -> PackedCache:
        """Return an empty cache for new prompts."""
        return PackedCache(self.text_config)

    def _logits(
        self,
        microbatch: Microbatch,
        inputs: StageInput,
        positions_L: Tensor,
        cache: PackedCache | None = None,
    ) -> Tensor:
        if not self.family.logits_to_keep:
            output, _ = self._run_layers(microbatch, inputs, cache)
            return self.head(output.last_hidden_state[0][positions_L])
        hidden_TD, blocks_KB = self._stage_hidden_states(microbatch, inputs)
        arguments = self._forward_arguments(microbatch, hidden_TD, cache)
        with self._layer_context(microbatch, blocks_KB, cache):
            # Not `[0]`, whose backward copies the gradient of all logits.
            return self.backbone(**arguments, logits_to_keep=positions_L).logits.squeeze(0)

    def _run_layers(
        self, microbatch: Microbatch, inputs: StageInput, cache: PackedCache | None = None
    ) -> tuple[Any, Tensor | None]:
        """Return the text model output and the DeepStack features (K, B), or None without them."""
        hidden_TD, blocks_KB = self._stage_hidden_states(microbatch, inputs)
        arguments = self._forward_arguments(microbatch, hidden_TD, cache)
        with self._layer_context(microbatch, blocks_KB, cache):
            return self.text_model(**arguments), blocks_KB

    def _stage_hidden_states(
        self, microbatch: Microbatch, inputs: StageInput
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states (T, D) and the remaining DeepStack features (K, B), or None."""
        if isinstance(inputs, (Tensor, tuple)):
            hidden_TD, blocks_KB = inputs if isinstance(inputs, tuple) else (inputs, None)
            return self.sequence_ops.from_previous_stage(
                hidden_TD, len(microbatch.input_ids_T)
            ), blocks_KB
        hidden_TD = self._embed(microbatch, inputs)
        if not self.family.deepstack_layers or VISION not in microbatch.encoders:
            return hidden_TD, None
        return hidden_TD, inputs[VISION][:, hidden_TD.shape[1] :]

    @contextmanager
    def _layer_context(
        self, microbatch: Microbatch, blocks_KB: Tensor | None, cache: PackedCache | None
    ) -> Iterator[None]:
        """Enable DeepStack features and rotary frequencies by sample length within the context.

        Args:
            microbatch: Packed sequence.
            blocks_KB: DeepStack features (K, B), or None.
            cache: Cache after `begin_sequence`, or None.

        Raises:
            ValueError: A sample is longer than the RoPE type allows.
        """
        cu_seqlens = microbatch.cu_seqlens
        lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
        sample_lengths = lengths if cache is None else cache.lengths
        longest = max(sample_lengths)
        if problem := self.rotary_limits.problem(longest):
            raise ValueError(problem)
        with ExitStack() as stack:
            stack.enter_context(self._deepstack_context(microbatch, blocks_KB))
            if any(longest > limit for limit in self.rotary_limits.switches):
                lengths_T = torch.tensor(sample_lengths).repeat_interleave(torch.tensor(lengths))
                if isinstance(microbatch, SlicedMicrobatch):
                    start = microbatch.slice_context.start
                    lengths_T = lengths_T[start : start + len(microbatch.input_ids_T)]
                lengths_T = to_device(lengths_T, microbatch.input_ids_T.device)
                stack.enter_context(sample_frequencies(self.text_model, lengths_T))
            yield

    @contextmanager
    def _deepstack_context(
        self, microbatch: Microbatch, blocks_KB: Tensor | None
    ) -> Iterator[None]:
        """Make the layers of this stage add their blocks of the DeepStack features."""
        if blocks_KB is None:
            yield
            return
        blocks = blocks_KB.split(self.text_config.hidden_size, dim=1)
        positions_K = microbatch.encoders[VISION].positions_K
        adds: list[AddFeatures | None] = [None] * (self.family.deepstack_layers - len(blocks))
        for (index, _), block_KD in zip(self.indexed_layers(), blocks, strict=False):
            assert index == len(adds), "blocks of other layers"
            add = partial(self.add_after_layer, index, positions_K=positions_K, rows_KD=block_KD)
            adds.append(add)
        with deepstack_features(self.text_model, adds):
            yield

    def _forward_arguments(
        self, microbatch: Microbatch, hidden_TD: Tensor, cache: PackedCache | None
    ) -> dict[str, Any]:
        head_exchange = None
        if self.sequence_ranks is not None:
            assert isinstance(microbatch, SlicedMicrobatch)
            ranks = microbatch.slice_context.ranks
            head_exchange = self.sequence_ranks.heads(microbatch.cu_seqlens[-1], ranks)
        cache_arguments: dict[str, Any] = {}
        if cache is not None:
            cache.begin_sequence(microbatch.cu_seqlens, hidden_TD.device)
            cache_arguments = {"past_key_values": cache, "use_cache": True}
        return self._disabled_outputs() | {
            **cache_arguments,
            "inputs_embeds": hidden_TD[None],
            "position_ids": microbatch.position_ids.unsqueeze(-2),
            # Hugging Face forwards pass this keyword (`FlashAttentionKwargs`: starts of packed
            # samples) unread to the attention function. The function in `layers.attention` accepts
            # `Segments`, which have more fields than the starts.
            "cu_seq_lens_q": Segments.from_starts(
                microbatch.cu_seqlens,
                hidden_TD.device,
                self._bidirectional_blocks(microbatch),
                self.family.bidirectional == "images in windows",
                head_exchange,
                cache,
            ),
        }

    def _disabled_outputs(self) -> dict[str, Any]:
        """Return the arguments that disable unused outputs of the forward."""
        routes = hasattr(self.text_config, "output_router_logits") and any(self._experts)
        return {"use_cache": False, **({"output_router_logits": False} if routes else {})}

    def _bidirectional_blocks(self, microbatch: Microbatch) -> Tensor | None:
        """Return the blocks with bidirectional attention, (T,), or None without them.

        See `LlmFamily.bidirectional`. T is the length of the unsliced packed sequence.
        """
        if self.family.bidirectional is None:
            return None
        input_ids_T, targets_T = full_sequence(microbatch)
        if self.family.bidirectional != "prompts":
            images_T = input_ids_T == self.family.image_token_id
            return image_blocks(images_T, microbatch.cu_seqlens)
        return prompt_blocks(targets_T != IGNORE_TARGET, microbatch.cu_seqlens)

    def _embed(self, microbatch: Microbatch, features: dict[str, Tensor]) -> Tensor:
        x_TD = self.embedding(microbatch.input_ids_T)
        for name, features_KD in features.items():
            inputs = microbatch.encoders.get(name)
            if inputs is None:
                # This keeps the encoder in the autograd graph: every rank joins its collectives.
                x_TD = x_TD + 0.0 * features_KD.sum()
                continue
            if len(inputs.positions_K) != len(features_KD):
                raise ValueError(
                    f"encoder {name!r} returned {len(features_KD)} tokens for "
                    f"{len(inputs.positions_K)} placeholders (images: {inputs.grids_thw})"
                )
            first_KD = features_KD[:, : x_TD.shape[1]].to(x_TD.dtype)
            if inputs.tile_regions is None:
                x_TD = x_TD.index_copy(0, inputs.positions_K, first_KD)
            else:  # tiles of a downscaled image share tokens
                x_TD = x_TD.index_fill(0, inputs.positions_K, 0)
                x_TD = x_TD.index_add(0, inputs.positions_K, first_KD)
        return x_TD


def _check_submodules(layers: nn.ModuleList, family: LlmFamily, model_type: str) -> None:
    """Check that the layers have the submodules that the family names.

    Releases of transformers sometimes rename submodules.

    Raises:
        ConfigError: A submodule is missing.
    """
    known = {name.partition(".")[2] for name, _ in layers.named_modules()}
    optional = ("", "replicated_with_grad_allreduce")  # unsharded, and norms that configs may omit
    styles = family.tensor_parallel.items()
    required = [
        name
        for name, style in styles
        if style not in optional and not name.startswith(("mlp.", "experts."))
    ]
    # All layers may have the same type, even if the family has two types.
    required = [name for name in required if name.partition(".")[0] in known]
    missing = [name for name in (*family.norms, *required) if name not in known]
    if family.is_registered and any(find_attention(layer) is None for layer in layers):
        missing.append("self_attn")
    if missing:
        raise ConfigError(
            f"layers of {model_type!r} have no {', '.join(missing)} in transformers "
            f"{transformers.__version__}; this family does not support that version, install "
            "5.23"
        )


def _sliding_window(index: int, layer: nn.Module, config: Any) -> int | None:
    """Return the sliding window of a layer in tokens, or None without one."""
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[index] == "full_attention":
        return None  # the attention module may have a window attribute that it does not use
    attention = find_attention(layer)
    if attention is None:
        return None
    return getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
