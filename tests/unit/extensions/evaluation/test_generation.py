"""Text generation in one process: batches, sampling and stop tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from model_cases import (
    COMPOSITES,
    LLMS,
    build,
    composite_config,
    microbatch,
    plain_causal_lm,
    text_model,
)
from test_multimodal import two_samples_with_images
from test_rotary import model_of as rope_model
from text_writing import DRAWN, GREEDY, differences, prompts_of, written_again
from transformers import GenerationConfig

from torchmm.common.batch import (
    IGNORE_TARGET,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
)
from torchmm.data.media.text import VisionBlock, mrope_positions
from torchmm.extensions.evaluation.text.generate import generate_tokens, next_token_sequence
from torchmm.extensions.evaluation.text.prompts import Prompt, batch_prompts
from torchmm.extensions.evaluation.text.sampling import Sampling
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.mesh import ParallelMesh, build_mesh, start_process_group
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.pipeline import Pipeline, unsplit_pipeline

CPU = torch.device("cpu")
WITH_IMAGES = (
    "llava",
    "internvl",
    "smolvlm",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma3",
    "paligemma",
    "qwen3_5",
)
"""Multimodal models with images, mrope positions, or bidirectional attention."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        start_process_group(ParallelConfig(backend="gloo"), CPU)
        yield build_mesh(ParallelConfig(), CPU)
        dist.destroy_process_group()


def pipeline_of(model: MultimodalModel, mesh: ParallelMesh) -> Pipeline:
    return unsplit_pipeline(model.eval(), mesh, torch.float32)


def text_prompts(lengths: list[int]) -> list[Microbatch]:
    prompts = [microbatch([length], seed=length) for length in lengths]
    return [
        replace(p, targets_T=torch.full_like(p.targets_T, IGNORE_TARGET), target_positions_L=None)
        for p in prompts
    ]


