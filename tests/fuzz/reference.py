"""Reference training with Hugging Face modules and autograd in one process.

The reference is independent of packing, microbatches, stages, shards and plans. Every sample is
processed separately, its loss is divided by the counts of the global batch, and the optimizer is
AdamW of torch. From torchmm come the decoded samples (sequences of a single-rank loader, split into
samples) and the initial weights of an unsharded model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from fuzz.composites import CompositeReference
from fuzz.losses import TextLoss
from torchmm.common.dtypes import DTYPES
from torchmm.extensions.low_precision.low_precision_optimizer import LowPrecisionOptimizer
from torchmm.recipe.training_section import OptimizerConfig

Table = dict[str, Any]
Grid = tuple[int, int, int]


@dataclass
class Sample:
    """Tokens, targets and media of a sample."""

    ids: Tensor
    targets: Tensor
    read: dict[str, tuple[Tensor, list[Grid], Tensor]]
    """Pixels, patch grids (frames, rows, columns) and token positions, by encoder."""
    target_images: list[tuple[Tensor, Tensor, float, Tensor]]
    """Pixels, noise, time and context positions of each target image."""


class Connector(nn.Module):
    """Linear, GELU, linear.

    `shuffle` x `shuffle` adjacent features are concatenated first, with an optional norm.
    """

    def __init__(self, features: int, hidden: int, shuffle: int, modality: str, norm: bool) -> None:
        super().__init__()
        self.shuffle, self.modality = shuffle, modality
        wide = features * shuffle**2
        self.layer_norm = nn.LayerNorm(wide) if norm else nn.Identity()
        owner = nn.Module() if norm else self  # the names in checkpoints
        owner.linear_1 = nn.Linear(wide, hidden)
        owner.linear_2 = nn.Linear(hidden, hidden)
        if norm:
            self.mlp = owner

    def forward(self, x_PD: Tensor) -> Tensor:
        if self.shuffle > 1 and self.modality == "image":
            side = round(len(x_PD) ** 0.5)
            tokens = []
            for row in range(0, side, self.shuffle):
                for column in range(0, side, self.shuffle):
                    adjacent = [
                        x_PD[(row + i) * side + column + j]
                        for i in range(self.shuffle)
                        for j in range(self.shuffle)
                    ]
                    tokens.append(torch.cat(adjacent))
            x_PD = torch.stack(tokens)
        linears: Any = getattr(self, "mlp", self)
        return linears.linear_2(functional.gelu(linears.linear_1(self.layer_norm(x_PD))))


class Encoder(nn.Module):
    """Hugging Face encoder up to its feature layer, and a connector."""

    def __init__(self, section: Table, hidden: int) -> None:
        super().__init__()
        config = AutoConfig.for_model(**section["config"])
        config._attn_implementation = "eager"
        self.is_audio = config.model_type == "whisper"
        if self.is_audio:
            self.tower: Any = WhisperEncoder(config)
            layers, features = self.tower.layers, config.d_model
        else:
            self.tower = AutoModel.from_config(config)
            inner = self.tower.encoder
            layers = inner.layer if hasattr(inner, "layer") else inner.layers
            features = config.hidden_size
        self.layers = [layers[i] for i in range(len(layers))]
        self.feature_layer = section.get("feature_layer", -1)
        self.class_token = config.model_type in ("clip_vision_model", "dinov2", "internvl_vision")
        self.patches = config.model_type == "siglip2_vision_model"
        shuffle = section.get("pixel_shuffle_factor", 2) if section["connector"] != "mlp" else 1
        norm = "norm" in section["connector"]
        self.connector = Connector(features, hidden, shuffle, section["modality"], norm)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Return the tokens of an image or an audio input."""
        features = self._sound(pixels) if self.is_audio else self._image(pixels, grid)
        return self.connector(features)

    def _image(self, pixels: Tensor, grid: Grid) -> Tensor:
        kept: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple, output: Any) -> None:
            kept.append(output if isinstance(output, Tensor) else output[0])

        hook = self.layers[self.feature_layer].register_forward_hook(keep)
        arguments: Table = {"pixel_values": pixels[None]}
        if self.patches:
            arguments["pixel_attention_mask"] = torch.ones(1, len(pixels), dtype=torch.long)
            arguments["spatial_shapes"] = torch.tensor([grid[1:]])
        self.tower(**arguments)
        hook.remove()
        (features,) = kept
        return features[0, int(self.class_token) :]

    def _sound(self, positions: Tensor) -> Tensor:
        tower = self.tower
        mels = positions.reshape(-1, tower.conv1.in_channels).T[None]
        hidden = functional.gelu(tower.conv1(mels))
        hidden = functional.gelu(tower.conv2(hidden)).transpose(1, 2)
        hidden = hidden + tower.embed_positions.weight[: hidden.shape[1]]
        for layer in self.layers:
            output = layer(hidden, attention_mask=None)
            hidden = output if isinstance(output, Tensor) else output[0]
        return tower.layer_norm(hidden)[0]


