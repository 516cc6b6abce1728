"""Preprocess audio files to encoder inputs with the feature extractor of Hugging Face.

Planning requires only the length, which is in the header. Audio is cut into patches. A patch has
the mel bins (for Wav2Vec2 the samples) of the frames of one encoder position. Audio of any length
is packed without padding. Whisper pads all audio to 30 s, which would make short audio expensive.

If the encoder attends to the padding of a chunk (Voxtral), the padding is part of the audio. If it
masks the padding (Qwen2-Audio), the padding is used for the spectrogram and then removed
(`AudioChunks`).

libsndfile (soundfile) reads files, and a polyphase filter (SciPy) resamples them. torchcodec is not
used, because its binaries do not match all versions of torch.

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

from torchmm.common.batch import AudioChunks, ImageMeta, ImageSpec
from torchmm.common.errors import ConfigError, install_command
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError
from torchmm.data.record_formats.columns import MAX_SAMPLING_RATE

TOLERANCE_S = 0.1
"""Audio that exceeds the maximum length by at most this time in seconds is truncated. Files of 30 s
are often a few milliseconds longer."""


class AudioPreprocessor:
    """Preprocessor of audio files with a Hugging Face feature extractor.

    Args:
        spec: Format of the audio for the encoder.

    Raises:
        ConfigError: soundfile is not installed, or the extractor is unknown or does not match.
    """

    is_stacked = False
    """Whether inputs are stacked. Patches of audio are concatenated."""
    byte_values = None
    """Mapping of uint8 inputs, which audio does not have."""

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
        self._takes_waveform = self._extractor.model_input_names[0] == "input_values"
        hop = 1 if self._takes_waveform else self._extractor.hop_length
        self._hop = hop
        self._chunks = spec.sound_chunks or AudioChunks(spec.patch_size_px, 1, "patch")
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
            CorruptSampleError: The file is empty, or is not audio in a supported format.
            BeyondLimitError: The audio exceeds the maximum length, so its transcript would not
                match the truncated audio.
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
        patch_limit = self.spec.max_patches
        if patch_limit and samples > self._samples(patch_limit) + TOLERANCE_S * self._rate:
            limit_s = self._samples(patch_limit) / self._rate
            raise BeyondLimitError(
                f"audio longer than the limit of {limit_s:g} s of encoder {self.spec.encoder!r}",
                f"audio of {samples / self._rate:.1f} s is longer than the limit of "
                f"{limit_s:g} s of encoder {self.spec.encoder!r}; split the file and its "
                "transcript",
            )
        if self._chunks.padding == "patch":  # round up to a full token
            pooled = max(1, patches // self.spec.pooled)
            patches = ceil(pooled / self.spec.merge**2) * group
            patch_limit = patch_limit // group * group
        if patch_limit:
            patches = min(patches, patch_limit)
        if patches < group:
            raise CorruptSampleError(f"audio of {samples} samples is too short for one token")
        duration_ms = round(1000 * min(samples, self._samples(patches)) / self._rate)
        return ImageMeta(0, 0, patches, patches // group, duration_ms=duration_ms)

    def _patches(self, samples: int) -> int:
        """Return the number of patches for a number of samples."""
        chunks, rest = divmod(samples, self._chunks.samples)
        last = min(ceil(rest / self.spec.patch_size_px), self._chunks.patches)
        if rest and self._chunks.padding == "heard":
            last = self._chunks.patches
        return chunks * self._chunks.patches + last

    def _samples(self, patches: int) -> int:
        """Return the number of samples of a number of patches."""
        chunks, rest = divmod(patches, self._chunks.patches)
        return chunks * self._chunks.samples + rest * self.spec.patch_size_px

    def grid_thw(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Return the patch grid as (frames, rows, columns)."""
        return 1, 1, meta.patches

    def token_grid(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Return the grid of output tokens as (frames, rows, columns)."""
        return 1, 1, meta.tokens

    def pixels(self, data: bytes, meta: ImageMeta) -> np.ndarray:
        """Return the patches of an audio file: (P, D), float32.

        Raises:
            CorruptSampleError: The file cannot be decoded.
        """
        samples = self._samples(meta.patches)
        wave_S = self._decode(data, samples)
        if self._takes_waveform and len(wave_S):  # normalize before padding
            normalized: Any = self._extractor(wave_S, sampling_rate=self._rate, return_tensors="np")
            wave_S = np.asarray(normalized["input_values"][0], np.float32)
        chunks = ceil(meta.patches / self._chunks.patches)
        if self._chunks.padding != "patch":
            samples = chunks * self._chunks.samples
        padded_S = np.zeros(samples, np.float32)
        padded_S[: len(wave_S)] = wave_S
        if self._takes_waveform:
            return padded_S.reshape(meta.patches, -1)
        if self._chunks.padding == "silent":  # chunks have separate spectrograms
            chunk_frames_FM = [self._spectrogram(chunk_S) for chunk_S in np.split(padded_S, chunks)]
            frames_FM = np.concatenate(chunk_frames_FM)
        else:
            frames_FM = self._spectrogram(padded_S)
        if self.spec.sound_chunks is None:
            return np.ascontiguousarray(frames_FM).reshape(meta.patches, -1)
        return self._split_patches(frames_FM, meta.patches)

    def _spectrogram(self, wave_S: np.ndarray) -> np.ndarray:
        """Return the mel spectrogram of a waveform: (F, M), float32."""
        outputs: Any = self._extractor(
            wave_S,
            sampling_rate=self._rate,
            padding="longest",
            truncation=False,
            return_tensors="np",
        )
        return np.asarray(outputs["input_features"][0], np.float32).T

    def _split_patches(self, frames_FM: np.ndarray, patches: int) -> np.ndarray:
        """Return the patches of all chunks, padded with zeros: (P, D), float32."""
        chunk_frames = self._chunks.samples // self._hop
        width = self._frames + self._chunks.overlap
        patches_by_chunk = []
        for chunk, start in enumerate(range(0, patches, self._chunks.patches)):
            count = min(patches - start, self._chunks.patches)
            chunk_FM = frames_FM[chunk * chunk_frames : (chunk + 1) * chunk_frames]
            padded_FM = np.zeros((count * self._frames + self._chunks.overlap, chunk_FM.shape[1]))
            used = min(len(chunk_FM), len(padded_FM))
            padded_FM[:used] = chunk_FM[:used]
            windows_PMF = sliding_window_view(padded_FM, width, axis=0)[:: self._frames]
            patches_by_chunk.append(windows_PMF.transpose(0, 2, 1).reshape(count, -1))
        return np.concatenate(patches_by_chunk).astype(np.float32)

    def blank(self, meta: ImageMeta) -> np.ndarray:
        """Return all-zero patches of the same shape."""
        width = (self._frames + self._chunks.overlap) * self._extractor.feature_size
        return np.zeros((meta.patches, width), np.float32)

    def _decode(self, data: bytes, max_samples: int) -> np.ndarray:
        """Return at most `max_samples` mono samples at the rate of the extractor: (S,), float32."""
        import soundfile  # noqa: PLC0415 - an extra
        from scipy.signal import resample_poly  # noqa: PLC0415 - slow to import

        try:
            with soundfile.SoundFile(io.BytesIO(data)) as file:
                rate = file.samplerate
                frames = ceil(max_samples * rate / self._rate)
                wave_SC = file.read(frames, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise CorruptSampleError(f"audio cannot be decoded: {error}") from error
        wave_S = wave_SC.mean(axis=1)
        if not np.isfinite(wave_S).all():
            raise CorruptSampleError("audio contains NaN or infinite samples")
        if rate != self._rate and len(wave_S):
            shared = gcd(rate, self._rate)
            wave_S = resample_poly(wave_S, self._rate // shared, rate // shared)
        return wave_S[:max_samples].astype(np.float32)
