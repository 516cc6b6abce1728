"""The same training by plain Hugging Face modules and autograd, in one process.

Nothing here knows of packing, microbatches, stages, shards or plans: every sample goes through the
models on its own, its loss is divided by the counts of the whole global batch, and AdamW is torch's
own. From the product come the decoded samples (what a loader of one rank hands out, one sequence at
a time, cut into samples again) and the initial values of a model that is not split.
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
from torchmm.common.dtypes import DTYPES
from torchmm.extensions.low_precision.low_precision_optimizer import LowPrecisionOptimizer
from torchmm.recipe.training_section import OptimizerConfig

Table = dict[str, Any]
Grid = tuple[int, int, int]


@dataclass
class Sample:
    """One sample: tokens, what is to be predicted, what encoders read and where that goes."""

    ids: Tensor
    targets: Tensor
    read: dict[str, tuple[Tensor, list[Grid], Tensor]]
    """By encoder: pixels, patches of each image (frames, rows, columns), places of its tokens."""
    drawn: list[tuple[Tensor, Tensor, float, Tensor]]
    """Pixels, noise, time and places of the context of every image to be drawn."""


class Connector(nn.Module):
    """Linear, GELU, linear; `shuffle` x `shuffle` neighbours in a row beforehand, and perhaps a
    norm of these."""

    def __init__(self, features: int, hidden: int, shuffle: int, modality: str, norm: bool) -> None:
        super().__init__()
        self.shuffle, self.modality = shuffle, modality
        wide = features * shuffle**2
        self.layer_norm = nn.LayerNorm(wide) if norm else nn.Identity()
        owner = nn.Module() if norm else self  # as checkpoints name them
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
                    near = [
                        x_PD[(row + i) * side + column + j]
                        for i in range(self.shuffle)
                        for j in range(self.shuffle)
                    ]
                    tokens.append(torch.cat(near))
            x_PD = torch.stack(tokens)
        linears: Any = getattr(self, "mlp", self)
        return linears.linear_2(functional.gelu(linears.linear_1(self.layer_norm(x_PD))))


class Encoder(nn.Module):
    """A Hugging Face tower up to its feature layer, and a connector."""

    def __init__(self, section: Table, hidden: int) -> None:
        super().__init__()
        config = AutoConfig.for_model(**section["config"])
        config._attn_implementation = "eager"
        self.sounds = config.model_type == "whisper"
        if self.sounds:
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
        """Tokens of one image or sound."""
        features = self._sound(pixels) if self.sounds else self._image(pixels, grid)
        return self.connector(features)

    def _image(self, pixels: Tensor, grid: Grid) -> Tensor:
        kept: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple, output: Any) -> None:
            kept.append(output if isinstance(output, Tensor) else output[0])

        hook = self.layers[self.feature_layer].register_forward_hook(keep)
        given: Table = {"pixel_values": pixels[None]}
        if self.patches:
            given["pixel_attention_mask"] = torch.ones(1, len(pixels), dtype=torch.long)
            given["spatial_shapes"] = torch.tensor([grid[1:]])
        self.tower(**given)
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
    """The whole model.

    Args:
        model: the recipe's section.
    """

    def __init__(self, model: Table) -> None:
        super().__init__()
        config = AutoConfig.for_model(**model["llm"]["config"])
        self.llm: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        hidden = config.hidden_size
        sections = model.get("encoders", {})
        self.encoders = nn.ModuleDict({n: Encoder(s, hidden) for n, s in sections.items()})
        self.weights = 1.0, 0.0
        self.generator: Any = None
        if (section := model.get("generator")) is not None:
            self.generator = plain_generator(section["config"], hidden)
            self.weights = section.get("text_loss_weight", 1.0), section.get("loss_weight", 1.0)

    def losses(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Sums over targets, and over images to be drawn."""
        embedded = self.llm.get_input_embeddings()(sample.ids)
        for name, (pixels, grids, places) in sample.read.items():
            sizes = [t * h * w for t, h, w in grids]
            parts = pixels.unbind() if pixels.ndim == 4 else pixels.split(sizes)
            encoded = [self.encoders[name](*image) for image in zip(parts, grids, strict=True)]
            tokens = torch.cat(encoded)
            embedded = embedded.index_copy(0, places, tokens)
        output = self.llm(inputs_embeds=embedded[None], use_cache=False, output_hidden_states=True)
        text = functional.cross_entropy(
            output.logits[0].float(), sample.targets, reduction="sum", ignore_index=-100
        )
        image = torch.zeros(())
        for pixels, noise, time, places in sample.drawn:
            context = output.hidden_states[-1][:, places]
            image = image + self._velocity_error(pixels, noise, time, context)
        return text, image

    def _velocity_error(
        self, pixels: Tensor, noise: Tensor, time: float, context: Tensor
    ) -> Tensor:
        image, noise = (self._unpatched(x) for x in (pixels, noise))
        found = self.generator(
            (1 - time) * image + time * noise,
            encoder_hidden_states=context,
            timestep=torch.tensor([1000 * time]),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        return (found - (noise - image)).square().mean()

    def _unpatched(self, patches: Tensor) -> Tensor:
        """(1, 3, height, width)."""
        size = self.generator.config.patch_size
        side = self.generator.config.sample_size // size
        blocks = patches.view(side, side, 3, size, size).permute(2, 0, 3, 1, 4)
        return blocks.reshape(1, 3, side * size, side * size)

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by the names that checkpoints have."""
        found = dict(self.named_parameters())
        return {_checkpoint_name(name): parameter for name, parameter in found.items()}


def write_generator(config: Table, hidden: int, directory: Path) -> None:
    """Weights to start from: those of a new generator are zero where nothing would be tested."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        generator = plain_generator(config, hidden)
        for parameter in generator.parameters():
            nn.init.normal_(parameter, std=0.1)
        generator.save_pretrained(directory)


def plain_generator(config: Table, hidden: int) -> Any:
    """diffusers' own PixArt, on pixels."""
    from diffusers import PixArtTransformer2DModel  # noqa: PLC0415 - optional

    width = config["num_attention_heads"] * config["attention_head_dim"]
    given = {k: v for k, v in config.items() if not k.startswith("_")}
    return PixArtTransformer2DModel(
        **given,
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
    """As [freeze] calls it."""
    parts = name.split(".")
    if parts[0] == "llm":
        return "llm"
    module = parts[1] if parts[0] == "encoders" else "generator"
    return f"{module}.connector" if "connector" in parts[1:3] else module


def samples_of(microbatch: Any) -> Iterator[Sample]:
    """The samples of a packed sequence; padding is one without targets."""
    microbatch = microbatch.values()
    for start, stop in pairwise(microbatch.cu_seqlens):
        read = {}
        for name, inputs in microbatch.encoders.items():
            sizes = [t * h * w for t, h, w in inputs.grids_thw]
            if inputs.patches_per_token is not None:  # what remains of a sound is no token
                counts = [size // inputs.patches_per_token for size in sizes]
            else:
                counts = [len(inputs.positions_K) * size // sum(sizes) for size in sizes]
            places = inputs.positions_K.split(counts)
            own = [i for i, at in enumerate(places) if start <= at[0] < stop]
            if own:
                grouped = inputs.pixels.ndim == 4
                parts = inputs.pixels.unbind() if grouped else inputs.pixels.split(sizes)
                chosen = [parts[i] for i in own]
                pixels = torch.stack(chosen) if grouped else torch.cat(chosen)
                at = torch.cat([places[i] for i in own]) - start
                read[name] = pixels, [inputs.grids_thw[i] for i in own], at
        drawn = []
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
            for pixels, noise, time, places in rows:
                if start <= places[0] < stop:
                    drawn.append((pixels, noise, time, places - start))
        ids, targets = microbatch.input_ids_T[start:stop], microbatch.targets_T[start:stop]
        yield Sample(ids, targets, read, drawn)


@dataclass
class Step:
    """What a step has to give.

    Attributes:
        loss: before the update.
        norm: of all gradients.
        gradients: as the optimizer gets them, clipped.
        weights: behind the update.
        averages: of those that are trained, by then; empty without.
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
) -> list[Step]:
    """A step for every batch.

    Args:
        model: the recipe's section.
        frozen: names as in [freeze].
        optimizer: the recipe's section, complete, and the dtype that is `computed_in`.
        initial: weights by name.
        batches: packed sequences (`Microbatch`) of each global batch.
        names: of a composite's parameters in Hugging Face's model, by those in `initial`.
        matrices: names of those that Muon is for.
        adapters: the recipe's tables, complete.
        rounded: how linears in float8 are scaled, by the names of their weights.
        ema_decay: of averages of weights, if there are any.
        buffers: buffers by name. Hugging Face has some of them as frozen parameters.
    """
    reference = (
        CompositeReference(model["config"], names) if model.get("config") else Reference(model)
    ).train()
    parameters = reference.named()
    _round(reference, parameters, rounded)
    parameters |= _add_adapters(reference, parameters, initial, adapters)
    with torch.no_grad():
        for name, value in initial.items():
            parameters[name].copy_(value)
        for name in buffers.keys() & parameters.keys():
            parameters[name].copy_(buffers[name])
    trained = {  # Whisper's positions are fixed
        name: parameter
        for name, parameter in parameters.items()
        if name in initial
        and parameter.requires_grad
        and (".lora." in name or module_of(name) not in frozen)
    }
    embeddings = {id(m.weight) for m in reference.modules() if isinstance(m, nn.Embedding)}
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
    """torch's AdamW, or, where numbers rest in fewer bits, ours on one process; what its updates
    are is compared with torch's in its own tests.

    Args:
        trained: parameters by name, in float32.
        decays: names of those that decay.
        optimizer: the recipe's section, complete.
        dtype: of the run's parameters.
        matrices: names of those that Muon is for.
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
        self._own = {n: nn.Parameter(p.detach().to(dtype)) for n, p in trained.items()}
        by_muon = set(matrices) if optimizer["name"] == "muon" else set()
        groups: dict[tuple[bool, str], Table] = {}
        for name, parameter in self._own.items():
            key = decays[name], "muon" if name in by_muon else "adamw"
            decay = optimizer["weight_decay"] if decays[name] else 0.0
            empty = {"params": [], "weight_decay": decay, "rule": key[1], "lr": optimizer["lr"]}
            groups.setdefault(key, empty)["params"].append(parameter)
        betas, eps = tuple(optimizer["betas"]), optimizer["eps"]
        narrow = optimizer["state_dtype"] != "float32" or dtype != torch.float32
        if not narrow and not by_muon:
            self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                [*groups.values()], lr=optimizer["lr"], betas=betas, eps=eps, foreach=False
            )
            return
        names = {id(parameter): name for name, parameter in self._own.items()}
        keys = OptimizerConfig.model_fields.keys() - {"offload"}
        config = OptimizerConfig(**{key: optimizer[key] for key in keys})
        dtype = DTYPES[optimizer["computed_in"]]
        self._optimizer = LowPrecisionOptimizer([*groups.values()], config, names, dtype)

    @torch.no_grad()
    def step(self) -> None:
        """With the gradients of `trained`."""
        for name, parameter in self._trained.items():
            assert parameter.grad is not None
            self._own[name].grad = parameter.grad.to(self._own[name].dtype)
        self._optimizer.step()
        for name, parameter in self._trained.items():
            parameter.copy_(self._own[name])


def _round(
    reference: nn.Module, parameters: Mapping[str, nn.Parameter], rounded: Mapping[str, str]
) -> None:
    """Lets linears multiply as torchao does in float8, emulated."""
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
    """Adds scale * B A x to what linears return, and with DoRA scales what is no bias; parameters
    by their names in `initial`."""
    owners = {id(m.weight): m for m in reference.modules() if isinstance(m, nn.Linear)}
    found = {}
    for name in initial:
        linear, _, part = name.rpartition(".lora.")
        if part != "down":
            continue
        (own,) = [a for a in adapters if module_of(name) in a["modules"]]
        divisor = own["rank"] ** (0.5 if own["method"] == "rslora" else 1)
        names = ("down", "up", *(["magnitude"] if own["method"] == "dora" else []))
        shapes = {n: initial[f"{linear}.lora.{n}"].shape for n in names}
        parts = {n: nn.Parameter(torch.empty(shape)) for n, shape in shapes.items()}
        found |= {f"{linear}.lora.{n}": parameter for n, parameter in parts.items()}
        owner = owners[id(parameters[f"{linear}.weight"])]
        for n, parameter in parts.items():
            owner.register_parameter(n, parameter)
        owner.register_forward_hook(partial(_adapted, scale=own["alpha"] / divisor))
    return found


def _adapted(
    linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, *, scale: float
) -> Tensor:
    own: Any = linear
    if not hasattr(own, "magnitude"):
        return output + scale * (inputs[0] @ own.down.T) @ own.up.T
    weight = own.weight + scale * own.up @ own.down
    norms = weight.detach().square().sum(1).sqrt()
    direction = inputs[0] @ weight.T
    bias = 0 if own.bias is None else own.bias
    return own.magnitude / norms * direction + bias


def _averaged(
    before: dict[str, Tensor], weights: dict[str, Tensor], decay: float
) -> dict[str, Tensor]:
    """By torch's own function, from the first weights on."""
    if not before:
        return {n: w.float() for n, w in weights.items()}
    found = {n: average.clone() for n, average in before.items()}
    current = [weights[n].float() for n in found]
    get_ema_multi_avg_fn(decay)([*found.values()], current, None)
    return found


def _gradients(reference: Reference | CompositeReference, samples: list[Sample]) -> float:
    targets = max(1, sum(int((s.targets != -100).sum()) for s in samples))
    images = max(1, sum(len(s.drawn) for s in samples))
    of_text, of_images = reference.weights
    total = 0.0
    for sample in samples:
        text, image = reference.losses(sample)
        loss = of_text * text / targets + of_images * image / images
        total += loss.item()
        if loss.requires_grad:
            loss.backward()
    return total


def copied(steps: list[Step]) -> list[Step]:
    """Independent of what trains on."""
    return copy.deepcopy(steps)
