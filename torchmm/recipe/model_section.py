"""The recipe's sections about the model: LLM, encoders, generator, what is frozen, and adapters.

Part of the schema in `torchmm.recipe.recipe`, which imports everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from torchmm.common.module_names import AUDIO, GENERATOR, LLM, VISION
from torchmm.recipe.changes import with_current_names
from torchmm.recipe.section import Section

ALL_LINEAR = "all-linear"
"""In place of names: every linear that an adapter can be in."""
PARTS_FILE = "torchmm.json"
"""`[model]` of an export whose parts have no Hugging Face class together; with relative paths."""


def place_of(source: str | None, revision: str | None) -> str | None:
    """A source and its revision in one text, NAME@REVISION."""
    return source if source is None or revision is None else f"{source}@{revision}"


def split_place(place: str) -> tuple[str, str | None]:
    """Directory or hub id, and revision, of what `place_of` has put together."""
    if "@" not in place or Path(place).exists():
        return place, None
    name, _, revision = place.rpartition("@")
    return name, revision


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that may be damaged.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a regular file, not UTF-8, not JSON, or not an object; the
            message starts with the path.
        OSError: The file cannot be read.
    """
    if path.exists() and not path.is_file():  # reading a named pipe would block
        raise ValueError(f"{path} is not a regular file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not valid JSON ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has a JSON {type(found).__name__} instead of an object")
    return found


def json_problems(directory: Path, names: Iterable[str]) -> list[str]:
    """Return a message for each existing file of a directory that is not a JSON object."""
    problems = []
    for name in names:
        try:
            read_json_object(directory / name)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            problems.append(str(error))
    return problems


class LlmConfig(Section):
    """The LLM backbone: either `source` (with weights) or `config` (random weights)."""

    source: str | None = None
    """Hugging Face id or local directory of a causal LM; its weights are loaded."""
    revision: str | None = None
    """Commit, tag or branch of a `source` on the hub; a commit never changes. What was found
    without it is logged."""
    config: dict[str, Any] | None = None
    """Inline Hugging Face config with `model_type`; weights are random. With `source`: overrides
    of its config."""

    @property
    def place(self) -> str | None:
        """The source, with its revision: see `split_place`."""
        return place_of(self.source, self.revision)


class EncoderConfig(Section):
    """One modality encoder and the connector from its outputs into the LLM's embeddings."""

    source: str | None = None
    """Hugging Face id or local directory of an encoder (or of a CLIP-like dual model)."""
    revision: str | None = None
    """Commit, tag or branch of a `source` on the hub; a commit never changes. What was found
    without it is logged."""
    config: dict[str, Any] | None = None
    """Inline Hugging Face config with `model_type`; weights are random. With `source`: overrides
    of its config."""
    processor: dict[str, Any] | None = None
    """Settings of the image processor or feature extractor; default: the source's, or those of the
    model type."""
    modality: Literal["image", "audio"] = "image"
    """What the encoder reads. Every image of a sample goes to all image encoders, every sound
    to all audio encoders; what no encoder reads is left out."""
    connector: Literal["mlp", "pixel_shuffle_mlp", "pixel_shuffle_norm_mlp"] = "mlp"
    """"mlp" maps each encoder output to one LLM token through two linear layers;
    "pixel_shuffle_mlp" first folds `pixel_shuffle_factor` x `pixel_shuffle_factor` neighbouring
    patches into one token; "pixel_shuffle_norm_mlp" does so with a LayerNorm between, as InternVL
    has it."""
    pixel_shuffle_factor: int = Field(default=2, ge=2)
    """Rows and columns of patches folded into one token by "pixel_shuffle_mlp" and
    "pixel_shuffle_norm_mlp"; for sounds, `pixel_shuffle_factor`**2 consecutive positions."""
    feature_layer: int = Field(default=-1, le=-1)
    """Which hidden state feeds the connector: -1 the last layer's output, -2 the previous one.
    Layers after it are not built."""

    @property
    def place(self) -> str | None:
        """The source, with its revision: see `split_place`."""
        return place_of(self.source, self.revision)

    @property
    def folds(self) -> bool:
        """Whether the connector folds neighbours."""
        return self.connector != "mlp"


