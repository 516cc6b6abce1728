"""One path from a raw record to a tokenised sample, used for measuring and for decoding alike.

Lengths that planning saw and tensors that training gets cannot disagree, because both come from
`SampleReader.read`; only the pixels are decoded later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from torchmm.batch import ImageMeta, ImageSpec, SampleMeta, TextSpec
from torchmm.config import DataConfig
from torchmm.data.chat import ChatTemplate
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.generated_images import TargetPreprocessor
from torchmm.data.media import MediaPreprocessor, open_media
from torchmm.data.samples import (
    FileSegment,
    GeneratedSegment,
    Record,
    Sample,
    assign_encoders,
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
    """Images and sounds."""
    files: list[bytes]
    """Encoded, one per entry of `images`."""
    generated: list[GeneratedMeta] = field(default_factory=list)
    """Images to be drawn."""
    generated_files: list[bytes] = field(default_factory=list)


class SampleReader:
    """Turns records into tokenised samples with image sizes.

    Args:
        data: limits on images.
        sequence_length: longest sample in tokens.
        text_spec: the LLM's wishes.
        image_specs: wishes by encoder name. Every image goes to all that read images, every sound
            to all that hear; what none reads is left out.
        tokenizer: the LLM's tokenizer.
        targets: prepares images to be drawn; without it, they are left out.

    Raises:
        ConfigError: an encoder's processor does not fit, or there is no placeholder.
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
        if image_specs and text_spec.image_token_id is None:
            raise ConfigError("model.image_token: the tokenizer has no such token, but an encoder")
        self.media = {n: open_media(s, data.max_image_pixels) for n, s in image_specs.items()}
        self.encoders = tuple(image_specs)
        self._readers = {
            kind: [name for name, spec in image_specs.items() if spec.modality == kind]
            for kind in ("image", "audio")
        }
        self.targets = targets
        self.text_spec = text_spec
        self.max_pixels = data.max_image_pixels
        self._max_images = data.max_images_per_sample
        self._text = TextEncoder(tokenizer, text_spec, sequence_length)
        self._chat = ChatTemplate(tokenizer)

    def read(self, record: Record, prompt: str) -> MeasuredSample:
        """Parse, check image headers, tokenise, truncate.

        Raises:
            CorruptSampleError: the sample cannot be used, with the reason.
        """
        sample = limit_images(parse_record(record, prompt, self._chat), self._max_images)
        sample = assign_encoders(sample, self._readers)
        if self.targets is None:
            sample = without_generated(sample)
        files, metas = [], []
        for segment in sample.segments:
            if isinstance(segment, FileSegment):
                assert segment.encoder is not None
                files.append(segment.read())
                metas.append(self._measure(segment.encoder, files[-1]))
        text = self._text.encode(sample, [m.tokens for m in metas])
        generated, generated_files = self._measure_generated(sample, text)
        if not any(text.loss[1:]) and not generated:
            raise CorruptSampleError(
                f"nothing to predict in its first {len(text.ids)} tokens (no text, or cut at "
                f"training.sequence_length = {self._text.sequence_length})"
            )
        kept = len(text.image_starts)
        return MeasuredSample(text, metas[:kept], files[:kept], generated, generated_files)

    def _measure(self, encoder: str, data: bytes) -> ImageMeta:
        meta = self.media[encoder].meta(data)
        # Only where there are several, so that equal samples of most models have equal metadata.
        return replace(meta, encoder=encoder) if len(self.encoders) > 1 else meta

    def medium(self, image: ImageMeta) -> MediaPreprocessor:
        """What prepares an image or sound of a sample."""
        return self.media[image.encoder or self.encoders[0]]

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
        encoder = self.encoders[0] if sample.images and len(self.encoders) == 1 else None
        images, generated = tuple(sample.images), tuple(sample.generated)
        return SampleMeta(name, index, len(sample.text.ids), images, encoder, generated)
