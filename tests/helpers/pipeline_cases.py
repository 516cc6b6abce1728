"""Tiny real models in pipelines with random stages and orders, compared with unsharded models."""

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from meshes import mesh_for
from random_orders import random_order
from shared_reference import on_first_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchmm.common.batch import (
    IGNORE_TARGET,
    EncoderInputs,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
)
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.apply import parallelize
from torchmm.parallel.fsdp import StepSharding, apply_fsdp
from torchmm.parallel.mesh import ParallelMesh
from torchmm.parallel.p2p import P2PChannels
from torchmm.parallel.precision import mixed_precision
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.plan.slices import TensorParallelism
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.runtime import PipelineRuntime, channel_pairs
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.run.stage import make_stage
from torchmm.pipelining.schedules.layouts import ModuleLayers, StageSplit, build_layout
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig

CPU = torch.device("cpu")
VOCAB, LAYERS = 64, 4
IMAGE_TOKEN = 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
LLM = {
    "model_type": "qwen3",
    **SIZES,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
DELTA_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    },
}
DELTA_LLM = {**LLM, **DELTA_NETS, "model_type": "qwen3_5_text"}
"""An LLM with a gated delta net in three layers and attention in one."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TOWER = {**SIZES, "num_hidden_layers": LAYERS, "patch_size": 8}
FOLDED = {"connector": "pixel_shuffle_mlp", "pixel_shuffle_factor": 2}


class Kind(NamedTuple):
    """An encoder and its image sizes."""

    section: dict[str, Any]
    grids: list[tuple[int, int, int]]
    """Grids of images, from which one is selected at random."""
    pixels: tuple[int, ...]
    """Shape of an image or a patch."""
    merge: int = 1
    composite: str = ""
    """Composite that has this tower, whose LLM is in the case; "": any LLM."""
    text: Mapping[str, Any] = MappingProxyType({})
    """Settings of the LLM that this composite changes; None: removed."""
    whole: Mapping[str, Any] = MappingProxyType({})
    """Further settings of the composite."""
    beside: Mapping[str, Any] = MappingProxyType({})
    """Kinds of its other towers by name."""
    pooled: int = 1
    """Number of patches of audio that one token has."""
    tower: str = "vision"
    """Name of the tower."""

    @property
    def patches_per_token(self) -> int:
        return self.pooled * self.merge**2


ANY_GRID = [(1, rows, columns) for rows in (1, 2, 3) for columns in (1, 2, 3, 4)]
KINDS = {
    "clip": Kind(
        {"config": {"model_type": "clip_vision_model", **TOWER, "image_size": 16}},
        [(1, 2, 2)], (3, 16, 16),
    ),
    "siglip, folded": Kind(
        {"config": {"model_type": "siglip_vision_model", **TOWER, "image_size": 32}, **FOLDED},
        [(1, 4, 4)], (3, 32, 32), 2,
    ),
    "siglip2": Kind(
        {"config": {"model_type": "siglip2_vision_model", **TOWER, "num_patches": 16}},
        ANY_GRID, (3 * 8 * 8,),
    ),
    "qwen2_5_vl": Kind(
        {"config": {"model_type": "qwen2_5_vl_vision", "depth": LAYERS, "hidden_size": 32,
                    "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
                    "patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1]}},
        [(1, 2, 2), (1, 4, 6), (2, 2, 4)], (3 * 2 * 8 * 8,), 2,
    ),
    "whisper": Kind(
        {"modality": "audio", **FOLDED,
         "config": {"model_type": "whisper", "num_mel_bins": 6, "d_model": 32,
                    "encoder_layers": LAYERS, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
                    "max_source_positions": 16}},
        [(1, 1, n) for n in (4, 8, 12, 16)], (2 * 6,), 2,
    ),
}  # fmt: skip
_QWEN3_TOWER = {
    "model_type": "qwen3_vl_vision",
    "depth": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 8,
    "num_position_embeddings": 16,
}
_QWEN3_IMAGES = Kind(
    {"config": {**_QWEN3_TOWER, "deepstack_visual_indexes": [0, 1, 3]}},
    [(1, 2, 2), (1, 4, 6), (1, 4, 4)],
    (3 * 2 * 8 * 8,),
    merge=2,
    composite="qwen3_vl",
)
KINDS |= {
    "qwen3_vl": _QWEN3_IMAGES,
    "qwen3_vl_moe": _QWEN3_IMAGES._replace(composite="qwen3_vl_moe", text=EXPERTS),
    "qwen3_5": _QWEN3_IMAGES._replace(
        section={"config": {**_QWEN3_TOWER, "model_type": "qwen3_5_vision"}},
        composite="qwen3_5",
        text=DELTA_NETS,
    ),
}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}
_OMNI_SOUND = {
    "model_type": "qwen3_omni_moe_audio_encoder",
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "max_source_positions": 16,
    "n_window_infer": 200,
    "output_dim": 32,
    "downsample_hidden_size": 8,
}
_OMNI_SOUND_2_5 = {
    **{
        k: v
        for k, v in _OMNI_SOUND.items()
        if k not in ("n_window_infer", "downsample_hidden_size")
    },
    "model_type": "qwen2_5_omni_audio_encoder",
    "n_window": 4,
}
_OMNI_VISION = {**_QWEN3_TOWER, "model_type": "qwen3_omni_moe_vision_encoder"}
_OWN_HEADS = {"head_dim": None}
"""Setting of LLMs whose heads share the hidden size."""
KINDS |= {
    "qwen3_omni": _QWEN3_IMAGES._replace(
        section={"config": {**_OMNI_VISION, "deepstack_visual_indexes": [0, 2]}},
        composite="qwen3_omni_moe_thinker",
        text={**EXPERTS, **_OWN_HEADS},
        whole={"audio_config": _OMNI_SOUND},
        beside={
            "audio": Kind(
                {"modality": "audio", "config": _OMNI_SOUND},
                [(1, 1, seconds * 13) for seconds in (1, 2, 4)], (8 * 8,),
            ),
        },
    ),
    "qwen2_5_omni": Kind(
        {"config": {**KINDS["qwen2_5_vl"].section["config"],
                    "model_type": "qwen2_5_omni_vision_encoder"}},
        [(1, 4, 4), (1, 8, 4)], (3 * 2 * 8 * 8,), 2,  # which windows divide
        "qwen2_5_omni_thinker",
        {**_OWN_HEADS, "rope_parameters": {**_GLM_ROPE, "mrope_section": [1, 1, 2]}},
        {"audio_config": _OMNI_SOUND_2_5},
        {
            "audio": Kind(
                {"modality": "audio", "config": _OMNI_SOUND_2_5},
                [(1, 1, chunks * 4) for chunks in (1, 2, 4)], (2 * 8,), pooled=2,
            ),
        },
    ),
    "glm4v": _QWEN3_IMAGES._replace(
        section={"config": {"model_type": "glm4v_vision", "depth": LAYERS, "hidden_size": 32,
                            "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
                            "patch_size": 8, "image_size": 32}},
        composite="glm4v",
        text={**_OWN_HEADS, "rope_parameters": _GLM_ROPE},
    ),
    "mistral3": Kind(
        {"config": {"model_type": "pixtral", **TOWER, "image_size": 32}},
        [(1, 2, 2), (1, 4, 6), (1, 2, 4)], (3 * 8 * 8,), 2, "mistral3",
        {"model_type": "mistral", "sliding_window": 8}, {"vision_feature_layer": -1},
    ),
    "gemma4": Kind(
        {"config": {"model_type": "gemma4_vision", **TOWER, "num_key_value_heads": 4,
                    "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 16}},
        [(1, 2, 2), (1, 4, 6), (1, 2, 4)], (3 * 8 * 8,), 2, "gemma4",
        {"model_type": "gemma4_text", "global_head_dim": 16, "num_global_key_value_heads": 2,
         "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    ),
}  # fmt: skip
_LISTENER = {**KINDS["whisper"].section["config"], "max_source_positions": 50}
"""An audio encoder with windows of one second."""
_QWEN2 = {"model_type": "qwen2", **_OWN_HEADS}
KINDS |= {
    "voxtral": Kind(
        {"modality": "audio",
         "config": {**_LISTENER, "model_type": "voxtral_encoder", "encoder_ffn_dim": 128,
                    "max_source_positions": 100}},
        [(1, 1, 100), (1, 1, 200)], (2 * 6,), composite="voxtral",
        text={"model_type": "llama"}, pooled=4, tower="audio",
    ),
    "qwen2_audio": Kind(
        {"modality": "audio", "config": {**_LISTENER, "model_type": "qwen2_audio_encoder"}},
        [(1, 1, 7), (1, 1, 20), (1, 1, 50)], (3 * 6,), composite="qwen2_audio",
        text=_QWEN2, pooled=2, tower="audio",
    ),
    "audioflamingo3": Kind(
        {"modality": "audio", "config": {**_LISTENER, "model_type": "audioflamingo3_encoder"}},
        [(1, 1, 8), (1, 1, 57), (1, 1, 100)], (3 * 6,), composite="audioflamingo3",
        text=_QWEN2, pooled=2, tower="audio",
    ),
}  # fmt: skip
PLACEHOLDERS = {
    "mistral3": "image_token_index",
    "qwen2_audio": "audio_token_index",
    **dict.fromkeys(("voxtral", "audioflamingo3"), "audio_token_id"),
}
"""Config keys of the placeholder id by composite."""


@dataclass(frozen=True)
class Case:
    """A model in a layout; every seed is a step with other microbatches in another order."""

    name: str
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    encoder: str = "clip"
    second: str | None = None
    """Kind of a second encoder, which is always trained."""
    freeze: tuple[str, ...] = ()
    tied: bool = True
    delta: bool = False
    """Whether the LLM has gated delta nets."""
    chunked_loss: bool = False
    recompute: str = "none"
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            pipeline=self.pipeline,
            replicate=self.replicate,
            shard=self.shard,
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
        )

    def build(self, dtype: torch.dtype = torch.float32) -> MultimodalModel:
        """Return the unsharded model on the meta device, with parameters in `dtype`."""
        kind = KINDS[self.encoder]
        llm = {**(DELTA_LLM if self.delta else LLM), "tie_word_embeddings": self.tied}
        config: dict[str, Any] = {
            "llm": {"config": llm},
            "encoders": {name: kind.section for name, kind in self.kinds.items()},
        }
        if kind.composite:
            text = {**LLM, "model_type": None, **kind.text}
            key = PLACEHOLDERS.get(kind.composite, "image_token_id")
            config_of_tower = {f"{kind.tower}_config": kind.section["config"]}
            composite = {"model_type": kind.composite, **config_of_tower}
            composite |= {
                "text_config": {k: v for k, v in text.items() if v is not None},
                "tie_word_embeddings": self.tied,
                key: IMAGE_TOKEN,
                **kind.whole,
            }
            config = {"config": composite}
        model = ModelConfig.model_validate({**config, "chunked_loss": self.chunked_loss})
        return build_model(model, FreezeConfig(modules=list(self.freeze)), dtype)

    @property
    def kinds(self) -> dict[str, Kind]:
        """Encoders by name."""
        second = {} if self.second is None else {"glance": KINDS[self.second]}
        kind = KINDS[self.encoder]
        return {kind.tower: kind, **kind.beside, **second}

    def modules(self) -> list[ModuleLayers]:
        """Return the modules that stages divide, with their trained layers."""
        costs, encoders = (1.0,) * LAYERS, []
        for name in self.kinds:
            tower = name not in self.freeze
            layers = (tower,) * LAYERS
            encoders.append(
                ModuleLayers(name, "encoder", costs, True, layers, embedding_trainable=tower)
            )
        llm = "llm" not in self.freeze
        trunk = ModuleLayers(
            "llm", "llm", costs, False, (llm,) * LAYERS,
            embedding_trainable=llm, head_trainable=llm, tied=self.tied,
        )  # fmt: skip
        return [*encoders, trunk]

    def layout(self) -> StageLayout:
        """Return random numbers of stages of random sizes; those of the LLM are round-robin."""
        rng = random.Random(self.name)
        cuts = {}
        for name in self.kinds:
            parts = sizes(rng, rng.randint(1, LAYERS))
            cuts[name] = [StageSplit(n, (rng.randrange(self.pipeline),)) for n in parts]
        ranks = rng.sample(range(self.pipeline), self.pipeline)
        laps = rng.randint(1, LAYERS // self.pipeline)
        if self.pipeline == 1 and self.tied:
            laps = 1
        parts = sizes(rng, laps * self.pipeline)
        cuts["llm"] = [StageSplit(n, (ranks[i % self.pipeline],)) for i, n in enumerate(parts)]
        layout = build_layout(self.modules(), cuts)
        return with_slices(layout, self) if self.sequence_parallel else layout


def with_slices(layout: StageLayout, case: Any) -> StageLayout:
    """Return the layout of a case whose tensor-parallel ranks send slices."""
    modules = case.build().modality_modules()
    tensor = {m.name: TensorParallelism(case.tensor, True, m.is_sequence_sharded) for m in modules}
    return replace(layout, tensor_parallel=tensor)


def sizes(rng: random.Random, parts: int) -> list[int]:
    """Return LAYERS in random parts, none of which is empty."""
    ends = sorted(rng.sample(range(1, LAYERS), parts - 1))
    return [b - a for a, b in pairwise([0, *ends, LAYERS])]


def varied_microbatch(
    seed: int, images: Mapping[str, int], kinds: Mapping[str, Kind]
) -> Microbatch:
    """Return a sample per image, one of text, and padding; the seed determines the sizes.

    Args:
        images: Number of images by encoder.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    owners: list[str | None] = [name for name, count in images.items() for _ in range(count)]
    rng.shuffle(owners)
    starts, samples = [0], []
    shares: dict[str, tuple[list, list]] = {}
    for index, owner in enumerate([*owners, None]):
        metas, tokens = (), 0
        if owner is not None:
            grid = rng.choice(kinds[owner].grids)
            tokens = prod(grid) // kinds[owner].patches_per_token
            grids, positions = shares.setdefault(owner, ([], []))
            grids.append(grid)
            positions += range(starts[-1], starts[-1] + tokens)
            metas = (ImageMeta(8, 8, prod(grid), tokens),)
        length = tokens + rng.randint(3, 8)
        samples.append(SampleMeta("random", index, length, metas, owner))
        starts.append(starts[-1] + length)
    total = starts[-1] + rng.randint(1, 9)
    ids = torch.randint(5, VOCAB, (total,), generator=generator)
    targets = torch.full((total,), IGNORE_TARGET)
    for start, sample in zip(starts, samples, strict=False):
        first, last = start + sum(i.tokens for i in sample.images), start + sample.tokens - 1
        targets[first:last] = ids[first + 1 : last + 1]
    inputs = {}
    for name, (grids, positions) in shares.items():
        shape = kinds[name].pixels
        count = len(grids) if len(shape) == 3 else sum(map(prod, grids))
        pixels = torch.randn((count, *shape), generator=generator)
        is_audio = kinds[name].section.get("modality") == "audio"
        group = kinds[name].patches_per_token if is_audio else None
        inputs[name] = EncoderInputs(pixels, grids, torch.tensor(positions), None, group)
        ids[inputs[name].positions_K] = IMAGE_TOKEN
    position_ids = torch.cat([torch.arange(b - a) for a, b in pairwise([*starts, total])])
    meta = MicrobatchMeta(tuple(samples), total)
    return Microbatch(ids, targets, position_ids, [*starts, total], inputs, meta)


