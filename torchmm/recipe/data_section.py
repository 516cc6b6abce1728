"""`[data]`: samples and their order, which frames of clips are read, who prepares them
elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import Field

from torchmm.recipe.section import Section, with_extensions

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_SCHEME = re.compile(r"(file|local|memory|s3a?|gc?s|az(ure)?|abfss?|hf|https?):", re.IGNORECASE)
_HOST_PORT = re.compile(
    r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_][A-Za-z0-9._-]{0,252}):([0-9]{1,5})"
)
_SECRET = re.compile(r"sig|token|credential|key|secret|password", re.IGNORECASE)
MAX_PRODUCER_WORKERS = 4096
"""Limit on the worker processes of a producer."""


class ProducersConfig(Section):
    """Processes started with `python -m torchmm.data.serve` that decode, resize, tokenise and pack
    for this run. They share no state with it: any of them can prepare any step."""

    addresses: list[str] = Field(default=[])
    """HOST:PORT of each; empty, without a registry: samples are prepared on the machine that
    trains. They are asked for steps in turn, and for a step one after another until one
    answers."""
    registry: str | None = None
    """HOST:PORT where producers report that they are there and how busy they are, in the place of
    `addresses`: they come and go while the run goes on. If it is on this machine, rank 0 listens
    there; elsewhere `python -m torchmm.data.registry` does."""
    plan: bool = False
    """Producers also plan the steps, so that machines that train need neither the data nor their
    index; held-out samples come from there too. With true, the recipe that producers are started
    with has to say so. Not for streams."""
    engine: Literal["embedded", "ray"] = "embedded"
    """Who starts producers. embedded: nobody; the run's own workers prepare samples, or producers
    that are there. ray: rank 0 starts Ray actors (`pip install -e '.[ray]'`), in the cluster of
    the environment variable RAY_ADDRESS or one on this machine; Ray starts those again that die."""
    count: int = Field(default=1, ge=1)
    """Producers that the engine starts."""
    workers: int = Field(default=1, ge=1, le=MAX_PRODUCER_WORKERS)
    """Processes that decode, in each of these."""
    tls_certificate: str | None = None
    """PEM file with their certificate, on their machine, where others have to reach them."""
    tls_key: str | None = None
    """PEM file with its private key, on their machine."""
    ca_certificate: str | None = None
    """PEM file with the certificate that signed theirs; without it nothing is encrypted, which is
    only accepted where they are on this machine. Their token is in the environment variable
    TORCHMM_DATA_TOKEN, never in a recipe."""
    timeout_s: float = Field(default=60.0, gt=0)
    """If a producer has not prepared a step in this time, the next one is asked."""
    retry_timeout_s: float = Field(default=180.0, gt=0)
    """The run ends (exit code 3) when no producer has answered for this long."""
    max_message_mb: float = Field(default=1000.0, gt=0, le=2000)
    """Largest message that is accepted, in units of 10^6 bytes: what one module reads of one
    microbatch. 2000 can be sent."""

    @property
    def is_used(self) -> bool:
        """Return True if producers prepare samples."""
        return bool(self.addresses) or self.registry is not None or self.plan


class VideoConfig(Section):
    """Frames of a clip are evenly spaced and depend only on its length: the same in every
    epoch, on every rank. Needs `pip install -e '.[video]'`."""

    fps: float = Field(default=2.0, gt=0)
    """Frames per second that are read, within the limits below. Encoders whose patches span
    several frames (Qwen's two) read whole groups of them."""
    min_frames: int = Field(default=4, ge=1)
    """Fewest frames of a clip, if it has that many: short ones are read at a higher rate."""
    max_frames: int = Field(default=64, ge=1)
    """Most frames of a clip: long ones are read at a lower rate."""
    max_pixels: int = Field(default=20_000_000, ge=1)
    """Most pixels of all frames of a clip together after resizing: if sizes vary, frames become
    smaller, down to the processor's own minimum; if the encoder has one size, fewer."""
    timestamps: bool = True
    """Write "<1.5 seconds>" before every frame, for encoders that read single frames and know no
    time; otherwise frames follow one another directly."""


class LengthFilter(Section):
    """Which samples of a source take part, by their length in tokens (files and text together,
    after a sample was cut at `training.sequence_length`); the others are left out."""

    min_tokens: int = Field(default=1, ge=1)
    """Shorter samples are left out."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longer samples are left out; none: no limit."""

    def keeps(self, tokens: int) -> bool:
        """Whether a sample of so many tokens takes part."""
        return tokens >= self.min_tokens and (self.max_tokens is None or tokens <= self.max_tokens)


Score = Literal["exact_match", "vqa_accuracy", "cider", "word_error_rate"]


class SourceConfig(Section):
    """One data source of a mixture."""

    path: str
    """Local file, directory or glob; an address of the same (`s3://bucket/shards/*.tar`, `gs://`,
    `hf://datasets/OWNER/NAME`, `https://HOST/FILE`); or a Hugging Face data set id."""
    format: Literal[
        "auto",
        "parquet",
        "arrow",
        "json",
        "csv",
        "webdataset",
        "energon",
        "lance",
        "imagefolder",
        "videofolder",
        "hub",
    ] = "auto"
    """How to read it; "auto" decides by file names (".parquet", ".arrow", ".jsonl", ".csv",
    ".tar", ...); "energon" is a directory with `.nv-meta`, "lance" a table (`NAME.lance`), "hub"
    a Hugging Face data set id."""
    name: str | None = None
    """Name in logs and errors, and in `data.mixture_schedule`; default: derived from the path."""
    split: str = "train"
    """Split of a hub data set or directory, and a slice of its rows: "train[:90%]". Single files
    have the split "train" only."""
    config: str | None = None
    """Subset (configuration) of a hub data set."""
    revision: str | None = None
    """Commit, tag or branch of a hub data set or `hf://` address; a commit never changes. Of a
    Lance table: number of its version."""
    weight: float = Field(default=1.0, gt=0)
    """Share of samples drawn from this source, relative to the other sources' weights."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over this source, relative to the `epochs` of the other sources; replaces `weight`.
    The weight of the source is `epochs` times its number of samples."""
    streaming: bool = False
    """Read in order without random access (for sources too large to index)."""
    files: str | None = None
    """Local directory of the images, videos and audio files that records name, as `image_folder` of
    LLaVA; default: the directory of the source. Paths cannot leave it."""
    columns: dict[str, str] = Field(default={})
    """Names of columns where they differ from those expected: expected name = name in the source,
    as in { image = "pic", text = "alt" }."""
    max_samples: int | None = Field(default=None, ge=1)
    """Only the source's first records, in its own order, take part; none: all."""
    filter: LengthFilter = Field(default=LengthFilter())
    """Limits on the length of samples."""
    prompt: str = ""
    """Text put between the image and the caption of caption samples; not part of the loss."""
    target_image_column: str | None = None
    """Column whose image or clip the generator has to draw from the sample's text (and images),
    instead of an encoder reading it; for example "image"."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What of a chat counts in the loss: all answers of the assistant; only the last one; or all
    text, the template's own included. A message's own `loss` or `train` comes first."""
    metrics: list[Score] = Field(default=[])
    """Of held-out sources: how the texts are judged that the model writes for their samples
    (`validation.num_samples`), against all that the data have as answers; see
    docs/guides/evaluation.md."""


def is_host_port(address: str, lowest_port: int = 1) -> bool:
    """Return True if an address is HOST:PORT, with a name, an IPv4 or a bracketed IPv6 address."""
    match = _HOST_PORT.fullmatch(address)
    return match is not None and lowest_port <= int(match[1]) <= 65535


def is_local(address: str) -> bool:
    """Whether what is sent to HOST:PORT stays on this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(path: object) -> bool:
    """Whether it is the address of something elsewhere, not a path on this machine."""
    match = _ADDRESS.match(str(path))
    return match is not None and match[1].lower() != "file"


def local_path(path: str) -> Path:
    """Return the path that a path or a `file://` address names, with "~" expanded.

    Raises:
        ValueError: The address is on another host, the path looks like an address with one slash
            too few, or the home directory is unknown.
    """
    match = _ADDRESS.match(path)
    if match is not None:
        host, _, rest = path[match.end() :].partition("/")
        if match[1].lower() != "file" or host not in ("", "localhost"):
            raise ValueError(
                "is a file on another host; use a path, or file:///PATH with three slashes"
            )
        return Path("/" + unquote(rest))
    if scheme := _SCHEME.match(path):
        raise ValueError(f"starts with {scheme[0]!r}; use {scheme[0]}//... or a path")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"cannot be expanded ({error}); use an absolute path") from None


def secret_in(address: str) -> str | None:
    """What in an address is a credential, for messages, without its value; None: nothing."""
    if not is_address(address):
        return None
    parts = urlsplit(address)
    if ":" in parts.netloc.rpartition("@")[0]:
        return "user:password@"
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    return next((f"?{name}=" for name in names if _SECRET.search(name)), None)


def unique_names(configs: Sequence[SourceConfig]) -> list[str]:
    """One name per source, from the recipe or the path, numbered where they repeat."""
    names: list[str] = []
    for config in configs:
        path = Path(config.path.partition("://")[2] or config.path)
        parts = [part for part in path.parts if "*" not in part]
        name = config.name or "/".join(parts[-2:])
        copies = sum(n == name or n.startswith(f"{name}#") for n in names)
        names.append(f"{name}#{copies + 1}" if copies else name)
    return names


class StageConfig(Section):
    """A part of training with weights of its own; parts follow one another."""

    until_step: int | None = Field(default=None, ge=1)
    """Last optimizer step whose samples are drawn by these weights; none in the last stage."""
    weights: dict[str, float]
    """Weights of sources by their names; those not named give no samples in this stage."""


@with_extensions
class DataConfig(Section):
    """Samples, their order and how they are read."""

    sources: list[SourceConfig] = Field(default=[])
    """Training mixture: one [[data.sources]] table per source."""
    mixture_schedule: list[StageConfig] = Field(default=[])
    """Weights that change on the way: one [[data.mixture_schedule]] table per part of training, in
    the place of the sources' own weights."""
    validation: list[SourceConfig] = Field(default=[])
    """Held-out sources: one [[data.validation]] table per source."""
    workers: int = Field(default=2, ge=0)
    """Worker processes per rank that decode images; 0 decodes in the training process."""
    prefetch: int = Field(default=2, ge=1)
    """Steps each worker prepares ahead."""
    timeout_s: float = Field(default=240.0, gt=0)
    """The run ends (exit code 3), naming worker and samples, when a step's samples have not arrived
    after this many seconds; with producers: after `data.producers.retry_timeout_s` more. Keep it
    below `parallel.timeout_s`, so that this rank reports before its peers give up on it."""
    shuffle: bool = True
    """Shuffle samples in every epoch (a pure function of seed, epoch and index)."""
    shuffle_window: int = Field(default=1024, ge=1)
    """Samples shuffled together when streaming."""
    packing: Literal["best_fit", "balanced"] = "best_fit"
    """Packing of samples into sequences. "best_fit": into the fullest open sequence that has room.
    "balanced": fill 64 sequences together so that they have similar encoder work, attention and
    number of tokens. A sample is in one of the first 128 sequences after it was drawn."""
    packing_buffer_size: int = Field(default=16, ge=1)
    """Partly filled sequences kept open for best-fit packing."""
    packing_max_wait_steps: int = Field(default=32, ge=1)
    """Best-fit packing closes a sequence that nothing fits into, and trains on it, this many steps
    after it was begun; more at a time than a global batch holds (of at most `packing_buffer_size`)
    take turns."""
    reorder: Literal["auto", "none", "intra", "inter", "both"] = "auto"
    """Rearrange the sequences of each global batch by their cost, vision and text together.
    "intra": balance the work of data-parallel ranks. Ranks that synchronize in every layer (FSDP2
    without a pipeline, experts on several ranks) run equally expensive microbatches at the same
    time; other ranks get equal sums. "inter": order the microbatches of each rank so that its
    pipeline has few gaps. "both": do both. "auto": "intra" without a pipeline if the forecast of
    the first step is faster with it, else "none". Losses do not change, except the load-balancing
    loss of experts with several sequences per microbatch: it depends on which sequences share a
    microbatch. "auto" then means "none". Dropout masks depend on the rank."""
    balance: Literal["auto", "none", "images"] = "auto"
    """"images": all data-parallel ranks share the images, videos and audio clips of a microbatch
    and the images that a generator learns, so that all ranks have equal work. Features return to
    the rank that trains on the sample. Losses stay the same. Requires `parallel.pipeline` = 1, and
    not `parallel.llm.context` or producers. "auto": "images" if it is supported and the forecast of
    the first step is at least 1 % faster with it, else "none". See
    docs/guides/balanced_encoders.md."""
    max_images_per_sample: int = Field(default=64, ge=1)
    """A sample is truncated before the first image or video beyond this number."""
    max_tiles_per_sample: int | None = Field(default=None, ge=1)
    """Pictures that a checkpoint's processor cuts into tiles get lower resolutions, down to one
    tile each, until those of a sample have no more tiles than this together; default: as many as
    the processor makes."""
    max_tiles_per_sequence: int | None = Field(default=None, ge=1)
    """Samples are packed so that a sequence has no more pictures and tiles than this, and a sample
    with more is cut like one above `max_tiles_per_sample`; default: any number."""
    max_image_pixels: int = Field(default=64_000_000, ge=1)
    """Images with more pixels in their header count as corrupt and are never decoded."""
    max_file_mb: float = Field(default=1000.0, gt=0)
    """Larger files (images, clips, sounds) count as corrupt and are never read, in units of 10^6
    bytes."""
    video: VideoConfig = Field(default=VideoConfig())
    """Which frames of clips are read."""
    max_corrupt_samples: int = Field(default=100, ge=0)
    """Corrupt samples skipped (and logged) over all ranks before the run stops with exit code 3."""
    max_corrupt_fraction: float = Field(default=0.1, ge=0, le=1)
    """The run also stops when more than this share of the samples seen (at least 100) is
    corrupt."""
    index_cache_dir: str = "data/index"
    """Directory for the sample-length index of map-style sources."""
    producers: ProducersConfig = Field(default=ProducersConfig())
    """Other processes that prepare training samples; default: this run's own workers do."""

    @property
    def is_reordered(self) -> bool:
        """Return True if sequences are rearranged. "auto" has to be resolved before."""
        return self.reorder not in ("auto", "none")
