"""One path from a raw record to a tokenised sample, used for measuring and for decoding alike.

Lengths that planning saw and tensors that training gets cannot disagree, because both come from
`SampleReader.read`; only the pixels are decoded later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from torchmm.batch import ImageMeta, ImageSpec, SampleMeta, TextSpec
from torchmm.config import DataConfig
from torchmm.data.chat import ChatTemplate
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.generated_images import TargetPreprocessor
from torchmm.data.images import ImagePreprocessor, read_size
from torchmm.data.samples import (
    GeneratedSegment,
    ImageSegment,
    Record,
    Sample,
    limit_images,
    parse_record,
    without_generated,
)
from torchmm.data.text import EncodedSample, TextEncoder
from torchmm.errors import ConfigError
from torchmm.generated import GeneratedMeta


@dataclass(frozen=True)
class MeasuredSample:
    """A tokenised sample whose images are still files."""

    text: EncodedSample
    images: list[ImageMeta]
    files: list[bytes]
    """Encoded images, one per entry of `images`."""
    generated: list[GeneratedMeta] = field(default_factory=list)
    """Images to be drawn."""
    generated_files: list[bytes] = field(default_factory=list)


class SampleReader:
    """Turns records into tokenised samples with image sizes.

    Args:
        data: limits on images.
        sequence_length: longest sample in tokens.
        text_spec: the LLM's wishes.
        image_specs: wishes by encoder name; without one, images are left out and the run is
            text-only.
        tokenizer: the LLM's tokenizer.
        targets: prepares images to be drawn; without it, they are left out.

    Raises:
        ConfigError: more than one encoder reads images (a sample cannot say which one it wants).
    """

    def __init__(
        self,
        data: DataConfig,
        sequence_length: int,
        text_spec: TextSpec,
        image_specs: Mapping[str, ImageSpec],
        tokenizer: PreTrainedTokenizerBase,
        targets: TargetPreprocessor | None = None,
    ) -> None:
        if len(image_specs) > 1:
            raise ConfigError(
                f"model.encoders: {sorted(image_specs)} all read images; one image encoder is "
                "supported"
            )
        if image_specs and text_spec.image_token_id is None:
            raise ConfigError("model.image_token: the tokenizer has no such token, but an encoder")
        self.encoder = next(iter(image_specs), None)
        self.images = ImagePreprocessor(image_specs[self.encoder]) if self.encoder else None
        self.targets = targets
        self.text_spec = text_spec
        self.max_pixels = data.max_image_pixels
        self._max_images = data.max_images_per_sample if self.images else 0
        self._text = TextEncoder(tokenizer, text_spec, sequence_length)
        self._chat = ChatTemplate(tokenizer)

    def read(self, record: Record, prompt: str) -> MeasuredSample:
        """Parse, check image headers, tokenise, truncate.

        Raises:
            CorruptSampleError: the sample cannot be used, with the reason.
        """
        sample = limit_images(parse_record(record, prompt, self._chat), self._max_images)
        if self.targets is None:
            sample = without_generated(sample)
        files, metas = [], []
        for segment in sample.segments:
            if isinstance(segment, ImageSegment):
                assert self.images is not None
                files.append(segment.read())
                metas.append(self.images.meta(*read_size(files[-1], self.max_pixels)))
        text = self._text.encode(sample, [m.tokens for m in metas])
        generated, generated_files = self._measure_generated(sample, text)
        if not any(text.loss[1:]) and not generated:
            raise CorruptSampleError(
                f"nothing to predict in its first {len(text.ids)} tokens (no text, or cut at "
                f"training.sequence_length = {self._text.sequence_length})"
            )
        kept = len(text.image_starts)
        return MeasuredSample(text, metas[:kept], files[:kept], generated, generated_files)

    def _measure_generated(
        self, sample: Sample, text: EncodedSample
    ) -> tuple[list[GeneratedMeta], list[bytes]]:
        """Sizes and files of what is to be drawn and was not cut off."""
        segments = [s.file for s in sample.segments if isinstance(s, GeneratedSegment)]
        metas, files = [], []
        for segment, context_end in zip(segments, text.generated_at, strict=False):
            assert self.targets is not None
            if context_end == 0:
                raise CorruptSampleError("nothing stands before the image to be drawn")
            files.append(segment.read())
            metas.append(self.targets.meta(files[-1], context_end))
        return metas, files

    def meta(self, name: str, index: int, sample: MeasuredSample) -> SampleMeta:
        """Metadata of a sample of source `name`."""
        encoder = self.encoder if sample.images else None
        images, generated = tuple(sample.images), tuple(sample.generated)
        return SampleMeta(name, index, len(sample.text.ids), images, encoder, generated)
