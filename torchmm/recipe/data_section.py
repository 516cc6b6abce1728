"""The section `[data]`: sources, sample order, packing, video frames and remote data workers."""

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
    """Remote data workers, which prepare samples for this run.

    They are processes started with `python -m torchmm.data.serve` that decode, resize, tokenize and
    pack samples. They are stateless, so each of them can prepare any step. See
    docs/reference/data.md.
    """

    addresses: list[str] = Field(default=[])
    """HOST:PORT of each remote data worker. Requests are distributed round-robin. A request that
    fails is sent to the next worker. If empty and without `registry`, samples are prepared
    locally."""
    registry: str | None = None
    """HOST:PORT at which remote data workers register and report their load. It replaces
    `addresses`. Workers can join and leave during training. If the host is local, rank 0 starts the
    registry. Otherwise start `python -m torchmm.data.registry` on that host."""
    plan: bool = False
    """Whether remote data workers also select the samples of each step. Training nodes then need
    neither the data nor the index, and held-out samples also come from the workers. The recipe of
    the workers must set the same value. Streaming sources are not supported."""
    engine: Literal["embedded", "ray"] = "embedded"
    """Process manager of the remote data workers. "embedded" starts none. "ray" starts Ray actors
    from rank 0, in the cluster of the environment variable RAY_ADDRESS or on this host. Ray
    restarts actors that fail. Requires `pip install -e '.[ray]'`."""
    count: int = Field(default=1, ge=1)
    """Number of remote data workers that `engine` starts."""
    workers: int = Field(default=1, ge=1, le=MAX_PRODUCER_WORKERS)
    """Number of decoding processes of each worker that `engine` starts."""
    tls_certificate: str | None = None
    """PEM file of the server certificate, on the host of the worker."""
    tls_key: str | None = None
    """PEM file of the private key of the server, on the host of the worker."""
    ca_certificate: str | None = None
    """PEM file of the certificate that signed the server certificate. If None, connections are not
    encrypted, and only local workers are accepted. Set the access token in the environment variable
    TORCHMM_DATA_TOKEN, never in a recipe."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time in seconds after which an unanswered request is sent to the next worker."""
    retry_timeout_s: float = Field(default=180.0, gt=0)
    """Time in seconds without a response of any worker after which the run stops with exit code
    3."""
    max_message_mb: float = Field(default=1000.0, gt=0, le=2000)
    """Maximum size of a response in MB (10^6 bytes). A response has the input of one module for one
    microbatch."""

    @property
    def is_used(self) -> bool:
        """Return True if producers prepare samples."""
        return bool(self.addresses) or self.registry is not None or self.plan


class VideoConfig(Section):
    """Frame sampling of videos.

    Frames are evenly spaced and depend only on the video length, so they are the same in every
    epoch and on every rank. Requires `pip install -e '.[video]'`. See
    docs/reference/data_formats.md.
    """

    fps: float = Field(default=2.0, gt=0)
    """Frames read per second of video, within the limits below. Encoders with temporal patches,
    such as Qwen-VL, read complete groups of frames."""
    min_frames: int = Field(default=4, ge=1)
    """Minimum number of frames of a video. Short videos are read at a higher frame rate. Videos
    with fewer frames are read completely."""
    max_frames: int = Field(default=64, ge=1)
    """Maximum number of frames of a video. Long videos are read at a lower frame rate."""
    max_pixels: int = Field(default=20_000_000, ge=1)
    """Maximum number of pixels of all frames of a video after resizing. Encoders with variable
    resolution get smaller frames, down to the minimum of the processor. Encoders with a fixed
    resolution get fewer frames."""
    timestamps: bool = True
    """Whether to write "<1.5 seconds>" before each frame, for encoders without temporal patches."""


class LengthFilter(Section):
    """Limits on the sample length in tokens, media included. Other samples are skipped.

    The length is measured after truncation to `training.sequence_length`.
    """

    min_tokens: int = Field(default=1, ge=1)
    """Minimum number of tokens of a sample."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of a sample. If None, there is no limit."""

    def keeps(self, tokens: int) -> bool:
        """Return True if the filter accepts a sample with this number of tokens."""
        return tokens >= self.min_tokens and (self.max_tokens is None or tokens <= self.max_tokens)


Score = Literal["exact_match", "vqa_accuracy", "cider", "word_error_rate"]


