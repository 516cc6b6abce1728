"""The sections of the model: LLM, encoders, generator, frozen modules and adapters."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from torchmm.common.module_names import AUDIO, GENERATOR, LLM, VISION
from torchmm.recipe.changes import with_current_names
from torchmm.recipe.section import Section

ALL_LINEAR = "all-linear"
"""In place of names: every linear that an adapter can be in."""
COMPONENTS_FILE = "torchmm.json"
"""File with the `[model]` section of an export of separate components, with relative paths."""


class NewTokens(NamedTuple):
    """Ids of `model.new_tokens`."""

    ids: tuple[int, ...]
    """All tokens, including those that the tokenizer already has."""
    added: tuple[int, ...]
    """Tokens that the tokenizer lacks, with consecutive ids."""
    known: int
    """Number of token ids before the first added token."""


def source_with_revision(source: str | None, revision: str | None) -> str | None:
    """Return a source and its revision as NAME@REVISION."""
    return source if source is None or revision is None else f"{source}@{revision}"


def split_revision(source: str) -> tuple[str, str | None]:
    """Return the directory or hub id, and the revision, of a result of `source_with_revision`."""
    if "@" not in source or Path(source).exists():
        return source, None
    name, _, revision = source.rpartition("@")
    return name, revision


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that may be damaged.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a regular file, not UTF-8, not JSON, or not an object. The
            message starts with the path.
        OSError: The file cannot be read.
    """
    if path.exists() and not path.is_file():  # reading a named pipe would block
        raise ValueError(f"{path} is not a regular file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not valid JSON ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} has a JSON {type(content).__name__} instead of an object")
    return content


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
    """The LLM backbone.

    Set `source` to load weights, or `config` for random weights. See docs/get_started/own_model.md.
    """

    source: str | None = None
    """Hugging Face id or local directory of a causal LM, with its weights."""
    revision: str | None = None
    """Commit, tag or branch of `source` on the Hub. If None, the default branch is used, and the
    log shows its commit."""
    config: dict[str, Any] | None = None
    """Inline Hugging Face config. With `source`, it overrides keys of the source config. Otherwise,
    it must have `model_type`, and weights are random."""

    @property
    def source_with_revision(self) -> str | None:
        """Source with its revision, see `split_revision`."""
        return source_with_revision(self.source, self.revision)


class EncoderConfig(Section):
    """A modality encoder, and the connector that maps its outputs to LLM embeddings.

    See docs/get_started/own_model.md.
    """

    source: str | None = None
    """Hugging Face id or local directory of an encoder, or of a dual model such as CLIP."""
    revision: str | None = None
    """Commit, tag or branch of `source` on the Hub. If None, the default branch is used, and the
    log shows its commit."""
    config: dict[str, Any] | None = None
    """Inline Hugging Face config. With `source`, it overrides keys of the source config. Otherwise,
    it must have `model_type`, and weights are random."""
    processor: dict[str, Any] | None = None
    """Settings of the image processor or feature extractor. If None, those of the source or of the
    model type are used."""
    modality: Literal["image", "audio"] = "image"
    """Input modality. Each image of a sample is passed to all image encoders, and each audio file
    to all audio encoders. Media without an encoder are skipped."""
    connector: Literal["mlp", "pixel_shuffle_mlp", "pixel_shuffle_norm_mlp"] = "mlp"
    """Type of the connector. "mlp" maps each encoder output to one LLM token with two linear
    layers. "pixel_shuffle_mlp" first merges `pixel_shuffle_factor` x `pixel_shuffle_factor`
    adjacent patches into one token. "pixel_shuffle_norm_mlp" also adds a LayerNorm, as in
    InternVL."""
    pixel_shuffle_factor: int = Field(default=2, ge=2)
    """Number of rows and of columns of patches that pixel shuffle merges into one token. For audio,
    pixel_shuffle_factor² consecutive positions are merged."""
    feature_layer: int = Field(default=-1, le=-1)
    """Index of the hidden state that is passed to the connector. -1 is the output of the last
    layer, -2 the output of the layer before it. Later layers are not built."""

    @property
    def source_with_revision(self) -> str | None:
        """Source with its revision, see `split_revision`."""
        return source_with_revision(self.source, self.revision)

    @property
    def merges_features(self) -> bool:
        """True if the connector merges adjacent features."""
        return self.connector != "mlp"


