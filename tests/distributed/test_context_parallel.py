"""Context-parallel ranks of the LLM give the loss and the gradients of one process."""

from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed
from meshes import mesh_for
from model_cases import COMPOSITES, LLMS, build, gradient_limit
from proofs import proves
from test_layouts import Case, compare_all
from test_llm_tensor_parallel import Case as Family

from torchmm.common.batch import ImageMeta, Microbatch, MicrobatchMeta, SampleMeta
from torchmm.common.sequence_slices import slice_ranges
from torchmm.models import llm
from torchmm.models.build import build_model
from torchmm.models.hf.load import copy_slice
from torchmm.models.initialize import init_weights
from torchmm.models.layers.attention import Segments
from torchmm.models.layers.rotary import sample_frequencies
from torchmm.models.multimodal import materialize
from torchmm.parallel.context import (
    ContextParallelHeads,
    ContextParallelRanks,
    apply_context_parallel,
    context_problems,
)
from torchmm.parallel.mesh import start_process_group
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.model_section import FreezeConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.pipeline import Pipeline, plan_layout

TWO, FOUR = {"llm": {"context": 2}}, {"llm": {"context": 4}}
EXPERTS = {**TWO, "expert": 2}
PP2 = {**TWO, "pipeline": 2}
SINGLE_IMAGES = {"vision": {"sub_microbatch_images": 1}}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
SPLIT_GROUPS = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
"""With two ranks, one rank has three heads of one group and one head of the next group."""
LONGROPE = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4},
    "original_max_position_embeddings": 7,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
"""Samples of a packed sequence are shorter or longer than 7 tokens (`random_microbatch`)."""
DELTA, CONVOLUTION = "cp2, delta nets", "cp2, short convolutions"
ROTARY = "cp2, longrope"
CASES_OF_2 = [
    Case("cp2", shard=2, pipeline=TWO),
    Case(ROTARY, shard=2, llm="phi3", llm_config=LONGROPE, pipeline=TWO),
    Case("cp2, odd length", shard=2, tokens=65, pipeline=TWO),
    Case("cp2, no image anywhere", shard=2, images=(0,) * 8, pipeline=TWO),
    Case("cp2, heads that do not divide", shard=2, llm_config=THREE_HEADS, pipeline=TWO),
    Case("cp2, full recomputation", shard=2, recompute="full", pipeline=TWO),
    Case("cp2, selective recomputation", shard=2, recompute="selective", pipeline=TWO),
    Case("cp2, experts", shard=2, llm="qwen3_moe", pipeline=TWO),
    Case("cp2 within ep2", shard=2, llm="qwen3_moe", recompute="full", pipeline=EXPERTS),
    Case("cp2, loss in chunks", shard=2, chunked_loss=True, pipeline=TWO),
    Case("cp2, LLM frozen", shard=2, freeze=("llm",), pipeline=TWO),
    Case("cp2, tower frozen", shard=2, freeze=("vision",), pipeline=TWO),
    Case("cp2, adapters", shard=2, pipeline=TWO, adapters=("llm", "vision")),
    Case("cp2, DoRA", shard=2, pipeline=TWO, adapters=("llm", "vision"), method="dora"),
    Case(DELTA, shard=2, llm="qwen3_5_text", pipeline=TWO),
    Case(
        "cp2, delta nets and attention, groups of heads that ranks cut, odd length",
        shard=2,
        tokens=65,
        recompute="full",
        llm="qwen3_5_text",
        llm_config=SPLIT_GROUPS,
        pipeline=TWO,
    ),
    Case(
        "cp2, delta nets with experts",
        shard=2,
        recompute="selective",
        llm="qwen3_next",
        pipeline=TWO,
    ),
    Case(CONVOLUTION, shard=2, llm="lfm2", pipeline=TWO),
]
CASES_OF_4 = [
    Case("cp4, groups of heads that do not divide", shard=4, llm_config=SIX_HEADS, pipeline=FOUR),
    Case("cp4, fewer images than ranks", shard=4, images=(1, 2, 0, 3), pipeline=FOUR),
    Case("cp2 x fsdp2", shard=4, pipeline=TWO),
    Case("cp2 x replicate2", replicate=2, shard=2, pipeline=TWO),
    Case("cp2 x ep4", shard=4, llm="qwen3_moe", pipeline={**TWO, "expert": 4}),
    Case("cp2 x tp2", shard=2, tensor=2, pipeline=TWO),
    Case("cp2 x tp2, sequence parallel, odd length", 1, 2, 2, True, tokens=65, pipeline=TWO),
    Case("cp2 x tp2, experts", 1, 2, 2, True, "full", llm="qwen3_moe", pipeline=TWO),
    Case("cp2 x pp2", shard=2, pipeline=PP2),
    Case("cp2 x pp2, longrope", shard=2, llm="phi3", llm_config=LONGROPE, pipeline=PP2),
    Case("cp2 x pp2, image by image", shard=2, pipeline={**PP2, **SINGLE_IMAGES}),
    Case("cp2 x pp2, zero bubble", shard=2, pipeline={**PP2, "schedule": "zero_bubble"}),
    Case(
        "cp2 x pp2, 1f1b, LLM frozen", 1, 2, freeze=("llm",), pipeline={**PP2, "schedule": "1f1b"}
    ),
    Case(
        "cp4, delta nets, fewer heads of keys than ranks",
        shard=4,
        llm="qwen3_5_text",
        pipeline=FOUR,
    ),
    Case("cp2 x fsdp2, delta nets with experts", shard=4, llm="qwen3_next", pipeline=TWO),
    Case("cp2 x tp2, delta nets", 1, 2, 2, True, tokens=65, llm="qwen3_5_text", pipeline=TWO),
    Case("cp2 x tp2, delta nets with experts", 1, 2, 2, llm="qwen3_next", pipeline=TWO),
    Case(
        "cp2 x pp2, delta nets, zero bubble",
        shard=2,
        llm="qwen3_5_text",
        pipeline={**PP2, "schedule": "zero_bubble"},
    ),
    Case("cp4, short convolutions, odd length", shard=4, tokens=65, llm="lfm2", pipeline=FOUR),
    Case("cp2 x tp2, short convolutions", 1, 2, 2, True, llm="lfm2", pipeline=TWO),
    Case("cp2 x pp2, short convolutions", shard=2, llm="lfm2", pipeline=PP2),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [*CASES_OF_2[::2], CASES_OF_2[1]]),
        pytest.param(2, CASES_OF_2, marks=pytest.mark.campaign),
        pytest.param(4, CASES_OF_4, marks=pytest.mark.campaign),
    ],
)
def test_context_parallel_equals_single_process(ranks, cases):
    for outcomes in zip(*run_distributed(compare_all, ranks, cases), strict=True):
        for name, loss_error, norm_error, gradient_errors in outcomes:
            assert loss_error <= 1e-5, (name, loss_error)
            assert norm_error <= 1e-5, (name, norm_error)
            assert gradient_errors == {}, (name, gradient_errors)


