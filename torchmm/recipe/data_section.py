"""`[data]`: samples and their order, which frames of clips are read, who prepares them
elsewhere.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torchmm.recipe.section import Section


class ProducersConfig(Section):
    """Processes started with `python -m torchmm.data.serve` that decode, resize, tokenise and pack
    for this run. They share no state with it: any of them can prepare any step."""

    addresses: list[str] = Field(default=[])
    """HOST:PORT of each; empty: samples are prepared on the machine that trains. A step is
    requested from one after another until one answers."""
    ca_certificate: str | None = None
    """PEM file with the certificate that signed theirs; without it nothing is encrypted, which
    producers only accept on their own machine. Their token is in the environment variable
    TORCHMM_DATA_TOKEN, never in a recipe."""
    timeout_s: float = Field(default=60.0, gt=0)
    """If a producer has not prepared a step in this time, the next one is asked."""
    give_up_s: float = Field(default=180.0, gt=0)
    """The run ends (exit code 3) when no producer has answered for this long."""
    max_message_mb: float = Field(default=1000.0, gt=0)
    """Largest prepared step that is accepted, in units of 10^6 bytes."""


class VideoConfig(Section):
    """Frames of a clip are evenly spaced and depend only on its length: the same in every
    epoch, on every rank. Needs `pip install "torchmm[video]"`."""

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


class SourceConfig(Section):
    """One data source of a mixture."""

    path: str
    """Local file, directory or glob, or a Hugging Face data set id."""
    format: Literal[
        "auto", "parquet", "arrow", "json", "webdataset", "imagefolder", "videofolder", "hub"
    ] = "auto"
    """How to read it; "auto" decides by file names (".parquet", ".arrow", ".jsonl", ".tar", ...);
    "hub" is a Hugging Face data set id."""
    name: str | None = None
    """Name in logs and errors; default: derived from the path."""
    split: str = "train"
    """Split, for hub data sets and directories with one."""
    weight: float = Field(default=1.0, gt=0)
    """Share of samples drawn from this source, relative to the other sources' weights."""
    streaming: bool = False
    """Read in order without random access (for sources too large to index)."""
    prompt: str = ""
    """Text put between the image and the caption of caption samples; not part of the loss."""
    generate: str | None = None
    """Column whose image or clip the generator has to draw from the sample's text (and images),
    instead of an encoder reading it; for example "image"."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What of a chat counts in the loss: all answers of the assistant; only the last one; or all
    text, the template's own included. A message's own `loss` or `train` comes first."""


class DataConfig(Section):
    """Samples, their order and how they are read."""

    sources: list[SourceConfig] = Field(default=[])
    """Training mixture: one [[data.sources]] table per source."""
    validation: list[SourceConfig] = Field(default=[])
    """Held-out sources: one [[data.validation]] table per source."""
    workers: int = Field(default=2, ge=0)
    """Worker processes per rank that decode images; 0 decodes in the training process."""
    prefetch: int = Field(default=2, ge=1)
    """Steps each worker prepares ahead."""
    timeout_s: float = Field(default=240.0, gt=0)
    """The run ends (exit code 3), naming worker and samples, when a step's samples have not arrived
    after this many seconds; with producers: after `data.producers.give_up_s` more. Keep it below
    `parallel.timeout_s`, so that this rank reports before its peers give up on it."""
    shuffle: bool = True
    """Shuffle samples in every epoch (a pure function of seed, epoch and index)."""
    shuffle_window: int = Field(default=1024, ge=1)
    """Samples shuffled together when streaming."""
    open_packs: int = Field(default=16, ge=1)
    """Partly filled sequences kept open for best-fit packing."""
    reorder: Literal["none", "intra", "inter", "both"] = "none"
    """Rearrange the sequences of each global batch by their cost, vision and text together:
    "intra": so that all data-parallel ranks have equal work; "inter": so that each rank's
    microbatches come in an order with few gaps in its pipeline; "both". Losses stay the same."""
    max_images_per_sample: int = Field(default=64, ge=1)
    """Further images of a sample are dropped, with their placeholders."""
    max_image_pixels: int = Field(default=64_000_000, ge=1)
    """Images with more pixels in their header count as corrupt and are never decoded."""
    video: VideoConfig = Field(default=VideoConfig())
    """Which frames of clips are read."""
    max_corrupt_samples: int = Field(default=100, ge=0)
    """Corrupt samples skipped (and logged) over all ranks before the run stops with exit code 3."""
    max_corrupt_fraction: float = Field(default=0.1, ge=0, le=1)
    """The run also stops when more than this share of the samples seen (at least 100) is
    corrupt."""
    index_cache: str = "data/index"
    """Directory for the sample-length index of map-style sources."""
    producers: ProducersConfig = Field(default=ProducersConfig())
    """Other processes that prepare training samples; default: this run's own workers do."""