class AutoencoderConfig(Section):
    """A frozen autoencoder (VAE).

    The generator is trained on its latents instead of pixels. See docs/guides/generation.md.
    """

    source: str | None = None
    """Local directory of a diffusers `AutoencoderKL` with safetensors weights, such as the `vae`
    folder of a published model."""
    config: dict[str, Any] | None = None
    """Inline diffusers config. Without `source`, weights are random. With `source`, it overrides
    keys of the source config, such as `scaling_factor`."""
    latent_mode: Literal["mean", "sampled"] = "mean"
    """Latents that the generator is trained on. "mean" is the mean of the encoded distribution.
    "sampled" draws new latents from the distribution in each epoch, seeded by `training.seed`."""
    encode_batch_size: int = Field(default=8, ge=1)
    """Maximum number of images or video frames of one size that are encoded in one batch. Higher
    values use more memory."""


class GeneratorConfig(Section):
    """A diffusion transformer that generates images or videos from LLM hidden states.

    It is trained with flow matching. Requires `pip install -e '.[generation]'`. See
    docs/guides/generation.md.
    """

    source: str | None = None
    """Hugging Face id or local directory of a diffusers transformer with its weights, such as
    `hf/generator` of another run."""
    revision: str | None = None
    """Commit, tag or branch of `source` on the Hub. If None, the default branch is used, and the
    log shows its commit."""
    config: dict[str, Any] | None = None
    """Inline diffusers config with `_class_name`, for example "PixArtTransformer2DModel".
    `sample_size` is the height and width of an image in pixels or latents. `ffn_size` is a key of
    torchmm: the MLP width, by default 4 x the hidden size. Without `source`, weights are random.
    With `source`, it overrides keys of the source config."""
    vae: AutoencoderConfig | None = None
    """Autoencoder of the latents. If None, the generator is trained on pixels."""
    frames: int = Field(default=1, ge=1)
    """Maximum number of frames of a generated video. 1 means images only."""
    context_tokens: int = Field(default=128, ge=1)
    """Maximum number of preceding tokens whose hidden states condition an image."""
    loss_weight: float = Field(default=1.0, ge=0)
    """Coefficient of the image loss, which is the mean squared error of the velocity, averaged over
    images."""
    text_loss_weight: float = Field(default=1.0, ge=0)
    """Coefficient of the text loss, which is the mean over target tokens."""
    timestep_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """Distribution of noise levels in training. "logit_normal" samples medium noise levels more
    often."""

    @property
    def source_with_revision(self) -> str | None:
        """Source with its revision, see `split_revision`."""
        return source_with_revision(self.source, self.revision)


