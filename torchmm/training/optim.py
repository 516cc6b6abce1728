"""The optimizer, its parameter groups, the learning rate and the global gradient norm.

Optimizers (`optimizers/optimizer.py`) read the clipping factor and the check for non-finite values
from device scalars (`grad_scale`, `found_inf`, as with `torch.amp.GradScaler`). The update is
therefore queued before the host reads the gradient norm, and a step with non-finite values changes
nothing.

The learning rate is a pure function of the step, so no scheduler state is saved. Parameters are
grouped by module, by weight decay, and by device mesh (Muon gathers matrices over one mesh).

In a pipeline, each rank optimizes its stages. A tied embedding has a replica in the last stage with
a separate optimizer state. The replica and the original have identical initial values, gradients
and settings, so they stay bitwise identical. The gradient norm includes only the original.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchmm.models.hf.load import local_slices
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.gather import gather_texts
from torchmm.parallel.mesh import ParallelMesh
from torchmm.recipe.training_section import OptimizerConfig
from torchmm.training.checkpoint.state import parameter_names
from torchmm.training.optimizers.optimizer import RunOptimizer, find_optimizer, local_gradients
from torchmm.training.optimizers.weight_average import WeightAverage

_EPSILON = 1e-6
"""Added to the gradient norm before the division, as in `torch.nn.utils.clip_grad_norm_`."""


def build_optimizer(
    model: nn.Module,
    module_of: Callable[[str], str],
    config: OptimizerConfig,
    copies: Collection[nn.Parameter] = (),
    matrices: Collection[nn.Parameter] = (),
    dtype: torch.dtype = torch.float32,
) -> RunOptimizer:
    """Return the optimizer of the trainable parameters of `model`, of which a rank may have none.

    Args:
        model: Model with the stages of this rank.
        module_of: Function from parameter names to module names ("llm", "NAME", "NAME.connector").
        config: Section [optimizer] of the recipe.
        copies: Weights without weight decay like embeddings: replicas of the embedding of another
            rank, and heads of which only some rows are trained.
        matrices: Matrices of layers, which Muon updates.
        dtype: Compute dtype of the modules.
    """
    groups: dict[tuple, dict[str, Any]] = {}
    matrix_ids = {id(matrix) for matrix in matrices}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    embeddings |= {id(copy) for copy in copies}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        module = module_of(name)
        decays = parameter.ndim > 1 and id(parameter) not in embeddings
        rule = config.name if id(parameter) in matrix_ids else "adamw"
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
    empty_group = {"params": [], "module": "", "lr": config.lr, "peak_lr": config.lr}
    param_groups = list(groups.values()) or [empty_group]
    is_narrow = any(p.dtype != torch.float32 for group in param_groups for p in group["params"])
    make: Callable[..., RunOptimizer] = find_optimizer(config, is_narrow=is_narrow)
    return make(param_groups, config, parameter_names(model), dtype)


class OptimizerUpdate:
    """The update of a step: gradient norm, clipping, learning rate, optimizer, weight average.

    Construction is collective. `measure` and `apply` queue work on the device and do not wait for
    it. Call `finish` after the host has checked the numbers of the step.

    Args:
        steps: Number of steps of the run.
        average: Moving average of the weights, or None.
    """

    def __init__(
        self,
        model: MultimodalModel,
        optimizer: RunOptimizer,
        mesh: ParallelMesh,
        config: OptimizerConfig,
        steps: int,
        average: WeightAverage | None = None,
    ) -> None:
        self._average = average
        self._optimizer, self._mesh, self._config, self._steps = optimizer, mesh, config, steps
        self._groups = group_by_replicas(model)
        self._frozen_rows = frozen_token_rows(model)

    def measure(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the global gradient norm, a float32 scalar, and prepare the update. Collective.

        Sets the clipping factor of the optimizer. If a loss or the norm of any rank is not finite,
        the update changes nothing on all ranks.

        Args:
            losses: Scalars of this rank that must be finite.
        """
        for parameter, is_frozen_V1 in self._frozen_rows:
            if parameter.grad is not None:
                local_gradients([parameter])[0].masked_fill_(is_frozen_V1, 0.0)
        # Zero times a non-finite number is NaN, and so is every sum with NaN.
        zero = torch.stack([*losses]).mul(0).sum()
        totals = self._mesh.sum_over_ranks(torch.stack([squared_norm(self._groups, zero), zero]))
        norm = totals[0].sqrt()
        rounded = norm.float()
        scale = ((norm + _EPSILON) / self._config.max_grad_norm).clamp(min=1.0)
        self._optimizer.grad_scale = scale.float()
        self._optimizer.found_inf = (rounded * 0 + totals[1]).ne(0).float()
        return rounded

    def apply(self, step: int) -> float:
        """Apply the update of `step` (1-based) asynchronously and return its learning rate."""
        factor = lr_factor(step, self._steps, self._config)
        set_learning_rate(self._optimizer, factor)
        self._optimizer.step()
        return self._config.lr * factor

    def finish(self) -> None:
        """Free the gradients and update the weight average, after an update of finite numbers."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._average is not None:
            self._average.update()


def lr_factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step `step` (1-based) of `steps`, relative to the peak."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    floor = config.min_lr_ratio
    if config.lr_schedule == "wsd":
        decay_steps = max(1, round(config.decay_fraction * steps))
        return max(floor, min(1.0, floor + (1 - floor) * (steps - step) / decay_steps))
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def describe_schedule_change(
    step: int, saved_steps: int, steps: int, config: OptimizerConfig
) -> str | None:
    """Return how a changed `training.steps` affects the learning rate of a resumed run.

    Args:
        step: Last finished step.
        saved_steps: `training.steps` of the run that saved the checkpoint.
        steps: `training.steps` of this run.
        config: Section [optimizer] of the recipe.

    Returns:
        A message, or None if the learning rate of the next step does not change.
    """
    planned, changed = (lr_factor(step + 1, total, config) for total in (saved_steps, steps))
    if step >= steps or math.isclose(planned, changed, rel_tol=1e-9):
        return None
    last = config.lr * lr_factor(step, saved_steps, config)
    return (
        f"training.steps {saved_steps} -> {steps} changes the {config.lr_schedule!r} learning "
        "rate schedule, which depends on the number of steps: the learning rate changes from "
        f"{last:.3e} in step {step} to {config.lr * changed:.3e} in step {step + 1}. To keep "
        'it constant, set optimizer.lr_schedule = "constant" and optimizer.lr to the last '
        "learning rate"
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def frozen_token_rows(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the embedding and the head of this rank if only some of their rows are trained.

    Rows without gradients and without weight decay keep their values.

    Returns:
        Pairs of a parameter and the flags (V, 1) of its local rows that are frozen.
    """
    pairs = []
    for llm in model.modules():
        if not isinstance(llm, LlmModule):
            continue
        for parameter in (p for n, p in llm.named_parameters() if n in llm.token_weights):
            rows = local_slices(parameter)[0]
            ids = [i - rows.start for i in llm.trained_token_ids if rows.start <= i < rows.stop]
            is_frozen_V1 = torch.ones(rows.stop - rows.start, 1, dtype=torch.bool)
            is_frozen_V1[ids] = False
            pairs.append((parameter, is_frozen_V1.to(parameter.device)))
    return pairs


