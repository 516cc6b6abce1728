"""The recipe's `[data]`: sources, their order, and how they are read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torchmm.config_model import Section
from torchmm.config_producers import ProducersConfig
from torchmm.config_video import VideoConfig


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
    """Column whose image or clip the generator has to draw from the sample's text (and images)
    instead of an encoder reading it, for example "image"."""


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
    """The run ends (exit code 3), naming worker and samples, when a step's samples have not come
    after this many seconds; with producers: after `data.producers.give_up_s` more. Keep it below
    `parallel.timeout_s`, so that this rank speaks before its peers give it up."""
    shuffle: bool = True
    """Shuffle samples in every epoch (a pure function of seed, epoch and index)."""
    shuffle_window: int = Field(default=1024, ge=1)
    """Samples shuffled together when streaming."""
    open_packs: int = Field(default=16, ge=1)
    """Partly filled sequences kept open for best-fit packing."""
    reorder: Literal["none", "intra", "inter", "both"] = "none"
    """Rearrange the sequences of each global batch by what they cost, vision and text together:
    "intra": so that all data-parallel ranks have equally much to do; "inter": so that each rank's
    microbatches come in an order with few gaps in its pipeline; "both". Losses stay the same."""
    max_images_per_sample: int = Field(default=64, ge=1)
    """Further images of a sample are dropped together with their placeholders."""
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
