"""Autoencoders of the diffusers class `AutoencoderKL`, whose latents a generator produces.

This module builds the two halves in `torchmm.extensions.generation.latents` from
`[model.generator.vae]` of the recipe, together with the cost of encoding. The cost is counted in
one run of the encoder on the meta device. Published autoencoders of other classes (for videos, or
without a distribution) have different latents and are not supported.
"""

from __future__ import annotations

import difflib
import inspect
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from torchmm.common.errors import ConfigError, describe_load_error
from torchmm.common.layers import AutoencoderOperators, AutoencoderSizes
from torchmm.extensions.generation.latents import LatentDecoder, LatentEncoder, LatentSpec
from torchmm.models.hf.config_values import MODEL_ERRORS, value_problems
from torchmm.models.layered import WeightFiles
from torchmm.recipe.model_section import AutoencoderConfig

CLASS = "AutoencoderKL"
SECTION = "[model.generator.vae]"
MEASURED_PATCHES = 4
"""Rows and columns of patches of the image whose encoding is measured.

The cost of convolutions is proportional to the number of patches. Attention is counted separately.
"""
AUTOENCODER_FILES = WeightFiles(
    renames=(
        (r"(?=(encoder|quant_conv)\.)", "latent_encoder."),
        (r"(?=(decoder|post_quant_conv)\.)", "latent_decoder."),
    ),
    # Files from before 2023 have other names for the projections of attention.
    legacy_names=(
        (r"(attentions\.\d+)\.query\.", r"\1.to_q."),
        (r"(attentions\.\d+)\.key\.", r"\1.to_k."),
        (r"(attentions\.\d+)\.value\.", r"\1.to_v."),
        (r"(attentions\.\d+)\.proj_attn\.", r"\1.to_out.0."),
    ),
    hf_prefixes=(("latent_encoder.", ""), ("latent_decoder.", "")),
)


def latent_spec(section: AutoencoderConfig, side: int) -> LatentSpec:
    """Return the complete specification of the autoencoder of a recipe.

    Args:
        section: Section [model.generator.vae] of the recipe.
        side: Rows and columns of latents in a patch of the generator.

    Raises:
        ConfigError: The section has problems. The error lists all of them.
    """
    config = _load(section)
    if problems := value_problems(f"{SECTION} config", config):
        raise ConfigError(problems)
    config = _with_defaults(config)
    files = AUTOENCODER_FILES
    if section.source is not None:
        files = replace(files, source=str(Path(section.source).expanduser()))
    factor = 2 ** (len(config["block_out_channels"]) - 1)
    sampled = section.latent_mode == "sampled"
    sizes = _measure_encoding_cost(config, side, factor, section.encode_batch_size, sampled)
    return LatentSpec(config, side, factor, sampled, files, sizes)


