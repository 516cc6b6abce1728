"""A tiny LLaVA with tied embeddings that is split and trained over the ranks of a layout."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from microbatches import VOCAB, random_microbatch
from torch.distributed.tensor import DTensor

from torchmm.models.build import build_model
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize, module_of
from torchmm.parallel.apply import parallelize
from torchmm.parallel.fsdp import FSDPModule, StepSharding
from torchmm.parallel.mesh import ParallelMesh, build_mesh
from torchmm.parallel.p2p import P2PChannels
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.slices import TensorParallelism
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.run.stage import make_stage
from torchmm.pipelining.schedules.layouts import ModuleLayers, separated_layout
from torchmm.pipelining.schedules.separated import separated
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CompileConfig,
    OptimizerConfig,
)
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.checkpoint.state import model_tensors, optimizer_tensors
from torchmm.training.optim import build_optimizer, global_grad_norm, group_by_replicas

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
LLAVA = {
    "vision_config": {
        "model_type": "clip_vision_model",
        **SIZES,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    },
    "text_config": {
        "model_type": "llama",
        **SIZES,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
    },
    "image_token_index": VOCAB - 1,
    "image_seq_length": 4,
    "vision_feature_layer": -1,
    "tie_word_embeddings": True,
}
IMAGES = [2, 0, 3, 1]
"""Images in each sequence of the global batch."""


@dataclass(frozen=True)
class Case:
    """Parallelism degrees of a layout. `segments` is the number of LLM stages per pipeline rank."""

    name: str
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    segments: int = 1
    sequence_parallel: bool = False
    freeze: tuple[str, ...] = ()


class Layout:
    """Objects that all models of a layout share, such as process groups and channels."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case = case
        self.config = ParallelConfig(
            pipeline=case.pipeline,
            replicate=case.replicate,
            shard=case.shard,
            tensor=case.tensor,
            virtual_stages=case.segments,
            sequence_parallel=case.sequence_parallel,
        )
        self.mesh: ParallelMesh = build_mesh(self.config, torch.device("cpu"))
        self.channels = P2PChannels(torch.device("cpu"), self.mesh.plan_ranks, 60)
        self.run_dir = directory / "runs" / case.name
        self.checkpoints = manager(self.run_dir, self.mesh.sizes)


class Part:
    """Model shard of a rank, with its stages and optimizer."""

    def __init__(self, of: Layout, source: Path) -> None:
        case = of.case
        self.mesh, self.channels = of.mesh, of.channels
        self.model = unsharded_model(source, case.freeze)
        self.layout = layout(case)
        self.stages = split_model_for_rank(self.model, self.layout, self.mesh.plan_rank)
        plain = (ActivationCheckpointConfig(), CompileConfig(), torch.float32)
        parallelize(self.model, self.mesh, of.config, *plain)
        materialize(self.model, "cpu")
        init_weights(self.model, seed=1)
        self.copies = self.model.tied_replica_parameters()
        assert bool(self.copies) == (self.mesh.plan_rank == case.pipeline - 1 > 0)
        self.optimizer = optimizer_of(self.model)

    def train(self) -> tuple[float, float]:
        """Run a training step and return its loss and gradient norm."""
        batch = [random_microbatch(seed, n) for seed, n in enumerate(IMAGES)]
        targets = sum(m.target_count for m in batch)
        share = batch[self.mesh.data_parallel_rank :: self.mesh.data_parallel_size]
        metas = [m.meta for m in share]
        parts = tuple((len(meta.patches("vision")) + 1) // 2 for meta in metas)
        graph = StageGraph(self.layout, len(metas), {"vision": parts})
        modules = {m.name: m for m in self.model.modality_modules()}
        specs = message_specs(graph, modules, metas, torch.float32)
        sharded = any(isinstance(stage, FSDPModule) for stage in self.stages.values())
        plan = lower_plan(separated(graph), graph, specs, sharding="step" if sharded else "none")
        stages = {
            index: make_stage(stage, StepSharding(stage) if sharded else None)
            for index, stage in self.stages.items()
        }
        runtime = PipelineRuntime(self.mesh.plan_rank, stages, self.channels)
        result = runtime.step(plan, share, loss_scale=1 / targets)
        losses = [float(loss) for loss in result.losses.values()]
        ranks = torch.tensor(sum(losses) / targets, dtype=torch.float64)
        dist.all_reduce(ranks)
        norm = global_grad_norm(group_by_replicas(self.model), self.mesh).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(ranks) / self.mesh.module_mesh.sizes.tensor, norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the unsharded tensors of this rank in a checkpoint. Collective within a stage."""
        return all_tensors(self.model, self.optimizer)


def layout(case: Case) -> StageLayout:
    trains = {name: name not in case.freeze for name in ("vision", "llm")}
    modules = [
        ModuleLayers(
            "vision",
            "encoder",
            (1.0,) * 4,
            sub_microbatched=True,
            trainable=(trains["vision"],) * 4,
            embedding_trainable=trains["vision"],
        ),
        ModuleLayers(
            "llm",
            "llm",
            (1.0,) * 4,
            trainable=(trains["llm"],) * 4,
            embedding_trainable=trains["llm"],
            head_trainable=trains["llm"],
            tied=True,
        ),
    ]
    ranks = TensorParallelism(case.tensor, case.sequence_parallel, case.sequence_parallel)
    stage_layout = separated_layout(modules, case.pipeline, {"llm": case.segments})
    return replace(stage_layout, tensor_parallel=dict.fromkeys(trains, ranks))


def unsharded_model(source: Path, freeze: tuple[str, ...] = ()) -> MultimodalModel:
    return build_model(ModelConfig(source=str(source)), FreezeConfig(modules=list(freeze)))


def initialized_model(source: Path, pretrained: bool) -> MultimodalModel:
    model = unsharded_model(source)
    materialize(model, "cpu")
    init_weights(model, 1, skip=load_weights(model) if pretrained else ())
    return model


def optimizer_of(model: MultimodalModel) -> torch.optim.AdamW:
    copies = model.tied_replica_parameters()
    return build_optimizer(model, module_of, OptimizerConfig(lr=1e-2), copies)


def manager(run_dir: Path, sizes: dict[str, int]) -> CheckpointManager:
    config = CheckpointConfig(async_save=False)
    return CheckpointManager(config, run_dir, logging.getLogger(__name__), sizes, "recipe")


def full_tensor_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_tensors(model: MultimodalModel, optimizer: Any) -> dict[str, torch.Tensor]:
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer.state)
    return {name: full_tensor_of(tensor).detach() for name, tensor in tensors.items()}


def different_names(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> list[str]:
    return [name for name, value in actual.items() if not torch.equal(value, expected[name])]