def test_missing_exchange_changes_gradients():
    """Run every layer on its local slice only, so that segments end at slices."""
    linears = ("self_attn.q_proj", "linear_attn.in_proj_qkv", "conv.in_proj")
    for outcomes in run_distributed(_compare_without_exchange, 2):
        for linear, (_, loss_error, _, gradient_errors) in zip(linears, outcomes, strict=True):
            assert loss_error > 1e-5
            assert any(linear in name for name in gradient_errors)


def _compare_without_exchange():
    class SlicesAlone(Segments):
        @classmethod
        def from_starts(
            cls, cu_seqlens, device, blocks_T, blocks_in_windows_only, head_exchange, cache=None
        ):
            if head_exchange is not None:  # not in the reference, which has full sequences
                local = slice_ranges(cu_seqlens[-1], 2)[dist.get_rank()]
                inside = [start - local.start for start in cu_seqlens if start in local]
                cu_seqlens = sorted({0, *inside, len(local)})
            return Segments.from_starts(cu_seqlens, device, blocks_T, blocks_in_windows_only)

    llm.Segments = SlicesAlone
    names = (CASES_OF_2[0].name, DELTA, CONVOLUTION)
    return compare_all([case for case in CASES_OF_2 if case.name in names])


def test_wrong_rotary_frequencies_change_gradients():
    for [(_, _, _, gradient_errors)] in run_distributed(_compare_with_other_lengths, 2):
        assert "llm.backbone.model.layers.0.self_attn.qkv_proj.weight" in gradient_errors


def _compare_with_other_lengths():
    def rolled(text_model, lengths_T):  # wrong for slices, unchanged in the reference
        is_slice = len(lengths_T) < 64
        return sample_frequencies(text_model, lengths_T.roll(9) if is_slice else lengths_T)

    llm.sample_frequencies = rolled
    return compare_all([case for case in CASES_OF_2 if case.name == ROTARY])