class AutoencoderConfig(Section):
    """A given autoencoder, which is not trained: the generator draws its latents, not pixels."""

    source: str | None = None
    """Local directory of a diffusers `AutoencoderKL`, such as the `vae` of a published model, with
    weights as safetensors."""
    config: dict[str, Any] | None = None
    """Inline diffusers config; weights are random. With `source`: overrides of its config, such as
    `scaling_factor`."""
    latent_mode: Literal["mean", "sampled"] = "mean"
    """What of the distribution that it encodes an image to is learned: its mean, or latents drawn
    from it, by the run's seed anew in every epoch."""
    encode_batch_size: int = Field(default=8, ge=1)
    """Images (or frames of clips) of one size that are encoded together, at most; more take more
    memory."""


class GeneratorConfig(Section):
    """A diffusion transformer after the LLM, which draws images (or clips) from its hidden states.

    It works on pixels, or on latents of an autoencoder, and learns by flow matching. Needs
    `pip install -e '.[generation]'`.
    """

    source: str | None = None
    """Hugging Face id or local directory of a diffusers transformer for what it draws, such as the
    `hf/generator` of another run; its weights are loaded."""
    revision: str | None = None
    """Commit, tag or branch of a `source` on the hub; a commit never changes. What was found
    without it is logged."""
    config: dict[str, Any] | None = None
    """Inline diffusers config with `_class_name` ("PixArtTransformer2DModel"); `sample_size` is
    the side of an image in pixels, or in latents; `ffn_size`, a key of ours, is the width of
    feed-forward parts (4 x that of the layers otherwise). Weights are random. With `source`:
    overrides of its config."""
    vae: AutoencoderConfig | None = None
    """The autoencoder whose latents it draws; default: it draws pixels."""
    frames: int = Field(default=1, ge=1)
    """Most frames of a clip; 1: only images."""
    context_tokens: int = Field(default=128, ge=1)
    """An image is drawn from the hidden states of at most this many tokens before it."""
    loss_weight: float = Field(default=1.0, ge=0)
    """Factor of the image loss (mean squared error of the velocity, averaged over images) in the
    loss."""
    text_loss_weight: float = Field(default=1.0, ge=0)
    """Factor of the text loss (mean over target tokens) in the loss."""
    timestep_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """Distribution of the noise levels in training; "logit_normal" prefers those in the middle."""

    @property
    def place(self) -> str | None:
        """The source, with its revision: see `split_place`."""
        return place_of(self.source, self.revision)


class ModelConfig(Section):
    """What is trained: a composite Hugging Face model, or an LLM with encoders put before it."""

    source: str | None = None
    """Hugging Face id or local directory of a composite model (LLaVA, Qwen2.5-VL); excludes
    `llm` and `encoders`. Its vision tower is the encoder named "vision", its audio tower
    "audio". Or the directory of an export in parts, whose `torchmm.json` says what the parts
    are, and their names."""
    revision: str | None = None
    """Commit, tag or branch of a `source` on the hub; a commit never changes. What was found
    without it is logged."""
    config: dict[str, Any] | None = None
    """Inline Hugging Face config of a composite model with `model_type`; weights are random."""
    modalities: list[Literal["vision", "audio"]] | None = None
    """Composite models: the encoders it has. Default: what its config says, inline or in a local
    directory; "vision" for a model of a hub."""
    processor: dict[str, Any] | None = None
    """Composite models: settings of the image processor that override the source's, such as its
    sizes."""
    llm: LlmConfig | None = None
    """The LLM backbone."""
    encoders: dict[str, EncoderConfig] = Field(default={})
    """The encoders by name; the name is used in [freeze], [parallel] and metrics."""
    generator: GeneratorConfig | None = None
    """After the LLM (or composite); its name in [freeze], [parallel] and metrics is
    "generator"."""
    tokenizer: str | None = None
    """Hugging Face id or local directory of the tokenizer; default: the source of the LLM or
    composite."""
    tokenizer_revision: str | None = None
    """Commit, tag or branch of a `tokenizer` on the hub; without that key its source's `revision`
    holds."""
    image_token: str = "<image>"
    """Token whose id marks image positions. It must exist in the tokenizer; any token that never
    occurs in text will do."""
    chunked_loss: bool | None = None
    """Whether to compute logits and their gradients one chunk of targets at a time, so that they
    need little memory. The loss is the same. Default: true with tensor parallelism in bfloat16 if
    the vocabulary has at least 32,768 words and the head is a linear without a bias; else false."""

    @model_validator(mode="before")
    @classmethod
    def _of_parts(cls, given: Any) -> Any:
        """In place of the directory of an export in parts: its parts."""
        source = given.get("source") if isinstance(given, dict) else None
        if not isinstance(source, str) or {"llm", "encoders"} & given.keys():
            return given
        parts = _json_file(source, PARTS_FILE)
        if not parts:
            return given
        parts = with_current_names(parts, "model.")
        return {**_below(Path(source), parts), **{k: v for k, v in given.items() if k != "source"}}

    @property
    def place(self) -> str | None:
        """The composite's source, with its revision: see `split_place`."""
        return place_of(self.source, self.revision)

    @property
    def is_composite(self) -> bool:
        """Whether encoder and LLM are one Hugging Face model."""
        return self.source is not None or self.config is not None

    @property
    def encoder_names(self) -> list[str]:
        """All encoders, in the recipe's order."""
        if not self.is_composite:
            return list(self.encoders)
        file: dict[str, Any] = {}
        with suppress(ValueError):  # `load_config` reports a damaged file
            file = _json_file(self.source, "config.json")
        parts = composite_parts({**file, **(self.config or {})})
        found = [name for name in (VISION, AUDIO) if name in parts]
        return list(self.modalities or found or [VISION])

    @property
    def modality_modules(self) -> list[str]:
        """Encoders, LLM and generator, in the order in which they take ranks."""
        return [*self.encoder_names, LLM, *([GENERATOR] if self.generator else [])]

    @property
    def tokenizer_source(self) -> str | None:
        """Where the tokenizer comes from: its own key, else the composite or the LLM; with its
        revision: see `split_place`."""
        own = place_of(self.tokenizer, self.tokenizer_revision)
        return own or self.place or (self.llm.place if self.llm else None)