def step_of(
    case: Case, seed: int, replica: int = 0
) -> tuple[list[Microbatch], dict[str, tuple[int, ...]]]:
    """Return microbatches of a data-parallel rank, and their sub-microbatches by encoder.

    The number of microbatches depends on the replica. In every third step the second replica has no
    images; in every tenth step no replica has any.
    """
    rng = random.Random(f"{seed} {replica}")
    without = (replica == 1 and seed % 3 == 0) or seed % 10 == 9
    batch, parts = [], []
    for index in range(rng.randint(1, 4)):
        images = {n: 0 if without else rng.choice((0, 1, 2, 3, 5)) for n in case.kinds}
        batch.append(varied_microbatch(1000 * seed + 100 * replica + index, images, case.kinds))
        parts.append(
            {n: rng.randint(1, min(3, count)) if count else 0 for n, count in images.items()}
        )
    return batch, {name: tuple(p[name] for p in parts) for name in case.kinds}


class CaseRun:
    """A case on one rank. The constructor is collective."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mesh: ParallelMesh = mesh_for(case.parallel)
        self.layout = case.layout()
        self.model = case.build()
        modules = split_model_for_rank(self.model, self.layout, self.mesh.plan_rank)
        recompute = ActivationCheckpointConfig(mode=case.recompute)
        parallelize(self.model, self.mesh, case.parallel, recompute, CompileConfig(), case.dtype)
        materialize(self.model, CPU)
        init_weights(self.model, seed=1)
        self.sharded = any(isinstance(m, FSDPModule) for m in modules.values())
        self.stages = {
            i: make_stage(m, StepSharding(m) if self.sharded else mixed_precision(m))
            for i, m in modules.items()
        }
        self.channels = None
        if case.pipeline > 1:
            self.channels = P2PChannels(CPU, self.mesh.plan_ranks, 60.0)
            self.channels.warm_up(channel_pairs(self.layout))
        self.runtime = PipelineRuntime(self.mesh.plan_rank, self.stages, self.channels)
        self.whole = replace(case, chunked_loss=False).build()
        if case.dtype != torch.float32:
            single_rank_mesh = init_device_mesh(
                "cpu", (self.mesh.world_size, 1), mesh_dim_names=("all", "own")
            )
            for module in self.whole.modality_modules():
                apply_fsdp(module, single_rank_mesh["own"], case.dtype)
        materialize(self.whole, "cpu")
        init_weights(self.whole, seed=1)

    def plan(self, seed: int) -> tuple[PipelinePlan, list[Microbatch]]:
        """Return the step of this data-parallel rank in a random order."""
        batch, parts = step_of(self.case, seed, self.mesh.data_parallel_rank)
        graph = StageGraph(self.layout, len(batch), parts)
        modules = {m.name: m for m in self.model.modality_modules()}
        specs = message_specs(graph, modules, [m.meta for m in batch], self.case.dtype)
        order = random_order(graph, seed)
        plan = lower_plan(order, graph, specs, sharding="step" if self.sharded else "none")
        validate_plan(plan).raise_for_problems()
        return plan, batch

    def errors(self, seed: int) -> dict[str, float]:
        """Run a step and return relative errors of losses and gradients beyond the tolerance."""
        plan, batch = self.plan(seed)
        size = self.mesh.data_parallel_size
        replicas = [step_of(self.case, seed, replica)[0] for replica in range(size)]
        targets = sum(m.target_count for microbatches in replicas for m in microbatches)
        self.model.zero_grad()
        result = self.runtime.step(plan, batch, loss_scale=1 / targets)
        on_one_rank = (
            self.case.dtype == torch.float32
        )  # otherwise every rank has separate FSDP2 units
        compute = shared_losses if on_one_rank else reference_losses
        losses = compute(self.whole, replicas, targets)
        expected = losses[self.mesh.data_parallel_rank]
        errors = {f"loss {i}": abs(x.item() / expected[i] - 1) for i, x in result.losses.items()}
        errors |= gradient_errors(self.model, self.whole)
        return {n: e for n, e in errors.items() if not e <= self.case.tolerance}

    def tied_digest(self) -> str | None:
        """Return a hash of the gradient of the tied weight on this rank."""
        for name, parameter in self.model.named_parameters():
            tied = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            if tied and parameter.grad is not None:
                data = whole(parameter.grad).numpy().tobytes()
                return hashlib.sha256(data).hexdigest()
        return None

    def collectives(self, seed: int) -> tuple[Counter, Counter]:
        """Return (counted, expected) all-gathers and reduce-scatters of one step."""
        plan, batch = self.plan(seed)
        self.model.zero_grad()
        counter = CountCollectives()
        with counter:
            self.runtime.step(plan, batch)
        expected: Counter = Counter()
        for stage in self.stages.values():
            for unit in stage.module.modules():
                if isinstance(unit, FSDPModule):
                    parameters = direct_parameters(unit)
                    expected["all-gather"] += bool(parameters)
                    expected["reduce-scatter"] += any(p.requires_grad for p in parameters)
        return counter.counts, expected


def reference_losses(
    model: MultimodalModel, replicas: Sequence[Sequence[Microbatch]], targets: int
) -> list[list[float]]:
    """Return losses of all replicas on the unsharded model, and leave its gradients there."""
    model.zero_grad()
    losses: list[list[float]] = []
    for batch in replicas:
        losses.append([])
        for microbatch in batch:
            loss = model(microbatch)
            losses[-1].append(loss.item())
            (loss / targets).backward()
    return losses


def shared_losses(
    model: MultimodalModel, replicas: Sequence[Sequence[Microbatch]], targets: int
) -> list[list[float]]:
    """Return `reference_losses` and set its gradients on every rank, computed by rank 0."""

    def compute() -> tuple[list[list[float]], dict[str, Tensor | None]]:
        losses = reference_losses(model, replicas, targets)
        return losses, {name: p.grad for name, p in model.named_parameters()}

    losses, gradients = on_first_rank(compute)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    return losses


def gradient_errors(cut: MultimodalModel, model: MultimodalModel) -> dict[str, float]:
    """Return relative errors of all gradients of a model in stages against an unsharded one."""
    expected = {n: whole(p.grad) for n, p in model.named_parameters() if p.requires_grad}
    scale = max([1e-12, *(g.norm().item() for g in expected.values())])
    copies, errors = cut.tied_replicas(), {}
    for name, parameter in cut.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, f"frozen {name} has a gradient"
            continue
        reference = expected[copies.get(name, name)]
        errors[name] = relative_error(whole(parameter.grad), reference, scale)
    return errors


def direct_parameters(unit: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return parameters of an FSDP unit, except for those of nested units."""
    inner = {
        p for m in unit.modules() if m is not unit and isinstance(m, FSDPModule)
        for p in m.parameters()
    }  # fmt: skip
    return [p for p in unit.parameters() if p not in inner]


class CountCollectives(TorchDispatchMode):
    """Counts the collectives of FSDP under any name that torch gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().replace("_", "")
            self.counts["all-gather"] += "allgather" in name
            self.counts["reduce-scatter"] += "reducescatter" in name
        return func(*args, **(kwargs or {}))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative_error(value: Tensor, expected: Tensor, scale: float) -> float:
    """Return the error relative to `scale` if the reference is zero up to rounding.

    This is the case for the bias of keys.
    """
    size = expected.norm().item()
    return (value - expected).norm().item() / (size if size > 1e-6 * scale else scale)
