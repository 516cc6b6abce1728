"""Videos from files to the loss, compared with the Qwen and GLM models of Hugging Face.

Loss, logits, gradients and positions are compared, with packed and single samples, together with
images and text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_cases import caption, data_config, png, training, write_parquet
from model_cases import COMPOSITES, build, relative_error, worst_gradient
from proofs import proves
from test_multimodal import hf_model, hf_weight_name
from test_video import pictures
from torch.nn import functional
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.data.build import build_loader
from torchmm.data.media.video import sample_frame_indices
from torchmm.data.media.video_writer import encode_video
from torchmm.recipe.data_section import SourceConfig, VideoConfig
from torchmm.recipe.model_section import ModelConfig

IMAGE, VIDEO, START, END, CLIP_START, CLIP_END = range(440, 446)
GLM = ("glm4v", "glm4v_moe", "glm46v")
AUDIO_KEYS = ("audio_token_id", "audio_start_token_id", "audio_end_token_id")


def tiny(name: str) -> ModelConfig:
    """Return a tiny model whose vocabulary includes the words of the tokenizer."""
    config = {**COMPOSITES[name], "image_token_id": IMAGE, "video_token_id": VIDEO}
    modality = "image" if name in GLM else "vision"
    config |= {f"{modality}_start_token_id": START, f"{modality}_end_token_id": END}
    if name in GLM:
        config |= {"video_start_token_id": CLIP_START, "video_end_token_id": CLIP_END}
    if "omni" in name:
        config |= dict(zip(AUDIO_KEYS, (444, 445, 446), strict=True))
    config["text_config"] = {**config["text_config"], "vocab_size": 448}
    size = {"shortest_edge": 64, "longest_edge": 1024}
    return ModelConfig(config=config, processor={"size": size})


@pytest.fixture
def load(tmp_path, tokenizer):
    """Return a function that builds microbatches of 2 s, 4 s and 8 s videos, images and text."""
    rows = []
    for i in range(8):
        row: dict = {"video": None, "image": None, "text": caption(i)}
        if i % 4 < 3:
            row["video"] = encode_video(pictures(4 << i % 3, 24 + 8 * (i % 3), 16), fps=2)
        if i % 4 in (1, 3):
            row["image"] = {"bytes": png(16, 24, i), "path": None}
        rows.append(row)
    rows.append({"video": None, "image": None, "text": caption(9)})
    path = write_parquet(tmp_path / "videos", rows)

    def build_batches(model, **sizes: int) -> list[Microbatch]:
        loader = build_loader(
            data_config(
                tmp_path,
                SourceConfig(path=str(path), name="videos"),
                video=VideoConfig(fps=2.0, max_pixels=16 * 1024),
            ),
            training(**sizes),
            text_spec=model.text_spec(tokenizer),
            image_specs=model.image_specs(),
            tokenizer=tokenizer,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
        )
        batches = list(islice(loader, 2))
        assert not [message for batch in batches for message in batch.skipped]
        return [microbatch for batch in batches for microbatch in batch.microbatches]

    return build_batches


def hf_inputs(model, microbatch: Microbatch) -> list[dict]:
    """Return the inputs of the Hugging Face model for each sample."""
    inputs, samples, at = microbatch.values().encoders.get("vision"), [], 0
    segments = zip(pairwise(microbatch.cu_seqlens), microbatch.meta.samples, strict=False)
    glm = model.composite.model_type in GLM
    for (start, stop), meta in segments:
        ids = microbatch.input_ids_T[None, start:stop]
        token_types = (
            glm_token_types(ids) if glm else (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        )
        sample: dict = {"input_ids": ids, "mm_token_type_ids": token_types}
        for image in meta.images:
            image_inputs = inputs.select(range(at, at + 1))
            grid = torch.tensor(image_inputs.grids_thw)
            at += 1
            if image.duration_ms:
                seconds = torch.tensor([image.duration_ms / 1000 / image.frames])
                more = {"pixel_values_videos": image_inputs.pixels, "video_grid_thw": grid}
                more |= {"second_per_grid_ts": seconds}
                before = {key: sample[key] for key in more if key in sample}
                sample |= {k: torch.cat([before[k], v]) if before else v for k, v in more.items()}
            else:
                sample |= {"pixel_values": image_inputs.pixels, "image_grid_thw": grid}
        samples.append(sample)
    return samples


def glm_token_types(ids: torch.Tensor) -> torch.Tensor:
    """Return token types of ids (1, L) as in the Hugging Face processor.

    Images and videos have the same placeholder.
    """
    tokens = SimpleNamespace(image_token_id=IMAGE, video_start_id=CLIP_START, video_end_id=CLIP_END)
    return torch.tensor(Glm4vProcessor.create_mm_token_type_ids(tokens, ids.tolist()))


def single(microbatch: Microbatch, number: int) -> Microbatch:
    """Return one sample of a microbatch as a separate microbatch."""
    start, stop = microbatch.cu_seqlens[number : number + 2]
    before = sum(len(sample.images) for sample in microbatch.meta.samples[:number])
    meta = microbatch.meta.samples[number]
    encoders = {}
    if meta.images:
        inputs = microbatch.encoders["vision"].select(range(before, before + len(meta.images)))
        encoders["vision"] = replace(inputs, positions_K=inputs.positions_K - start)
    return Microbatch(
        input_ids_T=microbatch.input_ids_T[start:stop],
        targets_T=microbatch.targets_T[start:stop],
        position_ids=microbatch.position_ids[:, start:stop],
        cu_seqlens=[0, stop - start],
        encoders=encoders,
        meta=MicrobatchMeta((meta,), stop - start),
    )


def expected_positions(plain, sample: dict) -> torch.Tensor:
    excluded = ("pixel_values", "pixel_values_videos")
    sizes = {key: value for key, value in sample.items() if key not in excluded}
    if "video_second_per_grid" in sizes:
        sizes["second_per_grids"] = sizes.pop("video_second_per_grid")
    return plain.model.get_rope_index(**sizes)[0][:, 0]


def merge_groups(samples: list[dict]) -> None:
    """Merge the single-group videos of each sample into one video of several groups."""
    for sample in samples:
        grids = sample.get("video_grid_thw")
        if grids is not None:
            assert (grids == grids[0]).all() and grids[0, 0] == 1
            sample["video_grid_thw"] = grids[:1] * torch.tensor([len(grids), 1, 1])


def replace_videos_with_images(sample: dict) -> None:
    """Replace each group of a video by an image if the sample also has images.

    The GLM model of Hugging Face treats all placeholders of such a sample as images.
    """
    if "pixel_values" not in sample or "pixel_values_videos" not in sample:
        return
    kinds = sample["mm_token_type_ids"]
    groups, rows, columns = sample.pop("video_grid_thw")[0].tolist()
    video = sample.pop("pixel_values_videos"), torch.tensor([[1, rows, columns]] * groups)
    image = sample["pixel_values"], sample["image_grid_thw"]
    image_first = (kinds == 1).nonzero()[0, 1] < (kinds == 2).nonzero()[0, 1]
    ordered = (image, video) if image_first else (video, image)
    pixels, grids = zip(*ordered, strict=True)
    sample |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)}
    sample["mm_token_type_ids"] = kinds.clamp(max=1)


def rename_omni_inputs(samples: list[dict]) -> None:
    """Rename inputs to the argument names of the Omni models."""
    for sample in samples:
        del sample["mm_token_type_ids"]
        sample["attention_mask"] = torch.ones_like(sample["input_ids"])
        if "second_per_grid_ts" in sample:
            sample["video_second_per_grid"] = sample.pop("second_per_grid_ts")


TIMED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families whose videos are groups of frames with times as text, as for GLM."""
QWEN = ("qwen2_5_vl", "qwen2_vl", "qwen3_omni", "qwen2_5_omni", *TIMED)


