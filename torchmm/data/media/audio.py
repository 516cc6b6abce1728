"""Sound files to encoder inputs: header check, one conversion to mono, the Hugging Face extractor.

Planning needs only the length, which is in the header. A sound becomes patches, each the mel bins
(for Wav2Vec2 the samples) of the few frames that the encoder makes one position of, so that sounds
of any length are packed one after another without padding. Rejected: padding every sound to
30 s, as Whisper's own pipeline does, which makes a spoken word as costly as half a minute.

Files are read by libsndfile (soundfile), resampled by a polyphase filter (SciPy). Rejected:
torchcodec and FFmpeg, binary dependencies that do not match every torch.

Shape legend: S samples, F mel frames, M mel bins, P patches, D values of one patch.
"""

from __future__ import annotations

import importlib.util
import io
from math import ceil, gcd
from typing import Any

import numpy as np
import transformers

from torchmm.common.batch import ImageMeta, ImageSpec
from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import CorruptSampleError

MAX_RATE = 768_000
"""Samples per second accepted as plausible."""


class AudioPreprocessor:
    """The Hugging Face feature extractor of one encoder, and its output sizes without running it.

    Args:
        spec: how the encoder wants its sounds.

    Raises:
        ConfigError: soundfile is not installed, or the extractor is unknown or does not fit.
    """

    grouped = False
    """Patches of sounds are concatenated."""

    def __init__(self, spec: ImageSpec) -> None:
        self.spec = spec
        cls = getattr(transformers, spec.processor_class, None)
        if cls is None:
            raise ConfigError(
                f"encoder {spec.encoder!r}: transformers {transformers.__version__} has no feature "
                f"extractor {spec.processor_class!r}"
            )
        self._extractor = cls(**spec.processor)
        self._rate: int = self._extractor.sampling_rate
        self._hears_waves = self._extractor.model_input_names[0] == "input_values"
        hop = 1 if self._hears_waves else self._extractor.hop_length
        self._hop = hop
        self._frames = spec.patch_size_px // hop
        if self._frames * hop != spec.patch_size_px:
            raise ConfigError(
                f"encoder {spec.encoder!r}: patches of {spec.patch_size_px} samples, which are no "
                f"multiple of processor.hop_length = {hop}"
            )
        if importlib.util.find_spec("soundfile") is None:
            raise ConfigError(
                f"encoder {spec.encoder!r} hears sounds; pip install 'torchmm[audio]'"
            )

    def meta(self, data: bytes) -> ImageMeta:
        """What planning needs to know of a sound.

        Raises:
            CorruptSampleError: no sound in a known format, or an empty one.
        """
        import soundfile  # noqa: PLC0415 - an extra

        try:
            info = soundfile.info(io.BytesIO(data))
        except soundfile.LibsndfileError as error:
            kind = f"{len(data)} bytes starting with {data[:12]!r}"
            raise CorruptSampleError(f"not a sound ({kind}): {error}") from error
        if info.frames < 1 or not 0 < info.samplerate <= MAX_RATE:
            raise CorruptSampleError(
                f"sound of {info.frames} samples at {info.samplerate} per second"
            )
        samples = ceil(info.frames * self._rate / info.samplerate)
        group = self.spec.patches_per_token
        pooled = max(1, self._patches(samples) // self.spec.pooled)
        patches = ceil(pooled / self.spec.merge**2) * group
        if self.spec.max_patches:
            patches = min(patches, self.spec.max_patches // group * group)
        duration_ms = round(1000 * min(samples, self._samples(patches)) / self._rate)
        return ImageMeta(0, 0, patches, patches // group, duration_ms=duration_ms)

    def _patches(self, samples: int) -> int:
        """That hold so many samples."""
        size = self.spec.patch_size_px
        chunk_size, chunk_patches = self.spec.sound_chunk or (size, 1)
        chunks, rest = divmod(samples, chunk_size)
        return chunks * chunk_patches + min(ceil(rest / size), chunk_patches)

    def _samples(self, patches: int) -> int:
        """That so many patches hold."""
        size = self.spec.patch_size_px
        chunk_size, chunk_patches = self.spec.sound_chunk or (size, 1)
        chunks, rest = divmod(patches, chunk_patches)
        return chunks * chunk_size + rest * size

    def grid_thw(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Patches as (frames, rows, columns)."""
        return 1, 1, meta.patches

    def block(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Output tokens as (frames, rows, columns)."""
        return 1, 1, meta.tokens

    def pixels(self, data: bytes, meta: ImageMeta) -> np.ndarray:
        """float32 (P, D) of a sound.

        Raises:
            CorruptSampleError: it cannot be decoded.
        """
        wanted = self._samples(meta.patches)
        wave_S = self._decode(data, wanted)
        if self._hears_waves and len(wave_S):  # normalized without the zeros after it
            made: Any = self._extractor(wave_S, sampling_rate=self._rate, return_tensors="np")
            wave_S = np.asarray(made["input_values"][0], np.float32)
        padded_S = np.zeros(wanted, np.float32)
        padded_S[: len(wave_S)] = wave_S
        if self._hears_waves:
            return padded_S.reshape(meta.patches, -1)
        found: Any = self._extractor(
            padded_S, sampling_rate=self._rate, padding="longest", return_tensors="np"
        )
        frames_FM = np.asarray(found["input_features"][0], np.float32).T
        if self.spec.sound_chunk is not None:
            frames_FM = self._fill_chunks(frames_FM, meta.patches)
        return np.ascontiguousarray(frames_FM).reshape(meta.patches, -1)

    def _fill_chunks(self, frames_FM: np.ndarray, patches: int) -> np.ndarray:
        """The same with zeros where the last patch of a chunk is shorter than the others."""
        assert self.spec.sound_chunk is not None
        chunk_size, chunk_patches = self.spec.sound_chunk
        given = chunk_size // self._hop
        filled = chunk_patches * self._frames
        whole_FM = np.zeros((patches * self._frames, frames_FM.shape[1]), np.float32)
        for chunk, start in enumerate(range(0, len(frames_FM), given)):
            piece_FM = frames_FM[start : start + given]
            whole_FM[chunk * filled :][: len(piece_FM)] = piece_FM
        return whole_FM

    def blank(self, meta: ImageMeta) -> np.ndarray:
        """Zeros instead of a sound that turned out to be undecodable, same shape."""
        width = self._frames * self._extractor.feature_size
        return np.zeros((meta.patches, width), np.float32)

    def _decode(self, data: bytes, wanted: int) -> np.ndarray:
        """float32 (S,): mono, at the extractor's rate, at most `wanted` samples."""
        import soundfile  # noqa: PLC0415 - an extra
        from scipy.signal import resample_poly  # noqa: PLC0415 - slow to import

        try:
            with soundfile.SoundFile(io.BytesIO(data)) as sound:
                rate = sound.samplerate
                frames = ceil(wanted * rate / self._rate)
                wave_SC = sound.read(frames, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise CorruptSampleError(f"sound cannot be decoded: {error}") from error
        wave_S = wave_SC.mean(axis=1)
        if not np.isfinite(wave_S).all():
            raise CorruptSampleError("sound has samples that are not finite")
        if rate != self._rate and len(wave_S):
            shared = gcd(rate, self._rate)
            wave_S = resample_poly(wave_S, self._rate // shared, rate // shared)
        return wave_S[:wanted].astype(np.float32)