def test_wrong_convolution_filters_change_gradients():
    for outcomes in run_distributed(_compare_with_other_filters, 2):
        for _, _, _, gradient_errors in outcomes:
            assert any("conv" in name for name in gradient_errors)


def _compare_with_other_filters():
    original = ContextParallelHeads.select_local_heads

    def first_heads(self, values, heads):
        local = original(self, values, heads)
        return values[: len(local)] if values.ndim > 1 else local

    ContextParallelHeads.select_local_heads = first_heads
    return compare_all([case for case in CASES_OF_2 if case.name in (DELTA, CONVOLUTION)])


def test_missing_feature_gradients_change_encoder():
    for [(_, loss_error, _, gradient_errors)] in run_distributed(_compare_without_return, 2):
        assert loss_error <= 1e-5
        assert any("encoders.vision" in name for name in gradient_errors)
        assert "llm.backbone.model.layers.0.self_attn.q_proj.weight" not in gradient_errors


def _compare_without_return():
    original = ContextParallelRanks.exchange_features

    def without_return(self, features, row):
        zero = sum(found_KD[:0].sum() for found_KD in features.values())
        detached = {name: found_KD.detach() for name, found_KD in features.items()}
        return {name: x_KD + zero for name, x_KD in original(self, detached, row).items()}

    ContextParallelRanks.exchange_features = without_return
    return compare_all(CASES_OF_2[:1])


FAMILIES = [*LLMS, *COMPOSITES]


@proves("context", LLMS)
@proves("context", COMPOSITES)
@pytest.mark.campaign
def test_context_parallel_families_equal_single_process():
    for outcomes in zip(*run_distributed(_compare_families, 2, FAMILIES), strict=True):
        for family, errors in outcomes:
            assert errors == {}, (family, errors)


def _compare_families(families: list[str]) -> list[tuple[str, dict[str, float]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    return [(name, _compare(Family(name, composite=name in COMPOSITES))) for name in families]


def _compare(case: Family) -> dict[str, float]:
    """Return errors of the loss and the gradients that exceed the tolerance.

    The tolerance is 1e-5 (relative) for most parameters.
    """
    full, shared = build(case.model_config()), build_model(case.model_config(), FreezeConfig())
    assert context_problems(shared.llm, 2, 1) == []
    config = ParallelConfig(shard=2, **TWO)
    mesh = mesh_for(config)
    batch = _with_images_in_meta(case.microbatch())
    descriptions = [module.describe() for module in shared.modality_modules()]
    layout = plan_layout(config, descriptions, [batch.meta])
    stages = split_model_for_rank(shared, layout, 0)
    apply_context_parallel(shared, mesh.module_mesh.context)
    materialize(shared, "cpu")
    init_weights(shared, seed=0)
    weights = full.state_dict()
    for name, tensor in shared.state_dict(keep_vars=True).items():  # including persistent buffers
        copy_slice(tensor, weights[name])
    loss = full(batch)
    loss.backward()
    pipeline = Pipeline(shared, stages, layout, descriptions, config, mesh, torch.float32)
    loss_sum = pipeline.run(pipeline.plan_training([batch]), [batch]).losses_of("llm")[0]
    dist.all_reduce(loss_sum)
    errors = {"loss": abs(loss_sum.item() / loss.item() - 1)}
    gradients = {n: p.grad for n, p in full.named_parameters() if p.requires_grad}
    scale = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    for name, expected in gradients.items():
        grad = shared.get_parameter(name).grad
        dist.all_reduce(grad)
        size = expected.norm().item()
        # Gradients of key biases are zero except for rounding: use the norm of all gradients.
        errors[name] = (grad - expected).norm().item() / (size if size > 1e-6 * scale else scale)
    return {name: error for name, error in errors.items() if not error <= gradient_limit(name)}


def _with_images_in_meta(batch: Microbatch) -> Microbatch:
    """Add the image metadata that planning reads, without token positions."""
    images = [
        ImageMeta(0, 0, prod(grid), 1, encoder=name)
        for name, inputs in batch.encoders.items()
        for grid in inputs.grids_thw
    ]
    tokens = len(batch.input_ids_T)
    return replace(batch, meta=MicrobatchMeta((SampleMeta("", 0, tokens, tuple(images)),), tokens))
