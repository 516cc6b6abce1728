"""The optimizer, its parameter groups, the learning rate and the global gradient norm.

AdamW in float32 is torch's fused one; all else is `optimizers/compact.py`.

The learning rate is a pure function of the step, so there is no scheduler state to save.
Parameters are grouped by module (each may have a learning rate of its own), by whether weight
decay applies, and by device mesh: fused kernels and norms take lists of DTensors of one mesh.

In a pipeline every rank has the optimizer of its own stages. A tied embedding has a copy in the
last stage with an optimizer state of its own; copy and original start alike, get the same gradient
and the same settings, and so stay bit-equal. In the gradient norm only the original counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.mesh import ParallelMesh
from torchmm.recipe.training_section import OptimizerConfig
from torchmm.training.checkpoint.state import parameter_names
from torchmm.training.optimizers.average import WeightAverage
from torchmm.training.optimizers.compact import CompactOptimizer, Settings


def build_optimizer(
    model: nn.Module,
    module_of: Callable[[str], str],
    config: OptimizerConfig,
    copies: Collection[nn.Parameter] = (),
    matrices: Collection[nn.Parameter] = (),
    dtype: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """Of the trainable parameters of `model`; there may be none on this rank.

    Args:
        module_of: maps a parameter's name to its module name ("llm", "NAME", "NAME.connector").
        copies: parameters that are copies of another rank's embedding, and treated like it.
        matrices: those of layers, which Muon is for.
        dtype: in which modules compute.
    """
    groups: dict[tuple, dict[str, Any]] = {}
    by_muon = {id(matrix) for matrix in matrices} if config.name == "muon" else set()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    embeddings |= {id(copy) for copy in copies}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        module = module_of(name)
        decays = parameter.ndim > 1 and id(parameter) not in embeddings
        rule = "muon" if id(parameter) in by_muon else "adamw"
        key = (module, decays, rule, _mesh_of(parameter))
        peak_lr = config.module_lr.get(module, config.lr)
        group = groups.setdefault(
            key,
            {
                "params": [],
                "module": module,
                "rule": rule,
                "lr": peak_lr,
                "peak_lr": peak_lr,
                "weight_decay": config.weight_decay if decays else 0.0,
            },
        )
        group["params"].append(parameter)
    beta1, beta2 = config.betas
    nothing = {"params": [], "module": "", "lr": config.lr, "peak_lr": config.lr}
    found = list(groups.values()) or [nothing]
    plain = all(p.dtype == torch.float32 for group in found for p in group["params"])
    if plain and config.name == "adamw" and config.state_dtype == "float32" and not config.offload:
        betas = (beta1, beta2)
        return torch.optim.AdamW(found, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    settings = Settings(
        betas=(beta1, beta2),
        eps=config.eps,
        momentum=config.momentum,
        state_dtype=config.state_dtype,
        at_random=config.stochastic_rounding,
        offload=config.offload,
        muon_dtype=dtype,
    )
    return CompactOptimizer(found, settings, parameter_names(model))


class Updates:
    """Applies a run's gradients: their norm, clipping, learning rate, optimizer, average.

    Args:
        steps: of the run.
        average: of the weights, which follows them.
    """

    def __init__(
        self,
        model: MultimodalModel,
        optimizer: torch.optim.Optimizer,
        mesh: ParallelMesh,
        config: OptimizerConfig,
        steps: int,
        average: WeightAverage | None = None,
    ) -> None:
        self._average = average
        self._optimizer, self._mesh, self._config, self._steps = optimizer, mesh, config, steps
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._copies = model.tied_copy_parameters()

    def grad_norm(self) -> Tensor:
        """Norm of all gradients of all ranks, a float32 scalar; collective."""
        mesh = self._mesh
        return global_grad_norm(
            self._parameters, self._copies, mesh.norm_ranks, mesh.norm_sharing, mesh.device
        )

    def apply(self, step: int, grad_norm: float) -> float:
        """Clips and applies the gradients of a step, 1-based, and lets go of them; the learning
        rate used."""
        factor = lr_factor(step, self._steps, self._config)
        set_learning_rate(self._optimizer, factor)
        clip = clip_factor(grad_norm, self._config.max_grad_norm)
        if clip < 1.0:
            scale_gradients(self._parameters, clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._average is not None:
            self._average.update()
        return self._config.lr * factor


def lr_factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (1-based) of `steps`, relative to the peak."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    floor = config.min_lr_ratio
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.decay_fraction * steps))
        return max(floor, min(1.0, floor + (1 - floor) * (steps - step) / decay_steps))
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def describe_schedule_change(
    step: int, saved_steps: int, steps: int, config: OptimizerConfig
) -> str | None:
    """Return how another `training.steps` changes the learning rate of a resumed run.

    Args:
        step: last finished step.
        saved_steps: `training.steps` of the run that saved the checkpoint.
        steps: `training.steps` of this run.

    Returns:
        None if the next step has the learning rate that it would have had.
    """
    planned, changed = (lr_factor(step + 1, total, config) for total in (saved_steps, steps))
    if step >= steps or math.isclose(planned, changed, rel_tol=1e-9):
        return None
    last = config.lr * lr_factor(step, saved_steps, config)
    return (
        f"training.steps {saved_steps} -> {steps} changes the {config.schedule!r} learning rate "
        f"schedule, which depends on the number of steps: the learning rate jumps from {last:.3e} "
        f"in step {step} to {config.lr * changed:.3e} in step {step + 1}. To avoid the jump, set "
        'optimizer.schedule = "constant" and optimizer.lr to the last learning rate'
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def global_grad_norm(
    parameters: Iterable[nn.Parameter],
    copies: Collection[nn.Parameter] = (),
    pipeline: dist.ProcessGroup | None = None,
    sharing: int | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Euclidean norm of all gradients of all ranks, a float32 scalar equal on every rank.

    Plain tensors count as replicated: they are the same on all ranks of a stage. What several ranks
    of a pipeline share counts once.

    Args:
        copies: parameters that are copies of another rank's, which counts them.
        pipeline: the ranks of this rank's pipeline, all of which must call; None: it is alone.
        sharing: how many of these have the same parameters, or shards of them; None: those of
            each parameter's mesh.
        device: of this rank, which may have nothing to train and then no tensor that shows it.
    """
    left_out = {id(copy) for copy in copies}
    counted = [p for p in parameters if id(p) not in left_out]
    by_mesh = _gradients_by_mesh(counted)
    norms = [_norm(grads) for grads in by_mesh.values()]
    whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    if pipeline is None:
        return torch.linalg.vector_norm(torch.stack(whole))
    square = torch.zeros((), dtype=torch.float64, device=device)
    ranks = set(dist.get_process_group_ranks(pipeline))
    for mesh, norm in zip(by_mesh, whole, strict=True):
        alike = 1 if mesh is None else len(ranks.intersection(mesh.mesh.flatten().tolist()))
        square += norm.to(device, torch.float64).square() / (sharing or alike)
    dist.all_reduce(square, group=pipeline)
    return square.sqrt().float()


def _norm(grads: list[Tensor]) -> Tensor:
    """In float32, whatever the gradients' dtype."""
    if grads[0].device.type == "cuda":
        if grads[0].dtype == torch.float32:
            return torch.nn.utils.get_total_norm(grads, foreach=True)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]
        return torch.linalg.vector_norm(torch.stack(norms))
    # The CPU's norm adds in float32 one by one: for a 4096 x 48 matrix it is off by 4e-5, more
    # than different layouts may differ. Its sum adds in pairs.
    return torch.stack([g.float().square().sum() for g in grads]).sum().sqrt()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies all gradients by `factor`, in place."""
    for grads in _gradients_by_mesh(parameters).values():
        torch._foreach_mul_(grads, factor)


def clip_factor(grad_norm: float, max_norm: float) -> float:
    """What gradients are multiplied by to bring their norm down to `max_norm`."""
    return min(1.0, max_norm / (grad_norm + 1e-6))


def _mesh_of(tensor: Tensor) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _gradients_by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[Tensor]]:
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(_mesh_of(parameter.grad), []).append(parameter.grad)
    return groups
