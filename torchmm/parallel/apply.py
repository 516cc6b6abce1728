"""Parallelization of a model on the meta device, in place.

The steps of each module have this order:

1. Tensor parallelism, which defines local shapes.
2. Activation checkpointing, inside of compilation.
3. Compilation of each layer.
4. FSDP2 or, on one rank, mixed precision.

Memory is allocated and loaded afterwards, so no rank ever stores the complete model.

With `mesh.layer_hooks`, layers of encoders call a hook where they can yield. The function that adds
the hook is the entry "pieces" of the extension table "layer_stops". In a pipeline, the model has
been split before (`MultimodalModel.reduce_to_stages`), and all steps apply to each stage of the
rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchmm.common.extensions import load_entry
from torchmm.common.module_names import LLM
from torchmm.models.encoders import EncoderModule
from torchmm.models.layered import LayeredModule
from torchmm.models.layers import delta_net, experts
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel import fsdp
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.attention_kernels import AttentionKernels, kernel_problems
from torchmm.parallel.compilation import Compilation, find_compiler_problem
from torchmm.parallel.context import apply_context_parallel, context_problems
from torchmm.parallel.expert import apply_expert_parallel, expert_problems
from torchmm.parallel.mesh import ModuleMesh, ParallelMesh
from torchmm.parallel.precision import apply_mixed_precision
from torchmm.parallel.tensor.apply import (
    apply_tensor_parallel,
    choose_overlap,
    tensor_problems,
)
from torchmm.parallel.tensor.sequence import OverlapStyles
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig

logger = logging.getLogger(__name__)


def model_problems(
    model: MultimodalModel,
    parallel: ParallelConfig,
    tensor: Mapping[str, int],
    attention: AttentionKernels,
    compile_config: CompileConfig,
    device: torch.device,
) -> list[str]:
    """Return why a model cannot be parallelized. Needs no process group.

    Args:
        model: Complete model on the meta device.
        parallel: Parallelism of the recipe.
        tensor: Tensor-parallel ranks by module.
        attention: Attention kernels of the recipe.
        compile_config: Compilation of the recipe.
        device: Device of the run.
    """
    problems: list[str] = []
    for module in model.modality_modules():
        size = tensor[module.name]
        problems += tensor_problems(module, size, parallel.async_tensor_parallel)
    problems += context_problems(model.llm, parallel.context, tensor[LLM])
    problems += kernel_problems(attention, device)
    missing = find_compiler_problem(compile_config, device.type)
    if missing and compile_config.enabled is True:
        problems.append(f"compile.enabled = true: {missing}")
    return problems + expert_problems(model.llm, parallel.expert)


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
    """Apply the parallelism of the recipe to every stage of the model, in place. Collective.

    The model is on the meta device. Without a pipeline, a stage is a complete modality module.

    Args:
        model: Model, cut into the stages of this rank.
        mesh: Mesh of all ranks.
        parallel: Parallelism of the recipe.
        activation_checkpoint: Recomputation of the recipe.
        compile_config: Compilation of the recipe.
        dtype: Compute dtype.
        tokens: Tokens of every microbatch. If 0, the number changes, and no measurement chooses how
            tensor-parallel communication overlaps.
        meshes: Meshes of modules that have separate sizes (`ModuleMesh.colocated`), by name.

    Returns:
        The compiled layers.

    Raises:
        ConfigError: The recipe requires compiled layers, which this version of transformers, or a
            library, does not support.
    """
    overlap_styles: dict[str, OverlapStyles | None] = {}
    if mesh.module_mesh.context is not None:
        apply_context_parallel(model, mesh.module_mesh.context, mesh.module_mesh.context_subgroups)
    device = mesh.device.type
    is_automatic = compile_config.enabled == "auto"
    compilation = Compilation(
        compile_config.backend, has_constant_rows=tokens > 0, falls_back=is_automatic
    )
    missing = find_compiler_problem(compile_config, device)
    for module in model.all_stages():
        module_mesh = (meshes or {}).get(module.name, mesh.module_mesh)
        if (
            mesh.module_mesh.sizes.tensor > 1
            and module.is_sequence_sharded
            and module.name not in overlap_styles
        ):
            overlap_styles[module.name] = choose_overlap(
                module, module_mesh.tensor, parallel, dtype, tokens
            )
        overlap = overlap_styles.get(module.name)
        hooks = mesh.layer_hooks
        overlap_hook = None if hooks is None else hooks.hook_for(module.kind)
        apply_tensor_parallel(
            module, module_mesh.tensor, parallel.sequence_parallel, overlap, overlap_hook
        )
        if overlap_hook is not None and module.kind == "encoder":
            insert_yield_points = load_entry("layer_stops", "pieces")
            insert_yield_points(module, overlap_hook, sends=module_mesh.sizes.tensor > 1)
        expert = module_mesh.expert if module.kind == "llm" else None
        if expert is not None:
            apply_expert_parallel(module, expert)
        bounded = parallel.bounds_encoders and module.kind == "encoder"
        sizes = replace(module.describe(), layers=tuple(module.layer_sizes()))
        compiles = compile_config.applies_to(sizes, device, parallel)
        if compiles and is_automatic and missing:
            logger.warning("layers of %s are not compiled: %s", module.name, missing)
            compiles = False
        for kind in (experts, delta_net) if compiles else ():
            kind.check_compiles(module.name, module.layers, device)
        is_eager_on_cuda = device == "cuda" and not compiles
        mode = activation_checkpoint.mode_of(
            module.name, bounded=bounded, is_eager_on_cuda=is_eager_on_cuda
        )
        compiler = compilation if compiles else None
        apply_activation_checkpoint(module, mode, compiler, is_eager_on_cuda=is_eager_on_cuda)
        _shard(module, module_mesh, expert, parallel, dtype)
        graphs_problem = compile_config.reason_against_graphs(
            module.describe(), device, mesh.world_size, compiled=compiles, recompute=mode
        )
        if isinstance(module, EncoderModule) and not graphs_problem:
            module.enable_cuda_graphs()
    return compilation


def _shard(
    module: LayeredModule,
    module_mesh: ModuleMesh,
    expert: DeviceMesh | None,
    parallel: ParallelConfig,
    dtype: torch.dtype,
) -> None:
    """Apply FSDP2 or, on one rank, mixed precision."""
    if fsdp.needs_fsdp(module_mesh.sizes):
        expert_mesh = None if expert is None else module_mesh.expert_fsdp
        fsdp.apply_fsdp(
            module,
            module_mesh.fsdp,
            dtype,
            fsdp.should_reshard_after_forward(parallel),
            expert_mesh,
        )
    elif dtype != torch.float32:
        apply_mixed_precision(module, dtype)