class Reference(nn.Module):
    """Complete model.

    Args:
        model: `[model]` section of the recipe.
    """

    def __init__(self, model: Table) -> None:
        super().__init__()
        config = AutoConfig.for_model(**model["llm"]["config"])
        self.llm: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        hidden = config.hidden_size
        sections = model.get("encoders", {})
        self.encoders = nn.ModuleDict({n: Encoder(s, hidden) for n, s in sections.items()})
        self.weights = 1.0, 0.0
        self.text_loss = TextLoss()
        self.generator: Any = None
        if (section := model.get("generator")) is not None:
            self.generator = build_generator(section["config"], hidden)
            self.weights = section.get("text_loss_weight", 1.0), section.get("loss_weight", 1.0)

    def losses(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the sums of the losses over targets and over target images."""
        embedded = self.llm.get_input_embeddings()(sample.ids)
        for name, (pixels, grids, token_positions) in sample.read.items():
            sizes = [t * h * w for t, h, w in grids]
            parts = pixels.unbind() if pixels.ndim == 4 else pixels.split(sizes)
            encoded = [self.encoders[name](*image) for image in zip(parts, grids, strict=True)]
            tokens = torch.cat(encoded)
            embedded = embedded.index_copy(0, token_positions, tokens)
        output = self.llm(inputs_embeds=embedded[None], use_cache=False, output_hidden_states=True)
        text = self.text_loss(output.logits[0], sample.targets)
        image = torch.zeros(())
        for pixels, noise, time, token_positions in sample.target_images:
            context = output.hidden_states[-1][:, token_positions]
            image = image + self._velocity_error(pixels, noise, time, context)
        return text, image

    def _velocity_error(
        self, pixels: Tensor, noise: Tensor, time: float, context: Tensor
    ) -> Tensor:
        image, noise = (self._unpatched(x) for x in (pixels, noise))
        velocity = self.generator(
            (1 - time) * image + time * noise,
            encoder_hidden_states=context,
            timestep=torch.tensor([1000 * time]),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        return (velocity - (noise - image)).square().mean()

    def _unpatched(self, patches: Tensor) -> Tensor:
        """Return the (1, 3, height, width) image of patches."""
        size = self.generator.config.patch_size
        side = self.generator.config.sample_size // size
        blocks = patches.view(side, side, 3, size, size).permute(2, 0, 3, 1, 4)
        return blocks.reshape(1, 3, side * size, side * size)

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in checkpoints."""
        parameters = dict(self.named_parameters())
        return {_checkpoint_name(name): parameter for name, parameter in parameters.items()}


def write_generator(config: Table, hidden: int, directory: Path) -> None:
    """Write initial weights of a generator.

    A new generator has zero weights, with which most gradients would be zero.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        generator = build_generator(config, hidden)
        for parameter in generator.parameters():
            nn.init.normal_(parameter, std=0.1)
        generator.save_pretrained(directory)


def build_generator(config: Table, hidden: int) -> Any:
    """Build the PixArt model of diffusers on pixels."""
    from diffusers import PixArtTransformer2DModel  # noqa: PLC0415 - optional

    width = config["num_attention_heads"] * config["attention_head_dim"]
    settings = {k: v for k, v in config.items() if not k.startswith("_")}
    return PixArtTransformer2DModel(
        **settings,
        in_channels=3,
        out_channels=3,
        cross_attention_dim=width,
        caption_channels=hidden,
        use_additional_conditions=False,
    )


def _checkpoint_name(name: str) -> str:
    renames = (
        (r"^llm\.", "llm.backbone."),
        (r"^generator\.caption_projection\.", "generator.connector."),
        (r"^generator\.scale_shift_table$", "generator.output.scale_shift_table"),
        (r"^generator\.(?!connector|output)", "generator.dit."),
    )
    for pattern, new in renames:
        name = re.sub(pattern, new, name)
    return name


def module_of(name: str) -> str:
    """Return the module of a parameter as named in [freeze]."""
    parts = name.split(".")
    if parts[0] == "llm":
        return "llm"
    module = parts[1] if parts[0] == "encoders" else "generator"
    return f"{module}.connector" if "connector" in parts[1:3] else module


def samples_of(microbatch: Any) -> Iterator[Sample]:
    """Yield the samples of a packed sequence. Padding is a sample without targets."""
    microbatch = microbatch.values()
    for start, stop in pairwise(microbatch.cu_seqlens):
        read = {}
        for name, inputs in microbatch.encoders.items():
            sizes = [t * h * w for t, h, w in inputs.grids_thw]
            if (
                inputs.patches_per_token is not None
            ):  # the last positions of an audio input have no token
                counts = [size // inputs.patches_per_token for size in sizes]
            else:
                counts = [len(inputs.positions_K) * size // sum(sizes) for size in sizes]
            positions_of_image = inputs.positions_K.split(counts)
            indices = [
                i
                for i, token_positions in enumerate(positions_of_image)
                if start <= token_positions[0] < stop
            ]
            if indices:
                grouped = inputs.pixels.ndim == 4
                parts = inputs.pixels.unbind() if grouped else inputs.pixels.split(sizes)
                selected = [parts[i] for i in indices]
                pixels = torch.stack(selected) if grouped else torch.cat(selected)
                token_positions = torch.cat([positions_of_image[i] for i in indices]) - start
                read[name] = pixels, [inputs.grids_thw[i] for i in indices], token_positions
        targets_of_sample = []
        if (inputs := microbatch.generator) is not None:
            sizes = [t * h * w for t, h, w in inputs.grids_thw]
            contexts = inputs.context_positions_K.split(inputs.contexts)
            rows = zip(
                inputs.patches_PV.split(sizes),
                inputs.noise_PV.split(sizes),
                inputs.times,
                contexts,
                strict=True,
            )
            for pixels, noise, time, positions_of_image in rows:
                if start <= positions_of_image[0] < stop:
                    targets_of_sample.append((pixels, noise, time, positions_of_image - start))
        ids, targets = microbatch.input_ids_T[start:stop], microbatch.targets_T[start:stop]
        yield Sample(ids, targets, read, targets_of_sample)


@dataclass
class Step:
    """Expected results of a step.

    Attributes:
        loss: Loss before the update.
        norm: Norm of all gradients.
        gradients: Clipped gradients.
        weights: Weights after the update.
        averages: Averages of trained weights, or empty.
    """

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]


def train(
    model: Table,
    frozen: list[str],
    optimizer: Table,
    initial: dict[str, Tensor],
    batches: list[list[Any]],
    names: Mapping[str, str],
    matrices: Collection[str] = (),
    adapters: Sequence[Table] = (),
    rounded: Mapping[str, str] = MappingProxyType({}),
    ema_decay: float | None = None,
    buffers: Mapping[str, Tensor] = MappingProxyType({}),
    text_loss: TextLoss | None = None,
    token_rows: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> list[Step]:
    """Train a step for every batch.

    Args:
        model: `[model]` section of the recipe.
        frozen: Module names of [freeze].
        optimizer: Complete `[optimizer]` section, and the dtype in `computed_in`.
        initial: Initial weights by name.
        batches: Packed sequences (`Microbatch`) of each global batch.
        names: Parameter names in the Hugging Face model by names in `initial`.
        matrices: Names of the parameters of Muon.
        adapters: Complete adapter sections of the recipe.
        rounded: Scaling of float8 linear layers by weight names.
        ema_decay: Decay of weight averages, if enabled.
        buffers: Buffers by name. Hugging Face has some of them as frozen parameters.
        text_loss: Text loss. Defaults to the cross entropy.
        token_rows: Trained rows by name, of weights whose other rows are frozen.
    """
    reference = (
        CompositeReference(model["config"], names) if model.get("config") else Reference(model)
    ).train()
    reference.text_loss = text_loss or TextLoss()
    parameters = reference.named()
    _round(reference, parameters, rounded)
    parameters |= _add_adapters(reference, parameters, initial, adapters)
    with torch.no_grad():
        for name, value in initial.items():
            parameters[name].copy_(value)
        for name in buffers.keys() & parameters.keys():
            parameters[name].copy_(buffers[name])
    trained = {  # the positions of Whisper are fixed
        name: parameter
        for name, parameter in parameters.items()
        if name in initial
        and parameter.requires_grad
        and (".lora." in name or name in token_rows or module_of(name) not in frozen)
    }
    embeddings = {id(m.weight) for m in reference.modules() if isinstance(m, nn.Embedding)}
    embeddings |= {id(trained[name]) for name in token_rows}
    decays = {n: p.ndim > 1 and id(p) not in embeddings for n, p in trained.items()}
    dtype = next(iter(initial.values())).dtype
    updates = Updates(trained, decays, optimizer, dtype, matrices)
    steps: list[Step] = []
    averages: dict[str, Tensor] = {}
    for batch in batches:
        loss = _gradients(reference, [s for sequence in batch for s in samples_of(sequence)])
        for parameter in trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for name, rows in token_rows.items():
            gradient = torch.zeros_like(trained[name])
            gradient[list(rows)] = trained[name].grad[list(rows)]
            trained[name].grad = gradient
        norm = torch.stack([p.grad.double().square().sum() for p in trained.values()]).sum().sqrt()
        factor = min(1.0, optimizer["max_grad_norm"] / (norm.item() + 1e-6))
        for parameter in trained.values():
            parameter.grad.mul_(factor)
        gradients = {n: p.grad.clone() for n, p in trained.items()}
        updates.step()
        reference.zero_grad()
        weights = {n: parameters[n].detach().clone() for n in initial}
        if ema_decay is not None:
            averages = _averaged(averages, {n: weights[n] for n in trained}, ema_decay)
        steps.append(Step(loss, norm.item(), gradients, weights, averages))
    return steps


class Updates:
    """AdamW of torch, or the torchmm optimizer on one process for low precision and Muon.

    The updates of torchmm are compared with torch in separate tests.

    Args:
        trained: Parameters by name, in float32.
        decays: Whether each parameter has weight decay, by name.
        optimizer: Complete `[optimizer]` section.
        dtype: Dtype of the parameters of the run.
        matrices: Names of the parameters of Muon.
    """

    def __init__(
        self,
        trained: dict[str, nn.Parameter],
        decays: Mapping[str, bool],
        optimizer: Table,
        dtype: torch.dtype,
        matrices: Collection[str],
    ) -> None:
        self._trained = trained
        self._parameters = {n: nn.Parameter(p.detach().to(dtype)) for n, p in trained.items()}
        by_muon = set(matrices) if optimizer["name"] == "muon" else set()
        groups: dict[tuple[bool, str], Table] = {}
        for name, parameter in self._parameters.items():
            key = decays[name], "muon" if name in by_muon else "adamw"
            decay = optimizer["weight_decay"] if decays[name] else 0.0
            empty = {"params": [], "weight_decay": decay, "rule": key[1], "lr": optimizer["lr"]}
            groups.setdefault(key, empty)["params"].append(parameter)
        betas, eps = tuple(optimizer["betas"]), optimizer["eps"]
        low_precision = optimizer["state_dtype"] != "float32" or dtype != torch.float32
        if not low_precision and not by_muon:
            self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                [*groups.values()], lr=optimizer["lr"], betas=betas, eps=eps, foreach=False
            )
            return
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        keys = OptimizerConfig.model_fields.keys() - {"offload"}
        config = OptimizerConfig(**{key: optimizer[key] for key in keys})
        dtype = DTYPES[optimizer["computed_in"]]
        self._optimizer = LowPrecisionOptimizer([*groups.values()], config, names, dtype)

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients of `trained`."""
        for name, parameter in self._trained.items():
            assert parameter.grad is not None
            self._parameters[name].grad = parameter.grad.to(self._parameters[name].dtype)
        self._optimizer.step()
        for name, parameter in self._trained.items():
            parameter.copy_(self._parameters[name])


def _round(
    reference: nn.Module, parameters: Mapping[str, nn.Parameter], rounded: Mapping[str, str]
) -> None:
    """Make linear layers multiply like emulated float8 layers of torchao."""
    if not rounded:
        return
    from torchao.float8 import Float8LinearConfig  # noqa: PLC0415 - takes seconds
    from torchao.float8.float8_linear import Float8Linear  # noqa: PLC0415

    owners = {id(m.weight): m for m in reference.modules() if isinstance(m, nn.Linear)}
    for name, scales in rounded.items():
        settings = replace(Float8LinearConfig.from_recipe_name(scales), emulate=True)
        linear = owners[id(parameters[name])]
        linear.forward = Float8Linear.from_float(linear, settings).forward


def _add_adapters(
    reference: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    initial: Mapping[str, Tensor],
    adapters: Sequence[Table],
) -> dict[str, nn.Parameter]:
    """Add scale * B A x to the outputs of linear layers, and the magnitudes of DoRA.

    Returns:
        Parameters by their names in `initial`.
    """
    owners = {id(m.weight): m for m in reference.modules() if isinstance(m, nn.Linear)}
    added = {}
    for name in initial:
        linear, _, part = name.rpartition(".lora.")
        if part != "down":
            continue
        (adapter,) = [a for a in adapters if module_of(name) in a["modules"]]
        divisor = adapter["rank"] ** (0.5 if adapter["method"] == "rslora" else 1)
        names = ("down", "up", *(["magnitude"] if adapter["method"] == "dora" else []))
        shapes = {n: initial[f"{linear}.lora.{n}"].shape for n in names}
        parts = {n: nn.Parameter(torch.empty(shape)) for n, shape in shapes.items()}
        added |= {f"{linear}.lora.{n}": parameter for n, parameter in parts.items()}
        owner = owners[id(parameters[f"{linear}.weight"])]
        for n, parameter in parts.items():
            owner.register_parameter(n, parameter)
        owner.register_forward_hook(partial(_adapted, scale=adapter["alpha"] / divisor))
    return added


def _adapted(
    linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, *, scale: float
) -> Tensor:
    layer: Any = linear
    if not hasattr(layer, "magnitude"):
        return output + scale * (inputs[0] @ layer.down.T) @ layer.up.T
    weight = layer.weight + scale * layer.up @ layer.down
    norms = weight.detach().square().sum(1).sqrt()
    direction = inputs[0] @ weight.T
    bias = 0 if layer.bias is None else layer.bias
    return layer.magnitude / norms * direction + bias


def _averaged(
    previous: dict[str, Tensor], weights: dict[str, Tensor], decay: float
) -> dict[str, Tensor]:
    """Average the weights with the function of torch."""
    if not previous:
        return {n: w.float() for n, w in weights.items()}
    averages = {n: average.clone() for n, average in previous.items()}
    current = [weights[n].float() for n in averages]
    get_ema_multi_avg_fn(decay)([*averages.values()], current, None)
    return averages


def _gradients(reference: Reference | CompositeReference, samples: list[Sample]) -> float:
    targets = max(1, sum(int((s.targets != -100).sum()) for s in samples))
    images = max(1, sum(len(s.target_images) for s in samples))
    text_coefficient, image_coefficient = reference.weights
    total = 0.0
    for sample in samples:
        text, image = reference.losses(sample)
        loss = text_coefficient * text / targets + image_coefficient * image / images
        total += loss.item()
        if loss.requires_grad:
            loss.backward()
    return total


def copied(steps: list[Step]) -> list[Step]:
    """Return an independent copy of the steps."""
    return copy.deepcopy(steps)
