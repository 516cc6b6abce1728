"""Target images: microbatches, and the context, noise and timestep of images."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from hashlib import sha256
from itertools import islice

import numpy as np
import pytest
import torch
from data_cases import (
    CLIP,
    caption,
    caption_rows,
    data_config,
    encode,
    png,
    training,
    write_parquet,
)
from PIL import Image

from torchmm.common.batch import split_evenly
from torchmm.common.generated import GeneratedMeta, GeneratorSpec
from torchmm.data.build import build_loader
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.sample import SampleOptions
from torchmm.extensions.generation.images import DiffusionImages
from torchmm.recipe.data_section import SourceConfig

SPEC = GeneratorSpec(size_px=16, patch_size_px=4, context_tokens=6)
VIDEO_SPEC = GeneratorSpec(size_px=8, patch_size_px=4, frames=3)
MAX_PIXELS = 10_000


def gif(frames: int, width: int = 12) -> bytes:
    """Return a GIF of uniform gray frames with increasing brightness."""
    levels = np.linspace(0, 250, frames).astype(np.uint8)
    images = [Image.fromarray(np.full((8, width), level), "L") for level in levels]
    return encode(images[0], "GIF", save_all=True, append_images=images[1:], duration=50)


@pytest.fixture
def make(tmp_path, tokenizer, text_spec):
    """Return a function that builds a loader of target images and, by default, input images."""
    write_parquet(tmp_path / "captions", caption_rows(23))

    def build(rank=0, ranks=1, sources=None, spec=SPEC, streaming=False, workers=0, **changes):
        path = str(tmp_path / "captions")
        configs = sources or [
            SourceConfig(path=path, streaming=streaming, target_image_column="image"),
            SourceConfig(path=path, streaming=streaming),
        ]
        options = {"state": None, "validation": False} | changes
        return build_loader(
            data_config(tmp_path, *configs, workers=workers, validation=configs),
            training(),
            text_spec=text_spec,
            image_specs={"vision": CLIP},
            tokenizer=tokenizer,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            generator_spec=spec,
            **options,
        )

    return build


def targets_of(batches) -> dict:
    """Return timesteps, noise and pixels of each target image by (source, index)."""
    results = {}
    for microbatch in (m.values() for batch in batches for m in batch.microbatches):
        samples = [s for s in microbatch.meta.samples for _ in s.generated]
        inputs = microbatch.generator
        for number, sample in enumerate(samples):
            one = inputs.select(range(number, number + 1))
            results.setdefault((sample.source, sample.index), []).append(
                (one.times[0], one.noise_PV.numpy(), one.patches_PV.numpy())
            )
    return results


@pytest.mark.parametrize("streaming", [False, True])
def test_context_is_text_before_target_image(make, tokenizer, streaming):
    image_count = 0
    for microbatch in (
        m for b in islice(iter(make(streaming=streaming)), 4) for m in b.microbatches
    ):
        inputs, meta = microbatch.generator, microbatch.meta
        if inputs is None:
            assert not meta.generated
            continue
        assert inputs.contexts == [g.context for g in meta.generated]
        assert (
            inputs.grids_thw
            == [g.grid_thw for g in meta.generated]
            == [(1, 4, 4)] * inputs.loss_count
        )
        contexts = iter(inputs.context_positions_K.split(inputs.contexts))
        starts = iter(microbatch.cu_seqlens)
        for sample, start in zip(meta.samples, starts, strict=False):
            if sample.generated:
                positions = next(contexts)
                text = tokenizer.encode(caption(sample.index), add_special_tokens=False)
                ids = [tokenizer.bos_token_id, *text]
                assert microbatch.input_ids_T[positions].tolist() == ids[-SPEC.context_tokens :]
                assert int(positions[-1]) == start + len(ids) - 1
                image_count += 1
        assert next(contexts, None) is None
    assert image_count > 4


def test_target_image_is_not_encoder_input(make):
    for microbatch in (m for batch in islice(iter(make()), 4) for m in batch.microbatches):
        for sample in microbatch.meta.samples:
            assert bool(sample.generated) != bool(sample.images)
        assert len(microbatch.meta.patches("vision")) == microbatch.meta.image_count


def test_target_pixels_are_scaled_cropped_and_patched(make):
    for (_, index), images in targets_of(islice(iter(make()), 2)).items():
        patches_PV = images[0][2]
        image = Image.open(io.BytesIO(png(16 + index % 5 * 8, 24, index)))
        side = min(image.size)
        left, top = ((n - side) / 2 for n in image.size)
        box = (left, top, left + side, top + side)
        square = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC, box=box), np.float32)
        expected = square / 127.5 - 1
        for patch, (row, column) in enumerate(np.ndindex(4, 4)):
            block = expected[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            actual = patches_PV[patch].reshape(3, 4, 4).transpose(1, 2, 0)
            assert np.abs(actual - block).max() < 1e-6


def test_noise_is_independent_of_ranks_workers_resume(make):
    full = targets_of(islice(iter(make()), 4))
    by_rank = [targets_of(islice(iter(make(rank=r, ranks=2, workers=r)), 4)) for r in range(2)]
    resumed_after = next(islice(iter(make()), 1, None)).state
    resumed = targets_of(islice(iter(make(state=resumed_after)), 2))
    for key, images in {**by_rank[0], **by_rank[1], **resumed}.items():
        same = full[key][-len(images) :]
        assert [image[0] for image in images] == [image[0] for image in same], key
        assert all(np.array_equal(a[1], b[1]) for a, b in zip(images, same, strict=True))
    assert by_rank[0].keys() | by_rank[1].keys() == full.keys()


def test_latent_noise_has_width_of_latents(make):
    """Check that pixels and their noise do not depend on the width of latents."""
    mean, sampled = (
        replace(SPEC, latent_values=8, latent_noise=latent_noise) for latent_noise in (0, 8)
    )
    pixels_only, means, samples = (
        targets_of(islice(iter(make(spec=spec)), 4)) for spec in (SPEC, mean, sampled)
    )
    for key, images in means.items():
        pairs = zip(images, samples[key], pixels_only[key], strict=True)
        for (time, noise, pixels), (_, wide_noise, _), before in pairs:
            assert noise.shape == (16, 8) and wide_noise.shape == (16, 16)
            assert np.array_equal(noise, wide_noise[:, :8])
            assert (
                abs(np.corrcoef(wide_noise[:, :8].ravel(), wide_noise[:, 8:].ravel())[0, 1]) < 0.4
            )
            assert time == before[0] and np.array_equal(pixels, before[2])
    inputs = next(m.generator for b in iter(make(spec=sampled)) for m in b.microbatches)
    assert torch.equal(inputs.target_noise_PV, inputs.noise_PV[:, :8])
    assert torch.equal(inputs.latent_noise_PV, inputs.noise_PV[:, 8:])
    assert inputs.select(range(1)).latent_values == 8 and not inputs.is_encoded


def test_specs_without_latents_preserve_content_digest(make):
    spec = {"size_px": 16, "patch_size_px": 4, "frames": 1, "context_tokens": 6}
    before = {**spec, "time_sampling": "logit_normal"}
    described = [
        next(iter(make(spec=each))).state["content"]["pixels"]["images to be drawn"]
        for each in (SPEC, replace(SPEC, latent_values=8))
    ]
    text = json.dumps(before, sort_keys=True, default=str)
    assert described[0] == sha256(text.encode()).hexdigest()[:32]
    assert described[1] != described[0]


def test_noise_differs_by_epoch_and_sample(make):
    actual = targets_of(islice(iter(make()), 10))
    times = [image[0] for images in actual.values() for image in images]
    assert len(times) > len(actual), "no sample is repeated"
    assert len(set(times)) == len(times)
    assert all(0 < t < 1 for t in times)
    noise = np.concatenate([image[1].ravel() for images in actual.values() for image in images])
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02


def test_validation_noise_is_constant(make):
    first, second = (targets_of(iter(make(validation=True))) for _ in range(2))
    assert first.keys() == second.keys()
    assert all(first[k][0][0] == second[k][0][0] for k in first)


@pytest.mark.parametrize(("sampling", "spread"), [("uniform", 0.289), ("logit_normal", 0.208)])
def test_timesteps_have_requested_distribution(sampling, spread):
    spec = GeneratorSpec(4, 4, time_sampling=sampling)
    meta = GeneratedMeta((1, 1, 1), 1)
    targets = DiffusionImages(spec, 0, MAX_PIXELS)
    times = [targets.blank(meta, ("s", i, 0, 0)).time for i in range(2000)]
    assert np.mean(times) == pytest.approx(0.5, abs=0.02)
    assert np.std(times) == pytest.approx(spread, abs=0.01)


def test_video_frames_are_evenly_spaced():
    targets = DiffusionImages(VIDEO_SPEC, 0, MAX_PIXELS)
    few, many, image = gif(2), gif(9), png(9, 9)
    sizes = [targets.grid(data)[0] for data in (few, many, image)]
    assert sizes == [2, 3, 1]
    video = targets.decode(many, GeneratedMeta(targets.grid(many), 5), 5, ("s", 0, 0, 0))
    assert video.patches_PV.shape == (3 * 2 * 2, 3 * 4 * 4)
    levels = video.patches_PV.reshape(3, -1).mean(1)
    assert levels == pytest.approx([0, 125, 250], abs=3)


def test_corrupt_target_image_is_excluded_from_loss(make, tmp_path):
    rows = caption_rows(8)
    for row in rows[::2]:
        row["image"]["bytes"] = row["image"]["bytes"][:60]  # only a header
    path = write_parquet(tmp_path / "broken", rows)
    loader = make(sources=[SourceConfig(path=str(path), target_image_column="image")])
    batch = next(iter(loader))
    assert batch.skipped
    for microbatch in batch.microbatches:
        counted = [s.index % 2 == 1 for s in microbatch.meta.samples for _ in s.generated]
        assert microbatch.generator.in_loss == counted
        assert microbatch.generated_count == sum(counted)
        assert len(microbatch.generator.context_positions_K) == sum(microbatch.generator.contexts)


def test_unknown_target_column_is_reported(make, tmp_path):
    path = write_parquet(tmp_path / "one", caption_rows(2))
    loader = make(sources=[SourceConfig(path=str(path))])
    record = loader._decoder._sources[0].read(0)
    with pytest.raises(CorruptSampleError, match="'photo'"):
        loader._decoder._reader.read(
            type(record)(record.columns, options=SampleOptions(target_image_column="photo"))
        )


def test_target_images_without_generator_are_skipped(make):
    for microbatch in next(iter(make(spec=None))).microbatches:
        assert microbatch.generator is None and not microbatch.meta.generated


def test_selected_images_are_consecutive_views(make):
    inputs = max(
        (m.generator for b in islice(iter(make()), 3) for m in b.microbatches if m.generator),
        key=lambda g: len(g.contexts),
    )
    parts = [inputs.select(r) for r in split_evenly(len(inputs.contexts), 2)]
    for name in ("patches_PV", "noise_PV", "context_positions_K"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(inputs, name))
    assert parts[0].times + parts[1].times == inputs.times
    with pytest.raises(ValueError, match="generated images"):
        inputs.select(range(2, 99))
