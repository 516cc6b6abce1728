"""Everything that turns a model on the meta device into this rank's part of it, in order.

The order is the documentation: tensor parallelism first (it defines the local shapes), then
activation checkpointing inside of compilation, compilation per layer, and FSDP2 around it all;
then memory is allocated and filled, so that no rank ever holds the whole model.
"""

from __future__ import annotations

import torch

from torchmm.config import ActivationCheckpointConfig, CompileConfig, ParallelConfig
from torchmm.models.layered import LayeredModule
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.fsdp import apply_fsdp
from torchmm.parallel.mesh import ParallelMesh
from torchmm.parallel.tensor import apply_tensor_parallel


def parallelize(
    model: MultimodalModel,
    mesh: ParallelMesh,
    parallel: ParallelConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compile_config: CompileConfig,
    dtype: torch.dtype,
) -> None:
    """Applies the recipe's parallelism to every modality module, in place, on the meta device."""
    for module in model.modality_modules():
        apply_tensor_parallel(module, mesh.tensor, parallel.sequence_parallel)
        mode = activation_checkpoint.modules.get(module.name, activation_checkpoint.mode)
        apply_activation_checkpoint(module, mode)
        if compile_config.enabled and module.name in (compile_config.modules or [module.name]):
            _compile_layers(module)
        if mesh.world_size > 1 or dtype != torch.float32:
            apply_fsdp(module, mesh.fsdp, dtype)


def _compile_layers(module: LayeredModule) -> None:
    # All layers of Hugging Face share one `forward`: the limit counts their graphs together.
    torch._dynamo.config.recompile_limit = 64
    for layer in module.layers:
        layer.compile(fullgraph=True)
