"""Tensor-parallel encoders give the outputs and gradients of the unsharded encoder.

All families are tested. The image sizes include lengths that the ranks do not divide, and fewer
positions than ranks. Without tensor parallelism, FSDP2 shards the parameters, and each rank has
different images.
"""

from dataclasses import dataclass
from math import prod

import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from model_cases import COMPOSITES as FULL_COMPOSITES
from proofs import proves
from torch.distributed.tensor import DTensor

from torchmm.common.batch import EncoderInputs
from torchmm.extensions.async_tp.linear import Overlap
from torchmm.extensions.async_tp.styles import AsyncStyles
from torchmm.models.build import build_model
from torchmm.models.encoders import EncoderModule
from torchmm.models.hf.load import copy_slice
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.fsdp import apply_fsdp
from torchmm.parallel.mesh import start_process_group
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.recipe.model_section import (
    AdapterConfig,
    EncoderConfig,
    FreezeConfig,
    LlmConfig,
    ModelConfig,
)
from torchmm.recipe.parallel_section import ParallelConfig

LLM = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
}
_WITHOUT_FFN = {k: v for k, v in SIZES.items() if k != "intermediate_size"}
TOWERS = {
    "clip": {"model_type": "clip_vision_model", **SIZES, "image_size": 8},
    "siglip": {"model_type": "siglip_vision_model", **SIZES, "image_size": 8},
    "siglip2": {"model_type": "siglip2_vision_model", **SIZES, "num_patches": 16},
    "dinov2": {"model_type": "dinov2", **_WITHOUT_FFN, "mlp_ratio": 2, "image_size": 8},
    "dinov2_gated": {
        "model_type": "dinov2",
        **_WITHOUT_FFN,
        "mlp_ratio": 2,
        "image_size": 8,
        "use_swiglu_ffn": True,
    },
    "internvl": {
        "model_type": "internvl_vision",
        **SIZES,
        "image_size": 8,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "idefics3": {"model_type": "idefics3_vision", **SIZES, "image_size": 8},
    "smolvlm": {"model_type": "smolvlm_vision", **SIZES, "image_size": 8},
    "qwen2_vl": {
        "model_type": "qwen2_vl_vision",
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "mlp_ratio": 2,
        "num_heads": 4,
        "patch_size": 4,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl_vision",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    },
}
TOWERS["qwen2_5_omni_vision"] = {
    **TOWERS["qwen2_5_vl"],
    "model_type": "qwen2_5_omni_vision_encoder",
}
TOWERS["qwen3_5"] = {
    **{k: v for k, v in TOWERS["qwen3_vl"].items() if k != "deepstack_visual_indexes"},
    "model_type": "qwen3_5_vision",
}
TOWERS |= {
    "glm4v": {
        "model_type": "glm4v_vision",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 32,
        "image_size": 20,
        "patch_size": 4,
    },
    "gemma4": {
        "model_type": "gemma4_vision",
        **SIZES,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "pooling_kernel_size": 2,
        "position_embedding_size": 16,
    },
}
TOWERS |= {
    "metaclip_2": {"model_type": "metaclip_2_vision_model", **SIZES, "image_size": 8},
    "dinov3": {
        "model_type": "dinov3_vit",
        **SIZES,
        "image_size": 8,
        "num_register_tokens": 2,
        "use_gated_mlp": True,
    },
    "aimv2": {"model_type": "aimv2_vision_model", **SIZES, "image_size": 8},
    "radio": {
        "model_type": "radio",
        **_WITHOUT_FFN,
        "mlp_ratio": 2.0,
        "image_size": 8,
        "max_img_size": 16,
    },
    "pixtral": {"model_type": "pixtral", **SIZES, "image_size": 16},
}
_WAV2VEC2 = {
    "model_type": "wav2vec2",
    "apply_spec_augment": False,
    **{k: v for k, v in SIZES.items() if k != "patch_size"},
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 4,
    **dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout"), 0.0),
    "layerdrop": 0.0,
}
AUDIO_TOWERS = {
    "whisper": {
        "model_type": "whisper",
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "max_source_positions": 16,
    },
    "qwen3_omni_sound": {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "max_source_positions": 16,
        "n_window": 50,
        "n_window_infer": 200,
        "output_dim": 32,
        "downsample_hidden_size": 12,
    },
    "qwen2_5_omni_sound": {
        "model_type": "qwen2_5_omni_audio_encoder",
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "max_source_positions": 16,
        "n_window": 5,
        "output_dim": 32,
    },
    "wav2vec2": _WAV2VEC2,
    "wav2vec2_stable": {**_WAV2VEC2, "feat_extract_norm": "layer", "do_stable_layer_norm": True},
}
VARIANTS = {
    "qwen3_vl_moe": ("qwen3_vl", "qwen3_vl_moe_vision"),
    "qwen3_5_moe": ("qwen3_5", "qwen3_5_moe_vision"),
    "qwen3_omni": ("qwen3_vl", "qwen3_omni_moe_vision_encoder"),
    "glm4v_moe": ("glm4v", "glm4v_moe_vision"),
}
"""Towers with the dimensions of another tower and separate classes."""
TOWERS |= {name: {**TOWERS[of], "model_type": kind} for name, (of, kind) in VARIANTS.items()}
SPEECH = ("voxtral", "qwen2_audio", "audioflamingo3")  # chunks of one second
AUDIO_TOWERS |= {
    name: {**AUDIO_TOWERS["whisper"], "model_type": f"{name}_encoder", "max_source_positions": 50}
    for name in SPEECH
}
TOWERS |= AUDIO_TOWERS
COMPOSITES = {
    "in internvl": {
        "model_type": "internvl",
        "vision_config": TOWERS["internvl"],
        "text_config": LLM,
        "image_token_id": 63,
    },
    "in qwen3_vl": {  # with DeepStack mergers after an early layer and after the last layer
        "model_type": "qwen3_vl",
        "vision_config": TOWERS["qwen3_vl"],
        "text_config": {
            **{k: v for k, v in LLM.items() if k != "model_type"},
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        "image_token_id": 63,
    },
    "in glm4v": {
        "model_type": "glm4v",
        "vision_config": TOWERS["glm4v"],
        "text_config": {
            **{k: v for k, v in LLM.items() if k != "model_type"},
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
        },
        "image_token_id": 63,
    },
    "in gemma3": {
        "model_type": "gemma3",
        "vision_config": {**TOWERS["siglip"], "vision_use_head": False},
        "text_config": {**LLM, "model_type": "gemma3_text"},
        "image_token_index": 63,
        "mm_tokens_per_image": 1,
    },
    "in qwen3_omni": FULL_COMPOSITES["qwen3_omni"],
    "audio in qwen3_omni": FULL_COMPOSITES["qwen3_omni"],
}
GRIDS = {name: [[(1, 2, 2)] * 3] for name in (*TOWERS, *COMPOSITES)} | {
    "qwen2_vl": [[(1, 2, 2)], [(1, 2, 6), (2, 2, 2)]],
    **{n: [[(1, 2, 2)], [(1, 2, 6), (2, 2, 2)]] for n in ("qwen3_vl", "in qwen3_vl", "qwen3_5")},
    "in qwen3_omni": [[(1, 2, 2)], [(1, 2, 6), (2, 2, 2)]],
    "audio in qwen3_omni": [[(1, 1, 1)], [(1, 1, 28), (1, 1, 3)]],
    **{name: [[(1, 2, 2)], [(1, 2, 6), (1, 6, 2)]] for name in ("glm4v", "in glm4v")},
    "siglip2": [[(1, 1, 1)], [(1, 1, 5)], [(1, 2, 5), (1, 3, 1), (1, 4, 4)]],
    "qwen2_5_vl": [[(1, 2, 2)], [(1, 2, 6), (1, 10, 4), (2, 2, 2)]],
    "qwen2_5_omni_vision": [[(1, 2, 2)], [(1, 2, 6), (1, 10, 4), (2, 2, 2)]],
    "pixtral": [[(1, 1, 1)], [(1, 1, 5)], [(1, 2, 5), (1, 3, 1), (1, 4, 4)]],
    "gemma4": [[(1, 2, 2)], [(1, 2, 6), (1, 6, 2)]],
    **{name: [[(1, 1, 1)], [(1, 1, 5), (1, 1, 2)]] for name in AUDIO_TOWERS},
    "qwen3_omni_sound": [[(1, 1, 1)], [(1, 1, 28), (1, 1, 3)]],
    "qwen2_5_omni_sound": [[(1, 1, 2)], [(1, 1, 12), (1, 1, 4)]],
    **{name: [[(1, 1, 3)], [(1, 1, 53), (1, 1, 4)]] for name in SPEECH},
}
GRIDS |= {name: GRIDS[of] for name, (of, _) in VARIANTS.items()}
PATCH_VALUES = {"whisper": 2 * 8, "wav2vec2": 5 * 2, "wav2vec2_stable": 5 * 2}
PATCH_VALUES |= {"qwen3_omni_sound": 8 * 8, "qwen2_5_omni_sound": 2 * 8}
PATCH_VALUES |= {"voxtral": 2 * 8, "qwen2_audio": 3 * 8, "audioflamingo3": 3 * 8}
PATCH_VALUES |= {"gemma4": 3 * 4 * 4, "pixtral": 3 * 4 * 4}
PATCH_VALUES |= {"siglip2": 3 * 4 * 4, "qwen2_vl": 3 * 2 * 4 * 4, "qwen2_5_vl": 3 * 2 * 4 * 4}
PATCH_VALUES |= dict.fromkeys(("qwen3_vl", "in qwen3_vl", "qwen3_5"), 3 * 2 * 4 * 4)
PATCH_VALUES |= dict.fromkeys(("qwen2_5_omni_vision", "in qwen3_omni"), 3 * 2 * 4 * 4)
PATCH_VALUES |= {"audio in qwen3_omni": 8 * 8}
PATCH_VALUES |= dict.fromkeys(("glm4v", "in glm4v", *VARIANTS), 3 * 2 * 4 * 4)


@dataclass(frozen=True)
class Case:
    """An encoder with a parallelism configuration."""

    family: str
    sequence_parallel: bool
    frozen: bool = False
    chunks: int = 0
    """Blocks per slice of async tensor parallelism. 0 disables it."""
    sharded: bool = False
    """Whether FSDP2 shards the encoder instead of tensor parallelism."""
    recomputed: bool = False
    """Whether backward recomputes layers after forwards with other input lengths."""
    adapted: str = ""
    """Method of the adapters in tower and connector."""


CASES = [Case(family, split) for family in TOWERS for split in (False, True)]
CASES += [Case(family, True) for family in COMPOSITES]
CASES += [Case("in qwen3_vl", False), Case("in qwen3_vl", True, chunks=1)]
CASES += [Case("qwen2_5_vl", True, frozen=True)]
CASES += [Case(f"qwen2_5_omni_{part}", True, chunks=2) for part in ("vision", "sound")]
ASYNC = ("clip", "siglip", "siglip2", "qwen2_5_vl")
CASES += [Case(family, True, chunks=chunks) for chunks, family in enumerate(ASYNC, start=1)]
CASES += [Case("clip", True, frozen=True, chunks=2)]
CASES += [Case("siglip2", True, chunks=chunks, recomputed=True) for chunks in (0, 1)]
MERGERS = ("in internvl", "in qwen3_vl", "in glm4v")
CASES += [Case(family, split, adapted="lora") for family in MERGERS for split in (False, True)]
CASES += [Case(family, True, adapted="dora") for family in MERGERS]


@proves("tensor", TOWERS, ranks=2, every=1)
@proves("sequence", TOWERS, ranks=2, every=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "every"),
    [(2, 6), *(pytest.param(ranks, 1, marks=pytest.mark.campaign) for ranks in (2, 4))],
)
def test_split_encoders_equal_unsharded(ranks, every):
    # The number of ranks affects sequence lengths and heads, not families.
    cases = [c for c in CASES if ranks == 2 or c.family in (*ASYNC, "internvl")]
    sharded = (*TOWERS, "in qwen3_vl") if ranks == 2 else ()
    cases += [Case(family, False, sharded=True) for family in sharded]
    cases += [Case(MERGERS[1], False, sharded=True, adapted="dora") for _ in sharded[:1]]
    for outcomes in zip(*run_distributed(_compare_all, ranks, cases[::every]), strict=True):
        for case, errors in outcomes:
            assert errors == {}, (case, errors)


def test_tensor_parallel_plan_covers_encoder_layers():
    model = _build("qwen2_5_vl")
    styles = _encoder(model, "qwen2_5_vl").tensor_parallel_plan()
    assert styles["tower.blocks.*.attn"] == "packed_qkv"
    assert styles["tower.blocks.*.norm1"] == "sequence"


def _compare_all(cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    return [(c, _compare_sharded(c) if c.sharded else _compare(c)) for c in cases]


def _compare(case: Case) -> dict[str, float]:
    """Return relative errors of outputs and gradients that exceed 1e-5."""
    freeze = ("eye",) if case.frozen else ()
    full, split = (_build(case.family, freeze, case.adapted) for _ in range(2))
    expected_encoder, encoder = (_encoder(model, case.family) for model in (full, split))
    mesh = mesh_for(ParallelConfig(shard=1, tensor=torch.distributed.get_world_size()))
    group = mesh.module_mesh.tensor.get_group().group_name
    overlap = AsyncStyles(Overlap("ring", group, case.chunks)) if case.chunks else None
    apply_tensor_parallel(encoder, mesh.module_mesh.tensor, case.sequence_parallel, overlap)
    if case.recomputed:
        apply_activation_checkpoint(encoder, "full")
    errors = {}
    losses = []
    for model in (full, split):
        _fill(model)
    for grids in GRIDS[case.family]:
        inputs = _inputs(case.family, grids)
        expected, actual = expected_encoder(inputs), encoder(inputs)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
        losses += [(output * weights).sum() for output in (expected, actual)]
        errors[f"output {grids}"] = _error(actual, expected, expected.norm().item())
    for loss in losses:
        loss.backward()
    errors |= _gradient_errors(expected_encoder, encoder)
    return {name: error for name, error in errors.items() if not error <= 1e-5}


def _compare_sharded(case: Case) -> dict[str, float]:
    """Compare FSDP2 gradients. Ranks have different images and image counts."""
    family = case.family
    full, split = (_build(family, adapted=case.adapted) for _ in range(2))
    expected_encoder, encoder = (_encoder(model, family) for model in (full, split))
    mesh = mesh_for(ParallelConfig(shard=2))
    apply_fsdp(encoder, mesh.module_mesh.fsdp, torch.float32)
    for model in (full, split):
        _fill(model)
    for rank, grids in enumerate((GRIDS[family][0], GRIDS[family][-1])):
        inputs = _inputs(family, grids, seed=rank)
        expected = expected_encoder(inputs)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
        (expected * weights).sum().backward()
        if rank == mesh.data_parallel_rank:
            output = encoder(inputs)
            (output * weights).sum().backward()
            errors = {"output": _error(output, expected, expected.norm().item())}
    errors |= _gradient_errors(expected_encoder, encoder)
    return {name: error for name, error in errors.items() if not error <= 1e-5}


def _gradient_errors(full: EncoderModule, split: EncoderModule) -> dict[str, float]:
    """Return the relative error of each gradient."""
    gradients = {n: p.grad for n, p in full.named_parameters() if p.requires_grad}
    scale = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    errors = {}
    for name, parameter in split.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        grad = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        errors[name] = _error(grad, gradients.pop(name), scale)
    assert not gradients
    return errors


def _build(family: str, freeze: tuple[str, ...] = (), adapted: str = "") -> MultimodalModel:
    if family in COMPOSITES:
        config = ModelConfig(config=COMPOSITES[family])
    else:
        modality = "audio" if family in AUDIO_TOWERS else "image"
        encoder = EncoderConfig(config=TOWERS[family], modality=modality)
        config = ModelConfig(llm=LlmConfig(config=LLM), encoders={"eye": encoder})
    adapters = {}
    if adapted:
        modules = ["vision", "vision.connector"]
        adapters["low"] = AdapterConfig(modules=modules, rank=3, method=adapted)
    return build_model(config, FreezeConfig(modules=list(freeze)), adapters=adapters)


@torch.no_grad()
def _fill(model: MultimodalModel) -> None:
    """Fill parameters with equal values in every layout, including nonzero adapters."""
    materialize(model, "cpu")
    init_weights(model, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("lora.up"):
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            copy_slice(parameter, 0.01 * torch.randn(parameter.shape, generator=generator))


def _encoder(model: MultimodalModel, family: str) -> EncoderModule:
    """Return the encoder of a model, or its audio encoder for the family "audio in ..."."""
    encoders = list(model.encoders.values())
    encoder = encoders[-1 if family.startswith("audio in") else 0]
    assert isinstance(encoder, EncoderModule)
    return encoder


def _inputs(family: str, grids: list[tuple[int, int, int]], seed: int = 3) -> EncoderInputs:
    generator = torch.Generator().manual_seed(seed)
    shape: tuple[int, ...] = (len(grids), 3, 8, 8)
    if family in PATCH_VALUES:
        shape = (sum(map(prod, grids)), PATCH_VALUES[family])
    return EncoderInputs(torch.randn(shape, generator=generator), grids, torch.empty(0))


def _error(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Return the relative error.

    Gradients of key biases are zero except for rounding. Their errors are relative to `scale`.
    """
    size = expected.norm().item()
    return (actual - expected).norm().item() / (size if size > 1e-6 * scale else scale)
