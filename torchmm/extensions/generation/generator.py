"""Image or video generator after the LLM: a connector from its hidden states, and a DiT.

One forward pass is one denoising step. Its inputs are noisy patches, their times and the context,
and its outputs are velocities or the flow-matching loss. Images of a sub-microbatch form a batch.
If their numbers of patches or context tokens differ, shorter ones are padded and masked. Stages
send the hidden states, the context after the connector and the embedded times, because all layers
require all three.

Shape legend: N images, P patches of the largest image, L tokens of the longest context, K context
tokens of all images, D features, V values of a patch, E features of an embedded time; "A" is the
number of concatenated patches of all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from torchmm.common.device_copies import to_device
from torchmm.common.generated import DUMMY_IMAGE, GeneratedMeta, GeneratorInputs, GeneratorSpec
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.extensions.generation.latents import LatentDecoder, LatentEncoder, LatentSpec
from torchmm.models.generator import GeneratorModule, MessageShapes
from torchmm.models.layered import WeightFiles, WeightInitializer

if TYPE_CHECKING:
    from torchmm.extensions.generation.families.pixart import PixArtFamily

PADDING_BIAS = -10000.0
"""Value that is added to attention scores of padding, as in diffusers."""
VAE = "vae"
"""Subdirectory of the autoencoder in an export, as in diffusers pipelines."""


@dataclass(frozen=True)
class DitSpec:
    """Specification of a generator module without weights."""

    family: PixArtFamily
    class_name: str
    """Class name in diffusers."""
    config: dict[str, Any]
    """Complete config, see `PixArtFamily.complete`."""
    images: GeneratorSpec
    dtype: torch.dtype
    connector_from_files: bool = False
    """Whether the weight files have the connector. Otherwise it is initialized randomly."""
    latents: LatentSpec | None = None
    """Autoencoder whose latents are generated. If None, pixels are generated."""

    @property
    def llm_hidden_size(self) -> int:
        """Number of features of a context token before the connector."""
        return self.config["caption_channels"]

    @property
    def hidden_size(self) -> int:
        """Hidden size D."""
        return self.config["num_attention_heads"] * self.config["attention_head_dim"]


class StageTensors(NamedTuple):
    """Tensors that a stage sends to the next stage."""

    hidden_NPD: Tensor
    context_KD: Tensor
    time_NE: Tensor
    latents_AV: Tensor | None = None
    """Target latents without a gradient. None if pixels are generated."""


class _Initializer:
    """Initializer of a diffusers model, whose classes have no method for initial values."""

    def __init__(self, family: PixArtFamily) -> None:
        self._family = family

    def _init_weights(self, module: nn.Module) -> None:
        self._family.initialize(module)


class DitModule(GeneratorModule):
    """A diffusion transformer, and the connector from the hidden states of the LLM.

    If it generates latents, it includes the encoder and the decoder of a frozen autoencoder.
    """

    supports_comm_overlap = (
        False  # cross attention reads two inputs, of which only one is all-gathered
    )

    def __init__(self, spec: DitSpec, weights: WeightFiles) -> None:
        super().__init__(weights, spec.images, spec.llm_hidden_size)
        self.spec = spec
        self.is_connector_new = not spec.connector_from_files
        self.family = spec.family
        self.layers_fqn = f"dit.{spec.family.layers}"
        self.dit: Any = self.build_transformer()
        self.connector: Any
        self.output: Any
        self.connector, self.output = spec.family.detach_connector(self.dit, spec.dtype)
        embedding = self.dit.pos_embed.proj.weight
        head = self.dit.proj_out.weight
        before = (embedding[0].numel(), len(embedding))
        self.linears_outside_layers = (before,), ((head.shape[1], len(head)),)
        self.latent_encoder: LatentEncoder | None = None
        self.latent_decoder: LatentDecoder | None = None
        if spec.latents is not None:
            self.latent_encoder, self.latent_decoder = spec.family.build_encoder_and_decoder(
                spec.latents, spec.dtype
            )
            self.extra_weights = (spec.latents.files,)
        self._flops_per_image = spec.family.flops_per_image(self.dit)
        linears = (m for m in self.connector.modules() if isinstance(m, nn.Linear))
        self._context_flops = sum(2 * linear.weight.numel() for linear in linears)
        self._positions: dict[tuple[int, int, int], Tensor] = {}

    @property
    def hf(self) -> WeightInitializer:
        return _Initializer(self.family)

    def build_transformer(self) -> Any:
        """Return the complete diffusers model on the current default device."""
        return self.family.build(self.spec.config, self.spec.dtype)

    def build_full_autoencoder(self) -> Any:
        """Return the complete autoencoder on the current default device."""
        assert self.spec.latents is not None
        return self.family.autoencoder(self.spec.latents, self.spec.dtype)

    def build_without_adapters(self) -> DitModule:
        return DitModule(self.spec, self.weights)

    def _pre_fqns(self) -> tuple[str, ...]:
        around = ("latent_encoder",) if self.spec.latents else ()
        return (*(f"dit.{name}" for name in self.family.pre), "connector", *around)

    def _post_fqns(self) -> tuple[str, ...]:
        around = ("latent_decoder",) if self.spec.latents else ()
        return (*(f"dit.{name}" for name in self.family.post), "output", *around)

    def _tensor_parallel_styles(self) -> dict[str, str]:
        """Return the styles of the layers. Other modules are replicated on every rank."""
        styles = self.family.tensor_styles(self.spec.config)
        return {f"{self.layers_fqn}.*{name and '.'}{name}": s for name, s in styles.items()}

    def tensor_parallel_scopes(self) -> list[str]:
        return [f"{self.layers_fqn}.*.{name}" for name in self.family.tensor_scopes]

    def _describe_layer(self, index: int) -> LayerDescription:
        return self.family.describe_layer(self.spec.config)

    @property
    def input_value_bytes(self) -> int:
        """Bytes of a pixel and its noise. For latents, see `AutoencoderSizes`."""
        return 1 + 4

    @property
    def dummy_patches(self) -> int:
        return DUMMY_IMAGE.patches

    def describe(self) -> ModuleDescription:
        """Return the sizes of this stage, from which costs and memory are computed."""
        described = super().describe()
        if self.spec.latents is not None:
            described = replace(described, latents=self.spec.latents.sizes)
        if not self.is_first:
            return described
        return replace(
            described,
            context_flops_per_unit=self._context_flops,
            flops_per_image=self._flops_per_image,
        )

    def forward(
        self, inputs: GeneratorInputs, stage_input: Tensor | tuple[Tensor, ...]
    ) -> Tensor | StageTensors:
        """Return the flow-matching loss of some images, or the input of the next stage.

        The loss of an image is the mean squared error of its velocity.
        """
        state = self._run(inputs, stage_input)
        if not self.is_last:
            return state
        target_AV = inputs.patches_PV if state.latents_AV is None else state.latents_AV
        error_AV = self._velocity(inputs, state) - (inputs.target_noise_PV - target_AV)
        images = error_AV.square().mean(-1).split([prod(grid) for grid in inputs.grids_thw])
        losses = [c * i.mean() for c, i in zip(map(float, inputs.in_loss), images, strict=True)]
        return torch.stack(losses).sum()

    def velocity(self, inputs: GeneratorInputs, stage_input: Tensor | tuple[Tensor, ...]) -> Tensor:
        return self._velocity(inputs, self._run(inputs, stage_input))

    def decode_latents(
        self, inputs: GeneratorInputs, stage_input: Tensor | tuple[Tensor, ...]
    ) -> Tensor:
        assert inputs.is_encoded and self.latent_decoder is not None
        velocity_AV = self._velocity(inputs, self._run(inputs, stage_input))
        sizes = [prod(grid) for grid in inputs.grids_thw]
        time_A1 = _times_of_patches(inputs.times, sizes, velocity_AV.device)
        latents_AV = inputs.patches_PV - time_A1 * velocity_AV
        return self.latent_decoder(latents_AV, inputs.grids_thw)

    def _run(
        self, inputs: GeneratorInputs, stage_input: Tensor | tuple[Tensor, ...]
    ) -> StageTensors:
        """Run the layers of this stage, and the embeddings before them on the first stage."""
        if self.is_first:
            assert isinstance(stage_input, Tensor)
            hidden_NPD, context_KD, time_NE, latents_AV = self._begin(inputs, stage_input)
        else:
            hidden_NPD, context_KD, time_NE, latents_AV = StageTensors(*stage_input)
        context_NLD, context_mask = pad_sequences(context_KD, inputs.contexts)
        sizes = [prod(grid) for grid in inputs.grids_thw]
        masks = padding_mask(sizes, hidden_NPD), context_mask
        if not self.is_first:
            hidden_NPD = self.sequence_ops.from_previous_stage(hidden_NPD, max(sizes))
        read_NE = self.sequence_ops.use_replicated(time_NE)
        for _, layer in self.indexed_layers():
            hidden_NPD = self.family.run_layer(layer, hidden_NPD, context_NLD, read_NE, masks)
        if not self.is_last:
            hidden_NPD = self.sequence_ops.to_next_stage(hidden_NPD)
        # Returns views, because backward of a stage cannot start at an input of the stage.
        context_KD = context_KD.view_as(context_KD)
        return StageTensors(hidden_NPD, context_KD, time_NE.view_as(time_NE), latents_AV)

    def _begin(self, inputs: GeneratorInputs, context_KD: Tensor) -> StageTensors:
        device = inputs.patches_PV.device
        sizes = [prod(grid) for grid in inputs.grids_thw]
        times_N = to_device(torch.tensor(inputs.times, dtype=torch.float32), device)
        time_A1 = _times_of_patches(inputs.times, sizes, device)
        latents_AV = self._latents(inputs)
        target_AV = inputs.patches_PV
        if latents_AV is not None and not inputs.is_encoded:
            target_AV = latents_AV
        noisy_AV = (1 - time_A1) * target_AV + time_A1 * inputs.target_noise_PV
        positions_AD = torch.cat([self._position(grid, device) for grid in inputs.grids_thw])
        hidden_NPD = self.family.embed(
            self.dit, pad_sequences(noisy_AV, sizes)[0], pad_sequences(positions_AD, sizes)[0]
        )
        time_NE = self.family.embed_times(self.dit, times_N)
        dtype = self.connector.linear_1.weight.dtype
        return StageTensors(hidden_NPD, self.connector(context_KD.to(dtype)), time_NE, latents_AV)

    def _latents(self, inputs: GeneratorInputs) -> Tensor | None:
        """Return the latents (A, V) in the compute dtype, or None if pixels are generated."""
        if self.latent_encoder is None:
            return None
        pixels = inputs.patches_PV
        if inputs.is_encoded:
            return pixels.to(self.connector.linear_1.weight.dtype)
        return self.latent_encoder(pixels, inputs.grids_thw, inputs.latent_noise_PV)

    def _position(self, grid_thw: tuple[int, int, int], device: torch.device) -> Tensor:
        if grid_thw not in self._positions:
            self._positions[grid_thw] = self.family.positions(self.spec.config, grid_thw).to(device)
        return self._positions[grid_thw]

    def _velocity(self, inputs: GeneratorInputs, state: StageTensors) -> Tensor:
        v_NPV = self.family.finish(self.dit, self.output, state.hidden_NPD, state.time_NE).float()
        sizes = [prod(grid) for grid in inputs.grids_thw]
        if len(set(sizes)) == 1:
            return v_NPV.flatten(0, 1)
        return torch.cat([v[:size] for v, size in zip(v_NPV, sizes, strict=True)])

    def time_features(self) -> int:
        """Return the number of features E of an embedded time."""
        return 7 * self.spec.hidden_size

    def message_shapes(self) -> MessageShapes:
        return partial(
            _message_shapes,
            self.spec.hidden_size,
            self.time_features(),
            self.spec.images.latent_values,
        )

    def messages_without_gradients(self) -> frozenset[int]:
        names = ("latents_AV",) if self.describe().trainable else ("time_NE", "latents_AV")
        return frozenset(StageTensors._fields.index(name) for name in names)

    def hf_models(self) -> dict[str, tuple[Any, WeightFiles]]:
        models = {"": (self.build_transformer(), self.weights)}
        if self.spec.latents is not None:
            models[VAE] = self.build_full_autoencoder(), self.spec.latents.files
        return models

    def save_settings(self, directory: Path) -> None:
        self.family.scheduler().save_pretrained(directory / "scheduler")

    def describe_export(self) -> dict[str, Any]:
        images = self.spec.images
        keys: dict[str, Any] = {
            "source": self.name,
            "frames": images.frames,
            "context_tokens": images.context_tokens,
        }
        if (latents := self.spec.latents) is not None:
            kind = "sampled" if latents.sampled else "mean"
            keys["vae"] = {"source": f"{self.name}/{VAE}", "latent_mode": kind}
        return keys

    def dummy_inputs(self, device: torch.device) -> GeneratorInputs:
        """Return the smallest image, excluded from the loss, for microbatches without images.

        Its context is the first token of the microbatch.
        """
        pixels = noise = self.spec.config["in_channels"] * self.spec.config["patch_size"] ** 2
        if self.spec.latents is not None:
            pixels = self.spec.latents.sizes.pixels_per_patch
            noise = self.spec.latents.sizes.noise_per_patch
        return GeneratorInputs(
            torch.zeros(DUMMY_IMAGE.patches, pixels, device=device),
            torch.zeros(DUMMY_IMAGE.patches, noise, device=device),
            [0.5],
            [DUMMY_IMAGE.grid_thw],
            torch.zeros(DUMMY_IMAGE.context, dtype=torch.int64, device=device),
            [DUMMY_IMAGE.context],
            [False],
            latent_values=self.spec.images.latent_values,
        )


def _message_shapes(
    hidden_size: int, time_features: int, latent_values: int, images: Sequence[GeneratedMeta]
) -> list[tuple[int, ...]]:
    """Return the shapes of `StageTensors`, without latents if pixels are generated."""
    patches = [image.patches for image in images]
    shapes: list[tuple[int, ...]] = [
        (len(images), max(patches), hidden_size),
        (sum(image.context for image in images), hidden_size),
        (len(images), time_features),
    ]
    return [*shapes, (sum(patches), latent_values)] if latent_values else shapes


def _times_of_patches(times: list[float], sizes: list[int], device: torch.device) -> Tensor:
    """Return the time of each patch, float32 (A, 1)."""
    times_N = to_device(torch.tensor(times, dtype=torch.float32), device)
    return torch.cat([t.expand(n) for t, n in zip(times_N, sizes, strict=True)])[:, None]


def pad_sequences(x_KD: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor | None]:
    """Return concatenated items as a padded batch (N, L, D), and `padding_mask`."""
    if len(set(lengths)) == 1:
        return x_KD.unflatten(0, (len(lengths), lengths[0])), None
    x_NLD = pad_sequence(list(x_KD.split(lengths)), batch_first=True)
    return x_NLD, padding_mask(lengths, x_NLD)


def padding_mask(lengths: list[int], example: Tensor) -> Tensor | None:
    """Return an additive mask (N, 1, L), or None without padding.

    The mask is 0 for items and `PADDING_BIAS` for padding.
    """
    if len(set(lengths)) == 1:
        return None
    counts_N1 = to_device(torch.tensor(lengths), example.device)[:, None]
    is_item_NL = torch.arange(max(lengths), device=example.device) < counts_N1
    return torch.where(is_item_NL, 0.0, PADDING_BIAS).to(example.dtype)[:, None]
