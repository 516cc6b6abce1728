"""Unit costs for orchestration: cost model results at a few input sizes, with interpolation.

DistTrain §3 profiles modules at several input sizes of a data sample. A piecewise linear function
then returns the times of all other sizes. The times come from the cost model. Its profile can be
measured on a device (scripts/calibrate.py).

    seconds          x knot: mean of up to 8 packs of this input size
       |        ___x
       |   _x---
       |  x                      at most 9 knots, at quantiles of the input sizes
       +-----------------> input size (units)

Packs with the same input size can differ in the lengths of their samples, so several packs are
averaged. Activation memory is the sum over the microbatches in flight: the mean per microbatch,
plus four standard deviations of the sum. A plan then fits in all but about one of 30,000 such sums.
Temporary memory is that of the largest pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchmm.balance.costs.model import ELEMENT_BYTES, CostModel
from torchmm.balance.disttrain.orchestration.problem import UnitCosts
from torchmm.balance.numba_utils import Float64s
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.devices import BETWEEN_NODES
from torchmm.costs.execution import FLOAT32, Execution, ParameterStates, RecomputeSetting
from torchmm.costs.flops import module_flops, modules_with_trained_sources
from torchmm.costs.layers import stage_parameters
from torchmm.costs.operators import DeviceProfile
from torchmm.costs.sizes import sequence_sizes

MAX_KNOTS = 9
"""Maximum number of input sizes that are profiled."""
MAX_PACKS_PER_KNOT = 8
"""Maximum number of profiled packs with the same input size."""
TENSOR_SIZES = (1, 2, 4, 8)
ACTIVATION_MARGIN_DEVIATIONS = 4
MANY_NODES = 128
"""Number of nodes from which the bytes of a collective per rank are almost constant."""


class ModuleCosts(NamedTuple):
    """Costs of a module for each of N packs, on one tensor-parallel rank."""

    seconds_N: Float64s
    """Seconds of the forward pass and the required backward pass."""
    backward_N: Float64s
    """Seconds of the backward pass, included in `seconds_N`."""
    kept_bytes_N: Float64s
    workspace_bytes_N: Float64s


ModuleCostFunction = Callable[[ModuleDescription, int, Sequence[MicrobatchMeta]], ModuleCosts]
"""Function from (module, tensor-parallel size, packs with input for the module) to costs."""


def module_cost_function(
    profile: DeviceProfile,
    dtype: str,
    modules: Sequence[ModuleDescription],
    *,
    sequence_parallel: bool = False,
    async_tensor: bool = False,
    recompute: Mapping[str, RecomputeSetting] | None = None,
    compiled: frozenset[str] = frozenset(),
) -> ModuleCostFunction:
    """Return a runner that computes costs with a cost model.

    Args:
        profile: Profile of the devices.
        dtype: Dtype in which modules compute.
        modules: All modules. Trainable modules before a module determine the gradients that it
            needs.
        sequence_parallel: Whether tensor-parallel ranks split activations by tokens between
            matmuls.
        async_tensor: Whether tensor-parallel communication overlaps with matmuls.
        recompute: Activation checkpointing by module name.
        compiled: Names of modules with compiled layers.

    Raises:
        ValueError: The profile has no peak throughput for the dtype.
    """
    CostModel(profile, dtype)

    def run(module: ModuleDescription, tensor: int, packs: Sequence[MicrobatchMeta]) -> ModuleCosts:
        execution = Execution(
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            async_tensor=async_tensor and tensor > 1,
            recompute=(recompute or {}).get(module.name, "none"),
            compiled=module.name in compiled,
        )
        model = CostModel(profile, dtype, {module.name: execution})
        sizes = sequence_sizes(module, packs)[1]
        assert sizes is not None
        needs_input_grad_N = np.array(
            [modules_with_trained_sources(modules, p)[module.name] for p in packs], bool
        )
        costs = model.stage_costs(module, 0, len(module.layers), sizes, needs_input_grad_N)
        backward_N = costs.backward.total_ms / 1e3
        return ModuleCosts(
            costs.forward.total_ms / 1e3 + backward_N,
            backward_N,
            costs.saved_bytes,
            costs.workspace_bytes,
        )

    return run


def fitting_tensor_sizes(module: ModuleDescription, sizes: Sequence[int]) -> list[int]:
    """Return the tensor-parallel sizes into which the attention heads of a module can be split.

    Ranks may share a key-value head.
    """
    layers = set(module.layers)
    return [
        size
        for size in sizes
        if all(n.heads % size == 0 for n in layers)
        and all(n.kv_heads % size == 0 or size % n.kv_heads == 0 for n in layers)
    ]


def profile_units(
    modules: Sequence[ModuleDescription],
    packs: Sequence[MicrobatchMeta],
    profile: DeviceProfile,
    dtype: str,
    run: ModuleCostFunction,
    tensor_sizes: Sequence[int] = TENSOR_SIZES,
    states: ParameterStates = FLOAT32,
) -> tuple[UnitCosts, ...]:
    """Return the costs of each module for an average pack, with the memory of the largest pack.

    Args:
        modules: Encoders, LLM and generator with all layers.
        packs: Data sample, with each sequence as a separate microbatch.
        profile: Profile of the devices, for links.
        dtype: Dtype in which modules compute.
        run: Returns the costs of a module.
        tensor_sizes: Tensor-parallel sizes. Sizes that do not divide the heads of a module are
            skipped.
        states: Dtypes of parameters, gradients and optimizer states.

    Raises:
        ValueError: No pack has input for a module.
    """
    element_bytes = ELEMENT_BYTES[dtype]
    units = []
    for module in modules:
        fitting = fitting_tensor_sizes(module, tensor_sizes)
        costs = _profile_module(module, packs, run, fitting)
        parameters = stage_parameters(module, 0, len(module.layers), states=states)
        # The last message of an encoder is the widest, because it includes DeepStack features. An
        # LLM forwards these features only to its first layers.
        width = module.layers[0].hidden_size * (
            1 + len(module.deepstack_layers) * (module.kind == "encoder")
        )
        sent_bytes = element_bytes * width * float(costs.units_N.mean())
        # Assume many shards for the all-gather of weights and the reduction of gradients.
        shards = MANY_NODES * profile.device.devices_per_node
        model = CostModel(profile, dtype, {module.name: Execution(shard=shards)})
        layers = len(module.layers)
        sync_ms = model.gather_ms(module, 0, layers) + model.reduce_ms(module, 0, layers)
        unit = UnitCosts(
            module.name,
            module.kind,
            layers,
            {n: float(seconds_N.mean()) for n, seconds_N in costs.seconds.items()},
            {n: float(kept_N.mean()) for n, kept_N in costs.saved_bytes.items()},
            relative_std=float(costs.seconds[fitting[0]].std() / costs.seconds[fitting[0]].mean()),
            replica_bytes=parameters.compute_bytes(element_bytes) + parameters.gradient_bytes,
            sharded_bytes=parameters.weight_bytes + parameters.optimizer_bytes,
            activation_margin_bytes={
                n: ACTIVATION_MARGIN_DEVIATIONS * float(kept_N.std())
                for n, kept_N in costs.saved_bytes.items()
            },
            max_activation_bytes={
                n: float(kept_N.max()) for n, kept_N in costs.saved_bytes.items()
            },
            workspace_bytes=costs.workspace_bytes,
            transfer_s=model.transfer_times_ms([sent_bytes], [BETWEEN_NODES])[0] / 1e3,
            grad_sync_s=sync_ms / 1e3,
            has_backward=costs.has_backward,
            flops=float(module_flops(modules, module, packs).mean()),
        )
        units.append(unit)
    return tuple(units)


class _PackCosts(NamedTuple):
    """Costs of a module for all packs, by tensor-parallel size. 0 for packs without input."""

    units_N: Float64s
    seconds: dict[int, Float64s]
    saved_bytes: dict[int, Float64s]
    workspace_bytes: dict[int, float]
    """Temporary memory of the largest profiled pack."""
    has_backward: bool


def _profile_module(
    module: ModuleDescription,
    packs: Sequence[MicrobatchMeta],
    run: ModuleCostFunction,
    tensor_sizes: Sequence[int],
) -> _PackCosts:
    """Profile packs at quantiles of the input size, and interpolate the remaining packs.

    Raises:
        ValueError: No pack has input for the module.
    """
    indices_with_input, sizes = sequence_sizes(module, packs)
    if sizes is None:
        raise ValueError(
            f"none of {len(packs)} sampled sequences contains data for {module.name!r}; use "
            "data with images for it, or remove it from the model"
        )
    rising = np.sort(sizes.units_N)
    units_X = np.unique(rising[np.linspace(0, len(rising) - 1, MAX_KNOTS).astype(int)])
    knot_indices = [
        np.flatnonzero(sizes.units_N == units)[:MAX_PACKS_PER_KNOT] for units in units_X
    ]
    profiled = [packs[indices_with_input[i]] for indices in knot_indices for i in indices]
    stops = np.cumsum([len(indices) for indices in knot_indices])[:-1]
    units_N = np.zeros(len(packs))
    units_N[indices_with_input] = sizes.units_N

    def interpolate(values_N: Float64s) -> Float64s:
        means_X = [values.mean() for values in np.split(values_N, stops)]
        return np.where(units_N > 0, np.interp(units_N, units_X, means_X), 0.0)

    trials = {n: run(module, n, profiled) for n in tensor_sizes}
    return _PackCosts(
        units_N,
        {n: interpolate(trial.seconds_N) for n, trial in trials.items()},
        {n: interpolate(trial.kept_bytes_N) for n, trial in trials.items()},
        {n: float(trial.workspace_bytes_N.max()) for n, trial in trials.items()},
        bool(trials[tensor_sizes[0]].backward_N.any()),
    )