def composite_parts(config: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """By module: key in [model.config], and config of the parts that a composite's config spells
    out. A whole Omni model has them in `thinker_config`, beside those that speak."""
    prefix = "model.config."
    if isinstance(config.get("thinker_config"), dict):
        prefix = "model.config.thinker_config."
        config = config["thinker_config"]
    keys = {VISION: "vision_config", AUDIO: "audio_config", LLM: "text_config"}
    return {
        module: (prefix + key, config[key])
        for module, key in keys.items()
        if isinstance(config.get(key), dict)
    }


def _json_file(directory: str | None, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a directory, or {} if the file does not exist.

    Raises:
        ValueError: The file is damaged.
    """
    if directory is None:
        return {}
    try:
        return read_json_object(Path(directory) / name)
    except OSError:
        return {}  # on a hub


def _below(directory: Path, value: Any) -> Any:
    """A table whose sources and tokenizer are relative to a directory."""
    if not isinstance(value, dict):
        return value
    return {
        key: str(directory / item)
        if key in ("source", "tokenizer") and isinstance(item, str)
        else _below(directory, item)
        for key, item in value.items()
    }


class FreezeConfig(Section):
    """Which parts are not trained."""

    modules: list[str] = Field(default=[])
    """Module names: "llm", an encoder's name (its tower without the connector), "generator", or
    "NAME.connector". Frozen modules get no gradients and no optimizer state."""


class AdapterConfig(Section):
    """A low-rank adapter (LoRA) of one or more modules, whose own weights are frozen.

    NAME is free; files have it. Each of the linears gets two small matrices, whose product is added
    to its weight.
    """

    modules: list[str] = Field(min_length=1)
    """Module names: "llm", encoders' names, and a composite's "NAME.connector", which is no part of
    its encoder. All of their own weights are frozen, as by [freeze]."""
    targets: list[str] = Field(default=[ALL_LINEAR], min_length=1)
    """Linears in the modules' layers, or in connectors, by name or the end of it ("q_proj",
    "mlp.down_proj"), with patterns as for file names ("layers.1?.self_attn.[qv]_proj");
    "all-linear": all of them. Experts, whose weights are stacked, embeddings and heads never."""
    rank: int = Field(default=16, ge=1)
    """Rows of the first matrix and columns of the second."""
    alpha: float = Field(default=32.0, gt=0)
    """The product is multiplied by alpha / rank ("rslora": by alpha / sqrt(rank))."""
    source: str | None = None
    """Directory of an adapter to start from, as PEFT or an earlier run wrote it."""
    method: Literal["lora", "rslora", "dora"] = "lora"
    """"lora"; "rslora": with a factor that keeps large ranks from learning slowly; "dora": with a
    trained magnitude for each output beside the product."""
