"""Sound files to encoder inputs: header check, one conversion to mono, the Hugging Face extractor.

Planning needs only the length, which is in the header. A sound becomes patches, each the mel bins
(for Wav2Vec2 the samples) of the few frames that the encoder makes one position of, so that sounds
of any length are packed one after another without padding. Rejected: padding every sound to
30 s, as Whisper's own pipeline does, which makes a spoken word as costly as half a minute. Where a
model's tower does hear the silence (Voxtral), it is part of the sound; where it is masked
(Qwen2-Audio), it is there while the spectrogram is made, and left out then (`SoundChunks`).

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
from numpy.lib.stride_tricks import sliding_window_view

from torchmm.common.batch import ImageMeta, ImageSpec, SoundChunks
from torchmm.common.errors import ConfigError, install_command
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError
from torchmm.data.layouts.columns import MAX_SAMPLING_RATE

TOLERANCE_S = 0.1
"""Audio longer than the encoder reads by at most this time is cut: files of "30 s" often have a few
milliseconds more, and no word fits into them."""


class AudioPreprocessor:
    """The Hugging Face feature extractor of one encoder, and its output sizes without running it.

    Args:
        spec: how the encoder wants its sounds.

    Raises:
        ConfigError: soundfile is not installed, or the extractor is unknown or does not fit.
    """

    grouped = False
    """Patches of sounds are concatenated."""
    byte_values = None
    """They are float32."""

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
        self._chunks = spec.sound_chunks or SoundChunks(spec.patch_size_px, 1, "patch")
        self._frames = spec.patch_size_px // hop
        if self._frames * hop != spec.patch_size_px:
            raise ConfigError(
                f"encoder {spec.encoder!r}: patches of {spec.patch_size_px} samples are not a "
                f"multiple of processor.hop_length = {hop}"
            )
        if importlib.util.find_spec("soundfile") is None:
            raise ConfigError(
                f"encoder {spec.encoder!r} requires soundfile; {install_command('audio')}"
            )

    def meta(self, data: bytes) -> ImageMeta:
        """Return the sizes of an audio file, from its header.

        Raises:
            CorruptSampleError: the file is not audio in a known format, or empty.
            BeyondLimitError: the audio is longer than the encoder reads. Its transcript would
                contain words that the model does not hear.
        """
        import soundfile  # noqa: PLC0415 - an extra

        try:
            info = soundfile.info(io.BytesIO(data))
        except soundfile.LibsndfileError as error:
            kind = f"{len(data)} bytes starting with {data[:12]!r}"
            raise CorruptSampleError(f"not an audio file ({kind}): {error}") from error
        if info.frames < 1 or not 0 < info.samplerate <= MAX_SAMPLING_RATE:
            raise CorruptSampleError(
                f"audio of {info.frames} samples at {info.samplerate} Hz is not supported"
            )
        samples = ceil(info.frames * self._rate / info.samplerate)
        group = self.spec.patches_per_token
        patches = self._patches(samples)
        most = self.spec.max_patches
        if most and samples > self._samples(most) + TOLERANCE_S * self._rate:
            limit_s = self._samples(most) / self._rate
            raise BeyondLimitError(
                f"audio longer than the limit of {limit_s:g} s of encoder {self.spec.encoder!r}",
                f"audio of {samples / self._rate:.1f} s is longer than the limit of "
                f"{limit_s:g} s of encoder {self.spec.encoder!r}; split the file and its "
                "transcript",
            )
        if self._chunks.padding == "patch":  # nobody says how sounds end: with a whole token
            pooled = max(1, patches // self.spec.pooled)
            patches = ceil(pooled / self.spec.merge**2) * group
            most = most // group * group
        if most:
            patches = min(patches, most)
        if patches < group:
            raise CorruptSampleError(f"audio of {samples} samples is too short for one token")
        duration_ms = round(1000 * min(samples, self._samples(patches)) / self._rate)
        return ImageMeta(0, 0, patches, patches // group, duration_ms=duration_ms)

    def _patches(self, samples: int) -> int:
        """That hold so many samples."""
        chunks, rest = divmod(samples, self._chunks.samples)
        last = min(ceil(rest / self.spec.patch_size_px), self._chunks.patches)
        if rest and self._chunks.padding == "heard":
            last = self._chunks.patches
        return chunks * self._chunks.patches + last

    def _samples(self, patches: int) -> int:
        """That so many patches hold."""
        chunks, rest = divmod(patches, self._chunks.patches)
        return chunks * self._chunks.samples + rest * self.spec.patch_size_px

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
        chunks = ceil(meta.patches / self._chunks.patches)
        if self._chunks.padding != "patch":
            wanted = chunks * self._chunks.samples
        padded_S = np.zeros(wanted, np.float32)
        padded_S[: len(wave_S)] = wave_S
        if self._hears_waves:
            return padded_S.reshape(meta.patches, -1)
        if self._chunks.padding == "silent":  # a chunk's spectrogram knows nothing of the others
            pieces = [self._spectrogram(piece_S) for piece_S in np.split(padded_S, chunks)]
            frames_FM = np.concatenate(pieces)
        else:
            frames_FM = self._spectrogram(padded_S)
        if self.spec.sound_chunks is None:
            return np.ascontiguousarray(frames_FM).reshape(meta.patches, -1)
        return self._cut(frames_FM, meta.patches)

    def _spectrogram(self, wave_S: np.ndarray) -> np.ndarray:
        """float32 (F, M)."""
        found: Any = self._extractor(
            wave_S,
            sampling_rate=self._rate,
            padding="longest",
            truncation=False,
            return_tensors="np",
        )
        return np.asarray(found["input_features"][0], np.float32).T

    def _cut(self, frames_FM: np.ndarray, patches: int) -> np.ndarray:
        """(P, D): patches of chunks, with zeros where a chunk has fewer frames than its patches."""
        given = self._chunks.samples // self._hop
        width = self._frames + self._chunks.overlap
        found = []
        for chunk, start in enumerate(range(0, patches, self._chunks.patches)):
            count = min(patches - start, self._chunks.patches)
            piece_FM = frames_FM[chunk * given : (chunk + 1) * given]
            filled_FM = np.zeros((count * self._frames + self._chunks.overlap, piece_FM.shape[1]))
            used = min(len(piece_FM), len(filled_FM))
            filled_FM[:used] = piece_FM[:used]
            cut_PMF = sliding_window_view(filled_FM, width, axis=0)[:: self._frames]
            found.append(cut_PMF.transpose(0, 2, 1).reshape(count, -1))
        return np.concatenate(found).astype(np.float32)

    def blank(self, meta: ImageMeta) -> np.ndarray:
        """Zeros instead of a sound that turned out to be undecodable, same shape."""
        width = (self._frames + self._chunks.overlap) * self._extractor.feature_size
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
            raise CorruptSampleError(f"audio cannot be decoded: {error}") from error
        wave_S = wave_SC.mean(axis=1)
        if not np.isfinite(wave_S).all():
            raise CorruptSampleError("audio contains NaN or infinite samples")
        if rate != self._rate and len(wave_S):
            shared = gcd(rate, self._rate)
            wave_S = resample_poly(wave_S, self._rate // shared, rate // shared)
        return wave_S[:wanted].astype(np.float32)