class SourceConfig(Section):
    """A data source of the training mixture, or a held-out source. See docs/reference/data.md."""

    path: str
    """Local file, directory or glob, a URL (`s3://bucket/shards/*.tar`, `gs://`,
    `hf://datasets/OWNER/NAME`, `https://HOST/FILE`), or a Hugging Face data set id."""
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
    """Storage format. "auto" selects it by file name (".parquet", ".arrow", ".jsonl", ".csv",
    ".tar" and others). "energon" is a directory with `.nv-meta`, "lance" a Lance table, and "hub" a
    Hugging Face data set id."""
    name: str | None = None
    """Name in logs, errors and `data.mixture_schedule`. If None, it is derived from `path`."""
    split: str = "train"
    """Split of a Hub data set or directory, optionally with a slice, such as "train[:90%]". Single
    files only have the split "train"."""
    config: str | None = None
    """Configuration (subset) of a Hub data set."""
    revision: str | None = None
    """Commit, tag or branch of a Hub data set or `hf://` URL, or version number of a Lance table.
    Use a commit for reproducible runs."""
    weight: float = Field(default=1.0, gt=0)
    """Sampling weight of this source, relative to the other sources."""
    epochs: float | None = Field(default=None, gt=0)
    """Number of passes over this source, relative to the other sources. It replaces `weight`: the
    sampling weight is `epochs` times the number of samples. Set it for all sources or for none."""
    streaming: bool = False
    """Whether to read samples sequentially without an index. Use it for sources that are too large
    to index."""
    files: str | None = None
    """Local directory of the image, video and audio files that records reference, such as
    `image_folder` of LLaVA. If None, the directory of the source is used. Paths outside of it are
    rejected."""
    columns: dict[str, str] = Field(default={})
    """Mapping of expected column names to names in the source, such as { image = "pic", text =
    "alt" }."""
    max_samples: int | None = Field(default=None, ge=1)
    """Number of records to use, from the start of the source. If None, all records are used."""
    filter: LengthFilter = Field(default=LengthFilter())
    """Limits on the sample length."""
    prompt: str = ""
    """Text between the image and the caption of caption samples. It is not included in the loss."""
    target_image_column: str | None = None
    """Name of the column with the target image or video of the generator, for example "image". No
    encoder reads this column."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Chat text that is included in the loss: all assistant messages, only the last one, or all
    text with the chat template. A `loss` or `train` field of a message has precedence."""
    train_template_prefix: bool = False
    """Whether the loss includes text that the chat template writes at the start of an answer, such
    as an empty `<think></think>`. Models that are used with the same template never generate it."""
    box_format: Literal["pixels", "norm1", "norm1000"] | None = None
    """Coordinates of boxes and points in the text of records: pixels of the image, 0 to 1, or 0 to
    1000. torchmm converts them to the coordinates of the model, in `"bbox_2d": [...]`,
    `"point_2d": [...]` and `<|box_start|>(x1,y1),(x2,y2)<|box_end|>`. If None, text is unchanged.
    The column `objects` does not require it."""
    metrics: list[Score] = Field(default=[])
    """Metrics of the text that the model generates for `validation.num_samples` held-out samples.
    Only for [[data.validation]]. See docs/guides/evaluation.md."""


def is_host_port(address: str, lowest_port: int = 1) -> bool:
    """Return True if an address is HOST:PORT, with a name, an IPv4 or a bracketed IPv6 address."""
    match = _HOST_PORT.fullmatch(address)
    return match is not None and lowest_port <= int(match[1]) <= 65535


