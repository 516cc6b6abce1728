"""The multimodal model: encoders, whose outputs replace placeholders in the LLM's input, and a
generator, which draws images from the LLM's hidden states.

In a pipeline a rank has stages of it. `MultimodalModel.cut` reduces the model to them in place; all
names stay, so initialising, loading, saving and optimizing need not know about them. A forward then
runs `stages`.

Shape legend: T tokens of the microbatch, K output tokens of one encoder, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from torchmm.common.batch import ImageSpec, Marks, Microbatch, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.common.generated import GeneratorSpec
from torchmm.models.encoders import EncoderModule
from torchmm.models.families.text import TextConventions, Token
from torchmm.models.generator import GeneratorModule
from torchmm.models.layered import LayeredModule, StageRange
from torchmm.models.layers.experts import expert_parts, stacked_weights
from torchmm.models.llm import LlmModule


class SampleSpecs(TypedDict):
    """How data has to prepare samples for a model."""

    text_spec: TextSpec
    image_specs: dict[str, ImageSpec]
    tokenizer: PreTrainedTokenizerBase
    generator_spec: GeneratorSpec | None


class MultimodalModel(nn.Module):
    """Encoders by name, an LLM and perhaps a generator.

    Attributes:
        encoders: name -> encoder with its connector.
        llm: the backbone.
        generator: with its connector; None: the model only writes text.
        composite: the Hugging Face config of the composite model it was built from, if any.
        stages: by module name, what runs: the module itself, or its stages that `cut` left.
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
        # Tuples, which nn.Module does not register: parameters belong to the modules alone, so that
        # names, and with them checkpoints, do not depend on how modules are cut.
        self.stages: dict[str, tuple[LayeredModule, ...]] = {
            module.name: (module,) for module in self.modality_modules()
        }

    def cut(self, stages: Mapping[str, Sequence[StageRange]]) -> None:
        """Reduce the whole model (on the meta device) to the stages of one rank, in place.

        Args:
            stages: the rank's stages by module name, from `stage_ranges`; a module without any
                loses all its parameters.

        Raises:
            ValueError: there is no such module or range, or a weight would be tied across two
                stages of this rank.
        """
        modules = {module.name: module for module in self.modality_modules()}
        if unknown := set(stages) - set(modules):
            raise ValueError(f"unknown modules {sorted(unknown)}; the model has {sorted(modules)}")
        for name, module in modules.items():
            own = stages.get(name, ())
            module.keep_stages(own)
            # A single stage is what is left of the module itself. Several need a view each: they
            # run at different times and have `Skip` in different places.
            views = [module] if len(own) == 1 else [module.stage_view(r) for r in own]
            self.stages[name] = tuple(views)

    def all_stages(self) -> list[LayeredModule]:
        """Everything that runs on this rank: encoders' stages first, the generator's last."""
        return [stage for stages in self.stages.values() for stage in stages]

    def train(self, mode: bool = True) -> MultimodalModel:
        """Also sets the stages, which nn.Module does not know and whose mode is separate."""
        super().train(mode)
        for stage in self.all_stages():
            stage.train(mode)
        return self

    def modality_modules(self) -> list[LayeredModule]:
        """Encoders in the recipe's order, then the LLM, then the generator."""
        return [module for _, module in self.named_modality_modules()]

    def named_modality_modules(self) -> list[tuple[str, LayeredModule]]:
        """The modules with their prefixes in this module's parameter names."""
        named: list[tuple[str, LayeredModule]] = []
        named += ((f"encoders.{e.name}", e) for e in self.encoder_modules())
        named.append(("llm", self.llm))
        if self.generator is not None:
            named.append(("generator", self.generator))
        return named

    def encoder_modules(self) -> list[EncoderModule]:
        """Encoders in the recipe's order."""
        return [e for e in self.encoders.values() if isinstance(e, EncoderModule)]

    def encode(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Outputs of every encoder, (K, D) by name.

        An encoder without images in the microbatch runs on a dummy image, so that every rank
        joins its collectives; the LLM multiplies that output by zero.
        """
        device = microbatch.input_ids_T.device
        shown = microbatch.values().encoders
        return {
            e.name: e(shown.get(e.name) or e.dummy_inputs(device)) for e in self.encoder_modules()
        }

    def forward(self, microbatch: Microbatch) -> Tensor:
        """float32 scalar: sum of the cross entropies of all targets."""
        return self.losses(microbatch)["llm"]

    def losses(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """float32 scalars by module: "llm", the sum of the cross entropies of all targets, and
        "generator", the sum over images of their mean squared errors.

        A generator without images in the microbatch runs on a dummy image, which does not count.
        """
        output = self.llm(microbatch, self.encode(microbatch))
        if self.generator is None:
            return {"llm": output}
        loss, context_KD = output
        drawn = microbatch.values().generator
        inputs = drawn or self.generator.dummy_inputs(context_KD.device)
        return {"llm": loss, "generator": self.generator(inputs, context_KD)}

    def tied_copies(self) -> dict[str, str]:
        """Names of parameters of which another rank has the original: {name: its name}."""
        return {
            f"{prefix}.{copy}": f"{prefix}.{original}"
            for prefix, module in self.named_modality_modules()
            for copy, original in module.tied_copies().items()
        }

    def tied_copy_parameters(self) -> set[nn.Parameter]:
        """The parameters `tied_copies` names: not counted again in norms and sums."""
        return {self.get_parameter(name) for name in self.tied_copies()}

    def layer_matrices(self) -> set[nn.Parameter]:
        """Weights of layers that are a matrix, or one for each expert; what experts have besides
        are stacked biases."""
        layers = [layer for stage in self.all_stages() for layer in stage.layers]
        parts = list(expert_parts(layers))
        flat = {p for layer in layers for p in layer.parameters() if p.ndim == 2}
        flat -= {p for part in parts for p in part.parameters()}
        return flat.union(*map(stacked_weights, parts))

    def parameter_counts(self) -> dict[str, tuple[int, int]]:
        """Parameters by module name: (all, trainable)."""
        counts: dict[str, tuple[int, int]] = {}
        for name, parameter in self.named_parameters():
            module = module_of(name)
            every, trainable = counts.get(module, (0, 0))
            size = parameter.numel()
            counts[module] = (every + size, trainable + size * parameter.requires_grad)
        return counts

    def sample_specs(self, tokenizer: PreTrainedTokenizerBase) -> SampleSpecs:
        """How data has to prepare samples, as `open_samples` and `build_loader` take it.

        Raises:
            ConfigError: as `text_spec`.
        """
        return SampleSpecs(
            text_spec=self.text_spec(tokenizer),
            image_specs=self.image_specs(),
            tokenizer=tokenizer,
            generator_spec=self.generator_spec(),
        )

    def image_specs(self) -> dict[str, ImageSpec]:
        """By encoder name: how data has to prepare images."""
        return {e.name: e.image_spec() for e in self.encoder_modules()}

    def generator_spec(self) -> GeneratorSpec | None:
        """Return how data prepares images to generate, or None without a generator."""
        return self.generator.images if self.generator else None

    def text_spec(self, tokenizer: PreTrainedTokenizerBase) -> TextSpec:
        """How data has to prepare text.

        Raises:
            ConfigError: the tokenizer does not fit the LLM or lacks the placeholder.
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
            for token in dict.fromkeys(_every_mark(self.text))
            if isinstance(token, Token) and token.needed and token.text not in vocabulary
        ]
        if problems:
            raise ConfigError(problems)
        pad = tokenizer.pad_token_id
        row_end = self.text.row_end
        return TextSpec(
            vocab_size=vocab_size,
            image_token_id=image_token_id,
            image_prefix=_marks(self.text.prefix, vocabulary),
            image_suffix=_marks(self.text.suffix, vocabulary),
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
            sound_prefix=_marks(self.text.sound_prefix, vocabulary),
            sound_suffix=_marks(self.text.sound_suffix, vocabulary),
            around_sounds=self.text.around_sounds,
        )

    def image_token_id(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Id of the placeholder; None without encoders.

        Raises:
            ConfigError: the tokenizer does not know the token.
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


def _every_mark(text: TextConventions) -> tuple[int | str | Token, ...]:
    ends = () if text.row_end is None else (text.row_end,)
    return *text.prefix, *text.suffix, *ends, *text.sound_prefix, *text.sound_suffix


def _marks(written: tuple[int | str | Token, ...], vocabulary: Mapping[str, int]) -> Marks:
    return tuple(
        vocabulary.get(mark.text, mark.text) if isinstance(mark, Token) else mark
        for mark in written
    )


def module_of(fqn: str) -> str:
    """Module name of a parameter of `MultimodalModel`: "llm", "NAME" or "NAME.connector".

    NAME is that of an encoder, or "generator".
    """
    first, _, rest = fqn.partition(".")
    if first == "llm":
        return "llm"
    assert first in ("encoders", "generator"), fqn
    name, part, *_ = (fqn if first == "generator" else rest).split(".")
    return f"{name}.connector" if part == "connector" else name


def materialize(model: MultimodalModel, device: torch.device | str) -> None:
    """Allocate memory for a model on the meta device, without values; restores ties."""
    model.to_empty(device=device)
    for module in model.modality_modules():
        module.tie_parameters()