ParametersByReplicas = Mapping[int, Sequence[nn.Parameter]]
"""Maps the number of ranks that store the same elements to parameters."""


def global_grad_norm(groups: ParametersByReplicas, mesh: ParallelMesh | None = None) -> Tensor:
    """Return the Euclidean norm of all gradients of all ranks, a float32 scalar; collective.

    Args:
        groups: Parameters of this rank, see `group_by_replicas`.
        mesh: All ranks, or None if this process has all parameters.
    """
    zero = torch.zeros((), device=None if mesh is None else mesh.device)
    square = squared_norm(groups, zero)
    return (square if mesh is None else mesh.sum_over_ranks(square)).sqrt().float()


def group_by_replicas(model: MultimodalModel) -> dict[int, list[nn.Parameter]]:
    """Group trainable parameters by the number of ranks that store the same elements. Collective.

    Replicas of tied parameters of another rank are omitted, because that rank counts them.
    """
    names = parameter_names(model)
    counted = {id(p) for p in model.parameters() if p.requires_grad}
    counted -= {id(copy) for copy in model.tied_replica_parameters()}
    stages: dict[str, list[nn.Parameter]] = {}
    for stage in model.all_stages():
        local = [p for p in stage.parameters() if id(p) in counted]
        counted -= {id(p) for p in local}
        if local:
            stages[names[id(local[0])]] = local
    assert not counted, "a trainable parameter is not in any stage"
    # A stage is on all ranks that have its first parameter, as a shard or as a replica.
    ranks = Counter(name for text in gather_texts("\n".join(stages)) for name in text.split("\n"))
    groups: dict[int, list[nn.Parameter]] = {}
    for name, local in stages.items():
        for parameter in local:
            groups.setdefault(ranks[name] // _count_shards(parameter), []).append(parameter)
    return groups


def _count_shards(parameter: nn.Parameter) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    dimensions = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in dimensions if not placement.is_replicate())


@torch.no_grad()
def squared_norm(groups: ParametersByReplicas, zero: Tensor) -> Tensor:
    """Return the contribution of this rank to the squared global gradient norm, a float64 scalar.

    Args:
        groups: Parameters of this rank. Each replica contributes an equal part.
        zero: A scalar on the device of this rank.
    """
    total = zero.double()
    for replicas, parameters in groups.items():
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in local_gradients([p for p in parameters if p.grad is not None]):
            if gradient.numel():  # on CUDA, the norm of an empty tensor may be uninitialized
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            total = total + _squared_norms(gradients).sum() / replicas
    return total


def _squared_norms(gradients: list[Tensor]) -> Tensor:
    """Return the squared norm of each gradient in float64, computed from float32 sums."""
    if gradients[0].device.type == "cuda":
        norms = torch._foreach_norm(gradients, dtype=torch.float32)
        return torch.stack(norms).double().square()
    # On the CPU, norms accumulate sequentially: in float32, the norm of a 4096 x 48 matrix has a
    # relative error of 4e-5. Sums are pairwise and therefore more accurate.
    return torch.stack([g.float().square().sum() for g in gradients]).double()


def _mesh_of(tensor: Tensor) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None