def is_local(address: str) -> bool:
    """Return True if HOST:PORT is an address of this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(path: object) -> bool:
    """Return True for URLs of other machines, and False for local paths and `file://` URLs."""
    match = _ADDRESS.match(str(path))
    return match is not None and match[1].lower() != "file"


def local_path(path: str) -> Path:
    """Return the local path of a path or a `file://` URL, with "~" expanded.

    Raises:
        ValueError: The URL names another host, the path looks like a URL with a missing slash, or
            the home directory is unknown.
    """
    match = _ADDRESS.match(path)
    if match is not None:
        host, _, remaining = path[match.end() :].partition("/")
        if match[1].lower() != "file" or host not in ("", "localhost"):
            raise ValueError(
                "is a file on another host; use a path, or file:///PATH with three slashes"
            )
        return Path("/" + unquote(remaining))
    if scheme := _SCHEME.match(path):
        raise ValueError(f"starts with {scheme[0]!r}; use {scheme[0]}//... or a path")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"cannot be expanded ({error}); use an absolute path") from None


def find_credential(address: str) -> str | None:
    """Return the kind of credential in a URL without its value, or None without credentials."""
    if not is_address(address):
        return None
    parts = urlsplit(address)
    if ":" in parts.netloc.rpartition("@")[0]:
        return "user:password@"
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    return next((f"?{name}=" for name in names if _SECRET.search(name)), None)


def unique_names(configs: Sequence[SourceConfig]) -> list[str]:
    """Return one name per source, from the recipe or the path. Repeated names are numbered."""
    names: list[str] = []
    for config in configs:
        path = Path(config.path.partition("://")[2] or config.path)
        parts = [part for part in path.parts if "*" not in part]
        name = config.name or "/".join(parts[-2:])
        copies = sum(n == name or n.startswith(f"{name}#") for n in names)
        names.append(f"{name}#{copies + 1}" if copies else name)
    return names


class StageConfig(Section):
    """A phase of training with its own sampling weights.

    Phases follow in the order of the tables.
    """

    until_step: int | None = Field(default=None, ge=1)
    """Last optimizer step of this phase. Omit it in the last phase."""
    weights: dict[str, float]
    """Sampling weights by source name. Sources without a weight are not used in this phase."""


@with_extensions
class DataConfig(Section):
    """Training and held-out data, packing and sample order.

    See docs/get_started/own_data.md and docs/reference/data.md.
    """

    sources: list[SourceConfig] = Field(default=[])
    """Training mixture. Add one [[data.sources]] table per source."""
    mixture_schedule: list[StageConfig] = Field(default=[])
    """Sampling weights that change during training. Add one [[data.mixture_schedule]] table per
    phase. They replace the weights of the sources."""
    validation: list[SourceConfig] = Field(default=[])
    """Held-out sources. Add one [[data.validation]] table per source."""
    workers: int = Field(default=2, ge=0)
    """Number of processes per rank that decode media. 0 decodes in the training process."""
    prefetch: int = Field(default=2, ge=1)
    """Number of steps that each worker prepares in advance."""
    timeout_s: float = Field(default=240.0, gt=0)
    """Time in seconds after which the run stops with exit code 3 if the samples of a step have not
    arrived. The error names the worker and the samples. With remote data workers,
    `data.producers.retry_timeout_s` is added. Keep it below `parallel.timeout_s`, so that this rank
    reports the error first."""
    shuffle: bool = True
    """Whether to shuffle samples in every epoch. The order depends only on seed, epoch and
    index."""
    shuffle_window: int = Field(default=1024, ge=1)
    """Number of samples in the shuffle buffer of a streaming source."""
    packing: Literal["best_fit", "balanced"] = "best_fit"
    """Algorithm that packs samples into sequences. "best_fit" adds a sample to the open sequence
    with the least sufficient free space. "balanced" fills 64 sequences at once, so that their
    encoder work, attention cost and number of tokens are similar."""
    packing_buffer_size: int = Field(default=16, ge=1)
    """Number of open sequences of best-fit packing."""
    packing_max_wait_steps: int = Field(default=32, ge=1)
    """Number of steps after which best-fit packing closes an open sequence, even if it has free
    space. At most one global batch of such sequences is used per step."""
    reorder: Literal["auto", "none", "intra", "inter", "both"] = "auto"
    """Redistribution of the sequences of each global batch by their cost. "intra" balances
    data-parallel ranks. "inter" orders the microbatches of each rank to reduce pipeline bubbles.
    "both" does both. "auto" selects "intra" without a pipeline if the simulated first step is
    faster, and "none" otherwise. Losses do not change, with two exceptions. The load-balancing loss
    of experts depends on the sequences of a microbatch, and dropout masks depend on the rank. With
    experts and more than one sequence per microbatch, "auto" is "none". See
    docs/guides/balance_data.md."""
    balance: Literal["auto", "none", "images"] = "auto"
    """Distribution of encoder work. "images" distributes the images, videos and audio of a
    microbatch, and target images of a generator, over all data-parallel ranks. Features are sent
    back to the rank of the sample. Losses do not change. Requires `parallel.pipeline` = 1, no
    `parallel.llm.context` and no remote data workers. "auto" selects "images" if the simulated
    first step is at least 1 % faster. See docs/guides/balance_data.md."""
    max_images_per_sample: int = Field(default=64, ge=1)
    """Maximum number of images and videos of a sample. The sample is truncated before the next
    one."""
    max_tiles_per_sample: int | None = Field(default=None, ge=1)
    """Maximum number of image tiles of a sample, for processors that split images into tiles.
    Images are processed at a lower resolution to meet the limit, down to one tile each. If None,
    there is no limit."""
    max_tiles_per_sequence: int | None = Field(default=None, ge=1)
    """Maximum number of images and tiles of a packed sequence. Samples with more tiles are reduced
    as with `max_tiles_per_sample`. If None, there is no limit."""
    max_image_pixels: int = Field(default=64_000_000, ge=1)
    """Maximum number of pixels of an image, according to its header. Larger images are not decoded,
    and their samples are corrupt."""
    max_file_mb: float = Field(default=1000.0, gt=0)
    """Maximum size of a media file in MB (10^6 bytes). Larger files are not read, and their samples
    are corrupt."""
    video: VideoConfig = Field(default=VideoConfig())
    """Frame sampling of videos."""
    max_corrupt_samples: int = Field(default=100, ge=0)
    """Number of corrupt samples of all ranks that are skipped and logged before the run stops with
    exit code 3."""
    max_corrupt_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of corrupt samples, of at least 100 samples, above which the run stops with exit
    code 3."""
    index_cache_dir: str = "data/index"
    """Directory of the index with the sample lengths of non-streaming sources."""
    producers: ProducersConfig = Field(default=ProducersConfig())
    """Remote data workers. By default, the workers of each rank prepare its samples."""

    @property
    def is_reordered(self) -> bool:
        """True if sequences are reordered. "auto" must be resolved before."""
        return self.reorder not in ("auto", "none")
