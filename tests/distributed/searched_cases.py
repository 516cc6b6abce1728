"""A tiny image-text model in a pipeline with a searched schedule, and its batches."""

import random
from dataclasses import dataclass

import torch
from meshes import mesh_for
from microbatches import MODEL, composite_model, random_microbatch

from torchmm.common.batch import Microbatch
from torchmm.common.layers import ModuleDescription
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep

CPU = torch.device("cpu")


def batch_of(seed: int) -> list[Microbatch]:
    """Return six microbatches. Every tenth batch has no images."""
    rng = random.Random(seed)
    counts = [0] * 6 if seed % 10 == 9 else [rng.choice((0, 0, 1, 2, 5)) for _ in range(6)]
    return [
        random_microbatch(100 * seed + i, count, rng.choice((72, 80)))
        for i, count in enumerate(counts)
    ]


@dataclass
class Searched:
    """Pipeline of a rank and the unsharded reference. Construction is collective."""

    mesh: ParallelMesh
    model: MultimodalModel
    alone: MultimodalModel
    """The same model without sharding."""
    descriptions: list[ModuleDescription]
    pipeline: Pipeline
    step: TrainStep

    def share(self, batch: list[Microbatch]) -> list[Microbatch]:
        """Return the microbatches of this data-parallel rank."""
        return batch[self.mesh.data_parallel_rank :: self.mesh.data_parallel_size]


def build_searched(layout: dict[str, int], composite: str = "", **search: object) -> Searched:
    """Build a pipeline with one layer per stage and one additional layer in the LLM.

    Args:
        layout: Keys of `[parallel]`.
        composite: model_type of a multimodal model, for microbatches of `with_patches`. "" means an
            LLM with CLIP.
        search: Keys of `[parallel.search]`.
    """
    config = ParallelConfig.model_validate({"shard": 1, "schedule": "searched", **layout,
                                            "search": search})  # fmt: skip
    mesh = mesh_for(config)
    layers, tied = config.pipeline * config.virtual_stages, config.virtual_stages == 1
    model = unsharded_model(layers, tied, composite)
    descriptions = [module.describe() for module in model.modality_modules()]
    stage_layout = plan_layout(config, descriptions, [m.meta for m in batch_of(0)])
    stages = split_model_for_rank(model, stage_layout, mesh.plan_rank)
    tuned = ActivationCheckpointConfig(mode="auto")  # has an effect only in tests that tune
    parallelize(model, mesh, config, tuned, CompileConfig(), torch.float32)
    filled(model)
    pipeline = Pipeline(model, stages, stage_layout, descriptions, config, mesh, torch.float32)
    alone = filled(unsharded_model(layers, tied, composite))
    return Searched(mesh, model, alone, descriptions, pipeline, TrainStep(pipeline, mesh))


def unsharded_model(layers: int, tied: bool, composite: str = "") -> MultimodalModel:
    """Build the unsharded model on the meta device."""
    if composite:
        return build_model(composite_model(composite, layers + 1, layers, tied), FreezeConfig())
    config: ModelConfig = MODEL.model_copy(deep=True)
    config.llm.config.update(num_hidden_layers=layers + 1, tie_word_embeddings=tied)
    config.encoders["vision"].config["num_hidden_layers"] = layers
    return build_model(config, FreezeConfig())


def filled(model: MultimodalModel) -> MultimodalModel:
    """Initialize weights to the same values for every sharding."""
    materialize(model, CPU)
    init_weights(model, seed=1)
    return model
