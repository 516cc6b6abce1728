"""Everything that turns a model on the meta device into this rank's part of it, in order.

The order is the documentation: tensor parallelism first (it defines the local shapes), then
activation checkpointing inside of compilation, compilation per layer, and FSDP2 or, on one rank,
mixed precision around it all;
then memory is allocated and filled, so that no rank ever holds the whole model.

In a pipeline the model has been cut before (`MultimodalModel.cut`), and all of this is done to each
of the rank's stages, as if it were a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchmm.models.layers import delta_net, experts
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel import fsdp
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import Compilation
from torchmm.parallel.context import apply_context_parallel
from torchmm.parallel.expert import apply_expert_parallel
from torchmm.parallel.mesh import ModuleMesh, ParallelMesh
from torchmm.parallel.precision import apply_mixed_precision
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.parallel.tensor.overlap_choice import choose_overlap
from torchmm.parallel.tensor.overlap_linear import Overlap
from torchmm.parallel.tensor.pieces import stop_in_layers
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig


def parallelize(
    model: MultimodalModel,
    mesh: ParallelMesh,
    parallel: ParallelConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compile_config: CompileConfig,
    dtype: torch.dtype,
    tokens: int = 0,
    meshes: Mapping[str, ModuleMesh] | None = None,
) -> Compilation:
    """Applies the recipe's parallelism to every stage of the model, in place, on the meta device.

    Without a pipeline a stage is a whole modality module. Collective.

    Args:
        tokens: of a microbatch, for what is tuned by a measurement; 0: nothing is measured.
        meshes: by module with sizes of its own (`ModuleMesh.colocated`).

    Returns:
        What compiles the layers that the recipe wants compiled.

    Raises:
        ConfigError: layers cannot be compiled with this version of transformers.
    """
    overlaps = parallel.async_tensor_parallel and mesh.own.sizes.tensor > 1
    chosen: dict[str, Overlap] = {}
    if mesh.own.context is not None:
        apply_context_parallel(model, mesh.own.context)
    compilation = Compilation(compile_config.backend)
    for module in model.all_stages():
        own = (meshes or {}).get(module.name, mesh.own)
        if overlaps and module.keeps_slices and module.overlaps and module.name not in chosen:
            chosen[module.name] = choose_overlap(module, own.tensor, parallel, dtype, tokens)
        overlap = chosen.get(module.name)
        apply_tensor_parallel(
            module, own.tensor, parallel.sequence_parallel, overlap, mesh.meanwhile(module.kind)
        )
        if mesh.bubbles is not None and module.kind == "encoder":
            stop_in_layers(module, mesh.bubbles.pause, sends=own.sizes.tensor > 1)
        expert = own.expert if module.kind == "llm" else None
        if expert is not None:
            apply_expert_parallel(module, expert)
        bounded = parallel.bounds_encoders and module.kind == "encoder"
        mode = activation_checkpoint.mode_of(module.name, bounded=bounded)
        compiles = compile_config.concerns(module.name)
        for kind in (experts, delta_net) if compiles else ():
            kind.check_compiles(module.name, module.layers, mesh.device.type)
        apply_activation_checkpoint(module, mode, compilation if compiles else None)
        if fsdp.needs_fsdp(own.sizes):
            expert_mesh = None if expert is None else own.expert_fsdp
            reshards = reshards_after_forward(parallel)
            fsdp.apply_fsdp(module, own.fsdp, dtype, reshards, expert_mesh)
        elif dtype != torch.float32:
            apply_mixed_precision(module, dtype)
    return compilation


def reshards_after_forward(parallel: ParallelConfig) -> bool:
    """Whether FSDP2 frees gathered parameters after each forward, as the recipe says.

    Not in a pipeline: every microbatch would gather them again. Not where modules have ranks of
    their own: replicas run other tasks.
    """
    if parallel.reshard_after_forward == "default":
        alone = parallel.pipeline * parallel.mirrors == 1
        return alone and parallel.placement != "disaggregated"
    return parallel.reshard_after_forward == "always"