def image_prompts(name: str, model: MultimodalModel) -> list[Microbatch]:
    """Return two prompts with an image each, and one without an image."""
    batch, _ = two_samples_with_images(name)
    inputs, starts = batch.encoders["vision"], batch.cu_seqlens
    samples, positions = [], []
    for number, (start, stop) in enumerate(pairwise(starts)):
        grid = inputs.grids_thw[number]
        image_positions = inputs.positions_K[
            (inputs.positions_K >= start) & (inputs.positions_K < stop)
        ]
        image = ImageMeta(8, 8, prod(grid), len(image_positions))
        samples.append(SampleMeta("made", number, stop - start, (image,), "vision"))
        batch.targets_T[start : image_positions.max() + 2] = IGNORE_TARGET
        frames, rows, columns = grid
        block = VisionBlock(int(image_positions.min()) - start, frames, rows // 2, columns // 2)
        positions.append(torch.from_numpy(mrope_positions(stop - start, [block])))
    meta = MicrobatchMeta(tuple(samples), starts[-1])
    batch = replace(batch, meta=meta, target_positions_L=None)
    if model.text.mrope:
        batch = replace(batch, position_ids=torch.cat(positions, dim=1))
    return prompts_of([batch], 2)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_batched_prompts_match_separate_prompts(name: str, mesh) -> None:
    assert name in COMPOSITES
    model = build(composite_config(name)).eval()
    prompts = image_prompts(name, model)
    assert not differences(pipeline_of(model, mesh), prompts, mesh, written_again(model, prompts))


def test_shifted_positions_change_generated_tokens(mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the comparison above."""

    def shifted(row: Microbatch, tokens_B: torch.Tensor) -> Microbatch:
        following = next_token_sequence(row, tokens_B)
        return replace(following, position_ids=following.position_ids + 1)

    model = build(composite_config("qwen2_5_vl")).eval()
    prompts = image_prompts("qwen2_5_vl", model)
    expected = written_again(model, prompts)
    monkeypatch.setattr("text_writing.next_token_sequence", shifted)
    problems = differences(pipeline_of(model, mesh), prompts, mesh, expected)
    assert [problem.split(" are off")[0] for problem in problems] == [
        f"logits of token {step}" for step in range(1, GREEDY.max_new_tokens)
    ]


def test_uncached_generation_matches_cached_generation(mesh) -> None:
    """Check generation of unlisted families and context-parallel ranks, which do not cache."""
    pipeline = pipeline_of(text_model("qwen2"), mesh)
    prompts = text_prompts([5, 9, 3])
    expected = generate_tokens(pipeline, prompts, mesh, DRAWN, ())
    pipeline.caches_tokens = False
    streamed: list[list[int]] = [[], [], []]

    def record(tokens: Mapping[int, int]) -> None:
        for number, token in tokens.items():
            streamed[number].append(token)

    assert (
        generate_tokens(pipeline, prompts, mesh, DRAWN, (), on_tokens=record)
        == expected
        == streamed
    )


def test_images_are_encoded_once(mesh) -> None:
    model = build(composite_config("llava")).eval()
    prompts = image_prompts("llava", model)
    encoder = model.encoders["vision"]
    calls: list[int] = []
    encoder.register_forward_pre_hook(lambda _, args: calls.append(len(args[0].grids_thw)))
    generate_tokens(pipeline_of(model, mesh), prompts, mesh, GREEDY, ())
    assert calls == [2]


@pytest.mark.parametrize("name", LLMS)
def test_model_trains_equally_after_generation(name: str, mesh) -> None:
    """Check tensors of inference mode, which cannot be used for training."""
    gradients = []
    for generates in (False, True):
        model = text_model(name)
        if generates:
            generate_tokens(pipeline_of(model, mesh), text_prompts([5, 9]), mesh, GREEDY, ())
        model.train()
        batch = microbatch([6, 7], seed=1)
        model(batch).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for key, expected in gradients[0].items():
        assert torch.equal(gradients[1][key], expected), key


def test_sampling_depends_on_seed_and_prompt_only(mesh) -> None:
    pipeline = pipeline_of(text_model("qwen2"), mesh)
    prompts = text_prompts([5, 9, 3])
    longer = replace(DRAWN, max_new_tokens=20)
    batched = generate_tokens(pipeline, prompts, mesh, longer, ())
    single = [
        generate_tokens(pipeline, [prompt], mesh, longer, (), first=number)[0]
        for number, prompt in enumerate(prompts)
    ]
    assert batched == single
    other = generate_tokens(pipeline, prompts, mesh, replace(longer, seed=6), ())
    assert all(a != b for a, b in zip(batched, other, strict=True))


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_greedy_tokens_match_hugging_face_generate(penalty: float, mesh) -> None:
    model = text_model("llama")
    [prompt] = text_prompts([7])
    plain = plain_causal_lm(model)
    settings = GenerationConfig(
        max_new_tokens=20, do_sample=False, repetition_penalty=penalty, pad_token_id=0
    )
    ids = prompt.input_ids_T[None]
    expected = plain.generate(ids, settings, attention_mask=torch.ones_like(ids))[0, 7:].tolist()
    sampling = Sampling(20, repetition_penalty=penalty)
    actual = generate_tokens(pipeline_of(model, mesh), [prompt], mesh, sampling, ())
    assert actual == [expected]


def longrope_errors(pipeline: Pipeline, model: MultimodalModel, mesh: ParallelMesh) -> list[float]:
    """Return relative errors of logits against Hugging Face, by prompt."""
    plain = plain_causal_lm(model)
    prompts = text_prompts(
        [5, 12, 2, 8]
    )  # prompts exceed the limit of 8 at different steps, or never
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    expected = []
    for prompt in prompts:
        ids = prompt.input_ids_T[None]
        results = plain.generate(ids, settings, attention_mask=torch.ones_like(ids), **outputs)
        expected.append(torch.cat(results.logits))
    logits: list[torch.Tensor] = []
    compute = pipeline.next_token_logits

    def record(row: Microbatch) -> torch.Tensor:
        logits.append(compute(row))
        return logits[-1]

    pipeline.next_token_logits = record
    generate_tokens(pipeline, prompts, mesh, Sampling(6), ())
    pairs = zip(torch.stack(logits, 1), expected, strict=True)
    return [float((results - reference).norm() / reference.norm()) for results, reference in pairs]


def test_generation_beyond_longrope_limit_matches_hugging_face(mesh) -> None:
    model = build(rope_model("phi3")).eval()
    assert max(longrope_errors(pipeline_of(model, mesh), model, mesh)) < 1e-5


def test_generation_with_stale_longrope_cache_differs(mesh) -> None:
    model = build(rope_model("phi3")).eval()
    pipeline = pipeline_of(model, mesh)
    pipeline.rotary_limits = SimpleNamespace(switches=frozenset())
    errors = longrope_errors(pipeline, model, mesh)
    assert [error > 1e-3 for error in errors] == [True, False, False, True]


def test_top_k_of_one_is_greedy(mesh) -> None:
    pipeline = pipeline_of(text_model("qwen2"), mesh)
    prompts = text_prompts([5, 9])
    one = replace(GREEDY, temperature=3.0, top_k=1)
    greedy = generate_tokens(pipeline, prompts, mesh, GREEDY, ())
    assert generate_tokens(pipeline, prompts, mesh, one, ()) == greedy


def test_generation_ends_at_end_token_of_prompt(mesh) -> None:
    pipeline = pipeline_of(text_model("qwen2"), mesh)
    prompts = text_prompts([5, 9, 3])
    sampling = replace(DRAWN, max_new_tokens=12)
    full = generate_tokens(pipeline, prompts, mesh, sampling, ())
    end = full[1][4]
    steps_seen: list[dict[int, int]] = []
    actual = generate_tokens(
        pipeline,
        prompts,
        mesh,
        sampling,
        [{end}] * 3,
        on_tokens=lambda t: steps_seen.append(dict(t)),
    )
    truncated = [ids[: ids.index(end)] if end in ids else ids for ids in full]
    assert actual == truncated and len(truncated[1]) <= 4
    mixed_ends = generate_tokens(pipeline, prompts, mesh, sampling, [(), {end}, ()])
    assert mixed_ends == [full[0], truncated[1], full[2]]
    streamed = [[step[n] for step in steps_seen if n in step] for n in range(len(prompts))]
    assert streamed == truncated


def test_prompt_groups_respect_token_limit() -> None:
    rows = text_prompts([5, 9, 3, 30, 4, 4, 4, 4])
    prompts = [Prompt(row, row.targets_T, SampleMeta("made", 0, 1)) for row in rows]
    groups = batch_prompts(prompts, max_prompts=3, tokens=27)
    assert [[prompt.row.cu_seqlens[-1] for prompt in group] for group in groups] == [
        [5, 9, 3],
        [30],
        [4, 4, 4],
        [4],
    ]


def test_invalid_sampling_settings_are_all_reported() -> None:
    with pytest.raises(ValueError, match=r"temperature = -1 .* not negative; top_p = 0 .* above 0"):
        Sampling(4, temperature=-1, top_p=0)