@proves("clips", COMPOSITES)
@pytest.mark.parametrize("name", [*QWEN, *GLM])
def test_videos_match_hugging_face_loss_and_gradients(load, name: str) -> None:
    frozen = ("audio", "audio.connector") if "omni" in name else ()
    model = build(tiny(name), freeze=frozen)
    plain = hf_model(model)
    videos = 0
    for microbatch in load(model, sequence_length=256)[:4]:
        samples = hf_inputs(model, microbatch)
        if name in (*TIMED, *GLM):
            merge_groups(samples)
        if "omni" in name:
            rename_omni_inputs(samples)
        videos += sum(i.duration_ms > 0 for i in microbatch.meta.images_of_encoder("vision"))
        logits = []
        for number, sample in enumerate(samples):
            separate = single(microbatch, number)
            if separate.encoders:
                assert torch.equal(expected_positions(plain, sample), separate.position_ids)
            if name != "qwen2_5_vl":
                sample.pop("second_per_grid_ts", None)
            if name in GLM:
                replace_videos_with_images(sample)
            logits.append(plain(**sample, use_cache=False).logits[0])
            expected_loss = functional.cross_entropy(
                logits[-1], separate.targets_T, reduction="sum"
            )
            assert relative_error(model(separate), expected_loss) < 1e-5
        targets = microbatch.targets_T[: microbatch.meta.used_tokens]
        expected = functional.cross_entropy(torch.cat(logits), targets, reduction="sum")
        loss = model(microbatch)
        assert relative_error(loss, expected) < 1e-5
        loss.backward()
        expected.backward()
        # Decays of delta nets are small differences of large sums (see test_delta_net).
        bound = 5e-5 if name.startswith("qwen3_5") else 1e-5
        assert worst_gradient(model, plain, lambda fqn: hf_weight_name(model, fqn)) < bound
        model.zero_grad()
        plain.zero_grad()
        assert len(samples) > 1
    assert videos > 8


