"""The multimodal model: encoders, the LLM and an optional generator.

    images, audio -> encoder + connector --(K, D)--> LLM --hidden states--> generator -> images
                     text tokens -------------------> LLM -> loss

Encoder outputs replace the embeddings of placeholder tokens. The generator reads hidden states of
the LLM.

With pipeline parallelism, a rank has some stages of the model. `MultimodalModel.reduce_to_stages`
reduces the model to them in place. Parameter names do not change, so that initialization, loading,
saving and optimizers are independent of stages. A forward pass then runs `stages`.

Shape legend: T tokens of the microbatch, K output tokens of one encoder, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from torchmm.common.batch import ImageSpec, MarkerText, Microbatch, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.common.generated import GeneratorSpec
from torchmm.models.encoders import EncoderModule
from torchmm.models.families.text_conventions import TextConventions, Token
from torchmm.models.generator import GeneratorModule
from torchmm.models.layered import LayeredModule, StageRange
from torchmm.models.layers.experts import expert_modules, stacked_weights
from torchmm.models.llm import LlmModule


class SampleSpecs(TypedDict):
    """Settings with which the data pipeline prepares samples for a model."""

    text_spec: TextSpec
    image_specs: dict[str, ImageSpec]
    tokenizer: PreTrainedTokenizerBase
    generator_spec: GeneratorSpec | None


class MultimodalModel(nn.Module):
    """Encoders, an LLM and an optional generator.

    Attributes:
        encoders: Maps names to encoders with connectors.
        llm: LLM backbone.
        generator: Generator with its connector. None for models that generate only text.
        text: Conventions for placeholders and markers in text.
        composite: Hugging Face config of the multimodal model, or None for separate sources.
        stages: Maps module names to the modules that run: the module, or its stages after
            `reduce_to_stages`.
    """

    def __init__(
        self,
        llm: LlmModule,
        encoders: dict[str, EncoderModule],
        text: TextConventions,
        composite: PreTrainedConfig | None = None,
        generator: GeneratorModule | None = None,
    ) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.llm = llm
        self.generator = generator
        assert llm.feeds_generator == (generator is not None)
        self.text = text
        self.composite = composite
        # nn.Module does not register tuples. Parameters are therefore registered only once, and
        # their names and checkpoints do not depend on the split into stages.
        self.stages: dict[str, tuple[LayeredModule, ...]] = {
            module.name: (module,) for module in self.modality_modules()
        }

    def reduce_to_stages(self, stages: Mapping[str, Sequence[StageRange]]) -> None:
        """Reduce the full model (on the meta device) to the stages of one rank, in place.

        Args:
            stages: Maps module names to the stages of the rank, from `stage_ranges`. A module
                without stages loses all its parameters.

        Raises:
            ValueError: A module or range does not exist, or a weight would be tied across two
                stages of this rank.
        """
        modules = {module.name: module for module in self.modality_modules()}
        if unknown := set(stages) - set(modules):
            raise ValueError(f"unknown modules {sorted(unknown)}; the model has {sorted(modules)}")
        for name, module in modules.items():
            ranges = stages.get(name, ())
            module.reduce_to_stages(ranges)
            # A single stage is the reduced module itself. Several stages need one view each,
            # because they run at different times and have `SkippedLayer` at different layers.
            views = [module] if len(ranges) == 1 else [module.stage_view(r) for r in ranges]
            self.stages[name] = tuple(views)

    def all_stages(self) -> list[LayeredModule]:
        """Return all stages of this rank: encoders first, the generator last."""
        return [stage for stages in self.stages.values() for stage in stages]

    def train(self, mode: bool = True) -> MultimodalModel:
        """Set the training mode, also of the stages, which are not registered submodules."""
        super().train(mode)
        for stage in self.all_stages():
            stage.train(mode)
        return self

    def modality_modules(self) -> list[LayeredModule]:
        """Return the encoders in recipe order, then the LLM, then the generator."""
        return [module for _, module in self.named_modality_modules()]

    def named_modality_modules(self) -> list[tuple[str, LayeredModule]]:
        """Return the modules with the prefixes of their parameter names."""
        named: list[tuple[str, LayeredModule]] = []
        named += ((f"encoders.{e.name}", e) for e in self.encoder_modules())
        named.append(("llm", self.llm))
        if self.generator is not None:
            named.append(("generator", self.generator))
        return named

    def encoder_modules(self) -> list[EncoderModule]:
        """Return the encoders in recipe order."""
        return [e for e in self.encoders.values() if isinstance(e, EncoderModule)]

    def encode(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return the outputs (K, D) of the encoders by name.

        An encoder without images in the microbatch runs on a dummy image, so that every rank joins
        the collectives of the encoder. The LLM multiplies this output by zero.
        """
        device = microbatch.input_ids_T.device
        shown = microbatch.values().encoders
        return {
            e.name: e(shown.get(e.name) or e.dummy_inputs(device)) for e in self.encoder_modules()
        }

    def forward(self, microbatch: Microbatch) -> Tensor:
        """Return a float32 scalar, the sum of the cross entropies of all targets."""
        return self.losses(microbatch)["llm"]

    def losses(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return the losses as float32 scalars by module.

        "llm" is the sum of the cross entropies of all targets. "generator" is the sum of the mean
        squared errors of all images. Without images to generate in the microbatch, the generator
        runs on a dummy image with zero loss.
        """
        output = self.llm(microbatch, self.encode(microbatch))
        if self.generator is None:
            return {"llm": output}
        loss, context_KD = output
        images = microbatch.values().generator
        inputs = images or self.generator.dummy_inputs(context_KD.device)
        return {"llm": loss, "generator": self.generator(inputs, context_KD)}

    def tied_replicas(self) -> dict[str, str]:
        """Return tied parameters whose original is on a different rank: {name: original name}."""
        return {
            f"{prefix}.{copy}": f"{prefix}.{original}"
            for prefix, module in self.named_modality_modules()
            for copy, original in module.tied_replicas().items()
        }

    def tied_replica_parameters(self) -> set[nn.Parameter]:
        """Return the parameters of `tied_replicas`, which norms and sums must skip."""
        return {self.get_parameter(name) for name in self.tied_replicas()}

    def layer_matrices(self) -> set[nn.Parameter]:
        """Return the weight matrices of all layers, including stacked expert weights.

        Stacked biases of experts are also two-dimensional, but are not included.
        """
        layers = [layer for stage in self.all_stages() for layer in stage.layers]
        parts = list(expert_modules(layers))
        flat = {p for layer in layers for p in layer.parameters() if p.ndim == 2}
        flat -= {p for part in parts for p in part.parameters()}
        return flat.union(*map(stacked_weights, parts))

    def parameter_counts(self) -> dict[str, tuple[int, int]]:
        """Return {module name: (number of parameters, number of trainable parameters)}."""
        counts: dict[str, tuple[int, int]] = {}
        token_weights = {f"llm.{name}" for name in self.llm.token_weights}
        for name, parameter in self.named_parameters():
            module = module_of(name)
            total, trainable = counts.get(module, (0, 0))
            size = trained = parameter.numel()
            if name in token_weights:
                trained = len(self.llm.trained_token_ids) * parameter.shape[1]
            counts[module] = (total + size, trainable + trained * parameter.requires_grad)
        return counts

    def sample_specs(self, tokenizer: PreTrainedTokenizerBase) -> SampleSpecs:
        """Return the sample settings for `open_samples` and `build_loader`.

        Raises:
            ConfigError: As `text_spec`.
        """
        return SampleSpecs(
            text_spec=self.text_spec(tokenizer),
            image_specs=self.image_specs(),
            tokenizer=tokenizer,
            generator_spec=self.generator_spec(),
        )

    def image_specs(self) -> dict[str, ImageSpec]:
        """Return the image preparation settings by encoder name."""
        return {e.name: e.image_spec() for e in self.encoder_modules()}

    def generator_spec(self) -> GeneratorSpec | None:
        """Return the preparation settings of images to generate, or None without a generator."""
        return self.generator.images if self.generator else None

    def text_spec(self, tokenizer: PreTrainedTokenizerBase) -> TextSpec:
        """Return the text preparation settings.

        Raises:
            ConfigError: The tokenizer does not fit the LLM or lacks the placeholder.
        """
        vocab_size = self.llm.text_config.vocab_size
        problems = []
        if len(tokenizer) > vocab_size:
            problems.append(
                f"[model] tokenizer has {len(tokenizer)} tokens but the LLM has only "
                f"{vocab_size} embeddings; use the tokenizer of the LLM"
            )
        image_token_id = self.image_token_id(tokenizer)
        if image_token_id is not None and image_token_id >= vocab_size:
            problems.append(
                f"[model] image_token has id {image_token_id}, but the LLM has {vocab_size} "
                "embeddings; use a token of the vocabulary that never occurs in text"
            )
        vocabulary = tokenizer.get_vocab()
        problems += [
            f"[model] the tokenizer has no token {token.text!r}, which is next to every image "
            "or audio; use the tokenizer of the model"
            for token in dict.fromkeys(_all_markers(self.text))
            if isinstance(token, Token) and token.is_required and token.text not in vocabulary
        ]
        if problems:
            raise ConfigError(problems)
        pad = tokenizer.pad_token_id
        row_end = self.text.row_end
        return TextSpec(
            vocab_size=vocab_size,
            image_token_id=image_token_id,
            image_prefix=_resolve_markers(self.text.prefix, vocabulary),
            image_suffix=_resolve_markers(self.text.suffix, vocabulary),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0 if pad is None else pad,
            positions="mrope" if self.text.mrope else "1d",
            video_token_id=self.text.video_token_id,
            tokens_per_second=self.text.tokens_per_second,
            clip_times=self.text.clip_times,
            clip=self.text.clip,
            row_end_id=None if row_end is None else vocabulary[row_end.text],
            sound_token_id=self.text.sound_token_id,
            sound_prefix=_resolve_markers(self.text.sound_prefix, vocabulary),
            sound_suffix=_resolve_markers(self.text.sound_suffix, vocabulary),
            around_sounds=self.text.around_sounds,
            audio_chunk_tokens=self.text.audio_chunk_tokens,
            boxes=self.text.boxes,
        )

    def image_token_id(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Return the id of the placeholder token, or None without encoders.

        Raises:
            ConfigError: The token is not in the tokenizer.
        """
        token = self.text.image_token
        if not self.encoders:
            return None
        if isinstance(token, int):
            return token
        index = tokenizer.get_vocab().get(token)
        if index is None:
            raise ConfigError(
                f"[model] image_token = {token!r} is not in the tokenizer; use a token of the "
                "tokenizer that never occurs in text"
            )
        return index


def _all_markers(text: TextConventions) -> tuple[int | str | Token, ...]:
    row_ends = () if text.row_end is None else (text.row_end,)
    return *text.prefix, *text.suffix, *row_ends, *text.sound_prefix, *text.sound_suffix


def _resolve_markers(
    written: tuple[int | str | Token, ...], vocabulary: Mapping[str, int]
) -> MarkerText:
    return tuple(
        vocabulary.get(marker.text, marker.text) if isinstance(marker, Token) else marker
        for marker in written
    )


def module_of(fqn: str) -> str:
    """Return the module of a parameter of `MultimodalModel`: "llm", "NAME" or "NAME.connector".

    NAME is the name of an encoder, or "generator".
    """
    first, _, remaining = fqn.partition(".")
    if first == "llm":
        return "llm"
    assert first in ("encoders", "generator"), fqn
    name, part, *_ = (fqn if first == "generator" else remaining).split(".")
    return f"{name}.connector" if part == "connector" else name


def materialize(model: MultimodalModel, device: torch.device | str) -> None:
    """Allocate uninitialized memory for a model on the meta device, and restore tied weights."""
    model.to_empty(device=device)
    for module in model.modality_modules():
        module.tie_parameters()