def build_autoencoder(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return the complete diffusers model on the current default device."""
    # The `to` of diffusers is not used. It warns of modules in float32, which FSDP handles.
    vae: Any = AutoencoderKL(**config)
    return nn.Module.to(vae, dtype=dtype)


def build_encoder_and_decoder(
    spec: LatentSpec, dtype: torch.dtype
) -> tuple[LatentEncoder, LatentDecoder]:
    """Return encoder and decoder of an autoencoder on the current default device."""
    autoencoder = build_autoencoder(spec.config, dtype)
    return (
        LatentEncoder(spec, autoencoder.encoder, autoencoder.quant_conv),
        LatentDecoder(spec, autoencoder.decoder, autoencoder.post_quant_conv),
    )


def _load(section: AutoencoderConfig) -> dict[str, Any]:
    """Return the config of the section, which is not checked yet."""
    if section.source is None:
        return dict(section.config or {})
    try:
        reader: Any = AutoencoderKL
        config = reader.load_config(str(Path(section.source).expanduser()), local_files_only=True)
    except (OSError, *MODEL_ERRORS) as error:
        raise ConfigError(
            f"{SECTION} source = {section.source!r} has no readable config.json; use a "
            f"directory with a diffusers autoencoder ({describe_load_error(error)})"
        ) from error
    return {**config, **(section.config or {})}


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the defaults of the class.

    Raises:
        ConfigError: The config has unknown keys or unsupported values.
    """
    name = config.get("_class_name", CLASS)
    if name != CLASS:
        raise ConfigError(f"{SECTION} _class_name = {name!r} is not supported; use {CLASS}")
    known = inspect.signature(AutoencoderKL.__init__).parameters
    written = {key: value for key, value in config.items() if not key.startswith("_")}
    problems = []
    for key in written.keys() - known.keys():
        similar = difflib.get_close_matches(key, known, 1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        problems.append(f"{key!r} is not a key of {CLASS}{hint}")
    full = {key: p.default for key, p in known.items() if key != "self"} | written
    for key, value in {"in_channels": 3, "out_channels": 3, "latents_mean": None}.items():
        if full[key] != value:
            problems.append(f"{key} = {full[key]} is not supported; use {value}")
    blocks = [len(full[f"{way}_block_types"]) for way in ("down", "up")]
    if blocks != [len(full["block_out_channels"])] * 2:
        problems.append(
            f"block_out_channels = {full['block_out_channels']} must have the same length as "
            f"down_block_types ({blocks[0]}) and up_block_types ({blocks[1]})"
        )
    groups = full["norm_num_groups"]
    if any(channels % groups for channels in full["block_out_channels"]):
        problems.append(f"norm_num_groups = {groups} must divide block_out_channels; lower it")
    if not full["scaling_factor"] > 0:
        problems.append(f"scaling_factor = {full['scaling_factor']}: must be above 0")
    if problems:
        raise ConfigError([f"{SECTION} config: {problem}" for problem in problems])
    return {key: value for key, value in full.items() if key in known}


class _OperationCounter:
    """Counter of the operations of an encoder during a forward pass."""

    def __init__(self) -> None:
        self.flops: dict[str, float] = defaultdict(float)
        self.elements: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.attended = 0.0
        self.attentions = 0
        self.widths = 0
        self.live = 0
        self._entered = torch.empty(0)
        """Input of the running block, which is stored until the end of the block."""

    def watch(self, encoder: nn.Module) -> None:
        """Count all modules of an encoder from now on."""
        for part in encoder.modules():
            part.register_forward_hook(self._count)
            if hasattr(part, "resnets"):
                part.register_forward_pre_hook(self._enter)

    def _enter(self, part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._entered = inputs[0]

    def _count(self, part: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        input_elements = inputs[0].numel()
        output_elements = output.numel() if isinstance(output, Tensor) else 0
        held = 0 if inputs[0] is self._entered else self._entered.numel()
        if isinstance(part, nn.Conv2d):
            kernel = part.weight[0].numel()
            self._add("matmul", 2 * output_elements * kernel, input_elements + output_elements)
        elif isinstance(part, nn.Linear):
            self._add(
                "matmul", 2 * output_elements * part.in_features, input_elements + output_elements
            )
        elif isinstance(part, nn.GroupNorm):
            self._add("norm", 0, input_elements + output_elements)
        elif isinstance(part, nn.SiLU | nn.GELU | nn.ReLU | nn.Mish):
            self._add("activation", 0, input_elements + output_elements)
        elif isinstance(part, ResnetBlock2D):
            self._add("elementwise", 0, 3 * output_elements)  # adds the branch and scales the sum
            self._add("elementwise", 0, 2 * output_elements)
            # In addition to the input at the end: both branches if each is new, their sum, the
            # result.
            at_end = 3 if part.conv_shortcut is None else 4
            self.live = max(
                self.live,
                held + 2 * input_elements + output_elements,
                held + input_elements + at_end * output_elements,
            )
        elif isinstance(part, Attention):
            self._add("elementwise", 0, 3 * output_elements)
            attention: Any = part
            width = attention.to_q.out_features
            self.widths += width
            self.attentions += 1
            self.attended += 4 * output_elements // attention.to_out[0].out_features * width
            self.live = max(self.live, held + 6 * output_elements)

    def _add(self, kind: str, flops: float, elements: float) -> None:
        self.flops[kind] += flops
        self.elements[kind] += elements
        self.calls[kind] += 1


def _measure_encoding_cost(
    config: dict[str, Any], side: int, factor: int, encode_batch_size: int, sampled: bool
) -> AutoencoderSizes:
    """Return the cost of encoding per patch of the generator."""
    with torch.device("meta"):
        autoencoder = build_autoencoder(config, torch.float32)
        counter = _OperationCounter()
        pixels = MEASURED_PATCHES * side * factor
        encoder = nn.Sequential(autoencoder.encoder, autoencoder.quant_conv or nn.Identity())
        counter.watch(encoder)
        with torch.no_grad():
            encoder(torch.empty(1, 3, pixels, pixels))
    patches = MEASURED_PATCHES**2
    kinds: tuple[Any, ...] = ("matmul", "norm", "activation", "elementwise")
    values = config["latent_channels"] * side**2
    parts = (
        (autoencoder.encoder, autoencoder.quant_conv),
        (autoencoder.decoder, autoencoder.post_quant_conv),
    )
    encoder_parameters, decoder_parameters = (
        sum(p.numel() for part in half if part is not None for p in part.parameters())
        for half in parts
    )
    return AutoencoderSizes(
        work=tuple(
            AutoencoderOperators(
                kind, counter.flops[kind] / patches, counter.elements[kind] / patches, calls
            )
            for kind in kinds
            if (calls := counter.calls[kind])
        ),
        pair_flops=4 * counter.widths * side**4,  # scores, and sums of values
        attentions=counter.attentions,
        attention_elements=counter.attended / patches,
        peak_elements=counter.live / patches,
        encode_batch_size=encode_batch_size,
        encoder_parameters=encoder_parameters,
        decoder_parameters=decoder_parameters,
        latents_per_patch=values,
        pixels_per_patch=3 * (side * factor) ** 2,
        noise_per_patch=values * (1 + sampled),
    )