def test_videos_are_between_image_markers(load) -> None:
    model = build(tiny("qwen2_5_vl"))
    for microbatch in load(model, sequence_length=160):
        ids = microbatch.input_ids_T.numpy()
        runs = np.flatnonzero(np.diff(np.concatenate([[0], ids == VIDEO, [0]])))
        for start, stop in runs.reshape(-1, 2):
            assert ids[start - 1] == START and ids[stop] == END
        lengths = sorted(np.diff(runs.reshape(-1, 2))[:, 0].tolist())
        videos = [i for i in microbatch.meta.images_of_encoder("vision") if i.duration_ms]
        assert lengths == sorted(i.patches // 4 for i in videos)


def test_time_of_frames_changes_loss(load) -> None:
    model = build(tiny("qwen2_5_vl"))
    batches = [m for m in load(model, sequence_length=160) if m.position_ids.max() > 20]
    microbatch = batches[0]
    loss = model(microbatch)
    model.text = type(model.text)(**{**vars(model.text), "tokens_per_second": 1.0})
    slower = next(m for m in load(model, sequence_length=160) if m.meta == microbatch.meta)
    assert torch.equal(slower.input_ids_T, microbatch.input_ids_T)
    assert relative_error(model(slower), loss) > 1e-5


@pytest.mark.parametrize("frames", [8, 7, 5])
def test_times_match_hugging_face_processor(frames: int, tmp_path, tokenizer) -> None:
    model = build(tiny("qwen3_vl"))
    clip = encode_video(pictures(frames, 24, 16), fps=3)
    path = write_parquet(tmp_path / "videos", [{"video": clip, "text": caption(1)}] * 4)
    video = VideoConfig(fps=3.0, max_pixels=16 * 1024)
    loader = build_loader(
        data_config(tmp_path, SourceConfig(path=str(path), name="videos"), video=video),
        training(sequence_length=256),
        text_spec=model.text_spec(tokenizer),
        image_specs=model.image_specs(),
        tokenizer=tokenizer,
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
    )
    microbatch = single(next(iter(loader)).microbatches[0], 0)
    frame_indices = sample_frame_indices(frames, frames / 3, video, group=2)
    ((_, rows, columns), *remaining) = microbatch.encoders["vision"].grids_thw
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="[S]",
        vision_end_token="[E]",
        video_token="[V]",
        _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, None),
    )
    written = Qwen3VLProcessor.replace_video_token(
        processor,
        {
            "video_grid_thw": torch.tensor([[1 + len(remaining), rows, columns]]),
            "video_metadata": [SimpleNamespace(fps=3.0, frames_indices=list(frame_indices))],
        },
        0,
    )
    markers = {"[S]": START, "[E]": END, "[V]": VIDEO}
    expected: list[int] = []
    for part in filter(None, re.split(r"(\[.\])", written)):
        if part in markers:
            expected.append(markers[part])
        else:
            expected += tokenizer(part, add_special_tokens=False).input_ids
    ids = microbatch.input_ids_T.tolist()
    first = ids.index(START)
    begin = first - expected.index(START)
    assert ids[begin : begin + len(expected)] == expected
    assert VIDEO not in ids[begin + len(expected) :] and len(remaining) >= 1