class ModelConfig(Section):
    """The model: either one multimodal Hugging Face model, or an LLM with separate encoders.

    See docs/get_started/own_model.md.
    """

    source: str | None = None
    """Hugging Face id or local directory of a multimodal model, such as LLaVA or Qwen2.5-VL.
    Excludes `llm` and `encoders`. Its encoders are named "vision" and "audio". A torchmm export of
    separate modules is also accepted. Its `torchmm.json` lists the modules."""
    revision: str | None = None
    """Commit, tag or branch of `source` on the Hub. If None, the default branch is used, and the
    log shows its commit."""
    config: dict[str, Any] | None = None
    """Inline Hugging Face config of a multimodal model. Without `source`, it must have
    `model_type`, and weights are random."""
    modalities: list[Literal["vision", "audio"]] | None = None
    """Encoders of a multimodal model. If None, they are read from the inline or local config. For a
    model on the Hub, the default is "vision"."""
    processor: dict[str, Any] | None = None
    """Settings of a multimodal model that override those of its image processor, such as image
    sizes."""
    llm: LlmConfig | None = None
    """LLM backbone."""
    encoders: dict[str, EncoderConfig] = Field(default={})
    """Encoders by name. [freeze], [parallel] and metrics use these names."""
    generator: GeneratorConfig | None = None
    """Generator after the LLM. [freeze], [parallel] and metrics use the name "generator"."""
    tokenizer: str | None = None
    """Hugging Face id or local directory of the tokenizer. If None, the source of the LLM or of the
    multimodal model is used."""
    tokenizer_revision: str | None = None
    """Commit, tag or branch of `tokenizer` on the Hub. Without `tokenizer`, the `revision` of the
    model applies."""
    new_tokens: list[str] = Field(default=[])
    """Tokens to add to the tokenizer, such as ["<loc_0>", "<loc_1>"]. The embedding and the LM head
    grow if necessary, and rows of added tokens start as the mean of all known tokens. With adapters
    on the LLM, these rows are trained, too, and the other rows stay frozen. Tokens that the
    tokenizer already has keep their rows."""
    image_token: str = "<image>"
    """Token that marks image positions. It must be in the tokenizer and must not occur in text."""
    chunked_loss: bool | None = None
    """Whether to compute logits and their gradients in chunks of targets, which reduces memory use.
    The loss does not change. If None, it is enabled with tensor parallelism in bfloat16, if the
    vocabulary has at least 32,768 entries and the LM head has no bias."""

    @model_validator(mode="before")
    @classmethod
    def _expand_components(cls, values: Any) -> Any:
        """Replace the directory of an export with separate components by these components."""
        source = values.get("source") if isinstance(values, dict) else None
        if not isinstance(source, str) or {"llm", "encoders"} & values.keys():
            return values
        components = _json_file(source, COMPONENTS_FILE)
        if not components:
            return values
        components = with_current_names(components, "model.")
        return {
            **_below(Path(source), components),
            **{k: v for k, v in values.items() if k != "source"},
        }

    @property
    def source_with_revision(self) -> str | None:
        """Source of the multimodal model with its revision, see `split_revision`."""
        return source_with_revision(self.source, self.revision)

    @property
    def is_composite(self) -> bool:
        """True if encoder and LLM are one Hugging Face model."""
        return self.source is not None or self.config is not None

    @property
    def encoder_names(self) -> list[str]:
        """Names of all encoders, in recipe order."""
        if not self.is_composite:
            return list(self.encoders)
        file: dict[str, Any] = {}
        with suppress(ValueError):  # `load_config` reports a damaged file
            file = _json_file(self.source, "config.json")
        components = component_configs({**file, **(self.config or {})})
        names = [name for name in (VISION, AUDIO) if name in components]
        return list(self.modalities or names or [VISION])

    @property
    def modality_modules(self) -> list[str]:
        """Encoders, LLM and generator, in the order in which ranks are assigned to them."""
        return [*self.encoder_names, LLM, *([GENERATOR] if self.generator else [])]

    @property
    def tokenizer_source(self) -> str | None:
        """Source of the tokenizer with its revision, see `split_revision`.

        It is the tokenizer key, or else the source of the multimodal model or the LLM.
        """
        explicit = source_with_revision(self.tokenizer, self.tokenizer_revision)
        return (
            explicit
            or self.source_with_revision
            or (self.llm.source_with_revision if self.llm else None)
        )


def component_configs(config: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the key in [model.config] and the config of each module of a multimodal model config.

    The config of an Omni model has them in `thinker_config`, in addition to the speech modules.
    """
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
    """Resolve the sources and the tokenizer of a table relative to a directory."""
    if not isinstance(value, dict):
        return value
    return {
        key: str(directory / item)
        if key in ("source", "tokenizer") and isinstance(item, str)
        else _below(directory, item)
        for key, item in value.items()
    }


class FreezeConfig(Section):
    """Modules that are not trained. See docs/get_started/own_model.md."""

    modules: list[str] = Field(default=[])
    """Names of frozen modules: "llm", an encoder name (without its connector), "generator", or
    "NAME.connector". Frozen modules have no gradients and no optimizer state."""


class AdapterConfig(Section):
    """A low-rank adapter (LoRA) of one or more modules.

    The weights of these modules are frozen. You choose NAME, and exported files contain it. See
    docs/get_started/lora.md.
    """

    modules: list[str] = Field(min_length=1)
    """Names of adapted modules: "llm", encoder names, and "NAME.connector" of a multimodal model.
    An encoder name does not include its connector."""
    targets: list[str] = Field(default=[ALL_LINEAR], min_length=1)
    """Names or name endings of linear layers that get an adapter, such as "q_proj" or
    "mlp.down_proj". Wildcards are supported ("layers.1?.self_attn.[qv]_proj"). "all-linear" selects
    all linear layers. Stacked experts, embeddings and LM heads are never adapted."""
    rank: int = Field(default=16, ge=1)
    """Rank of the adapter matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """Scaling numerator. The update is multiplied by alpha / rank, or by alpha / sqrt(rank) with
    "rslora"."""
    source: str | None = None
    """Directory of a PEFT adapter to start from, or of an adapter of an earlier run. If None, the
    adapter is new."""
    method: Literal["lora", "rslora", "dora"] = "lora"
    """Type of the adapter. "rslora" uses a scaling that suits large ranks. "dora" also trains a
    magnitude for each output."""
