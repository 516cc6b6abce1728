"""Costs of units for orchestration, from the cost model at a few sizes, interpolated over the data.

DistTrain §3: a sample of the data has the input sizes, modules are timed at some of them, and a
piecewise linear function returns the times of all others. Times are those of the cost model, whose
profile may have been measured on a device (scripts/calibrate.py).

Packs of equal input size may differ in the lengths of their samples, so several of them are
averaged. The memory of packs adds up over those that wait for their backward. It is the mean for
each, and four standard deviations of the sum beyond that, so that a plan holds in all but about one
of 30,000 such windows. Temporaries are those of the largest pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Float64s
from torchmm.balance.costs.model import ELEMENT_BYTES, CostModel
from torchmm.balance.disttrain.orchestration.problem import UnitCosts
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.devices import NETWORK
from torchmm.costs.execution import FLOAT32, Execution, Recompute, States
from torchmm.costs.flops import gradients_arrive, module_flops
from torchmm.costs.layers import stage_parameters
from torchmm.costs.operators import Profile
from torchmm.costs.sizes import pack_sizes

KNOTS = 9
"""Input sizes with trials, at most."""
MOST_ALIKE = 8
"""Trials with equally many units, at most."""
TENSOR_SIZES = (1, 2, 4, 8)
SURGE_DEVIATIONS = 4
MANY_NODES = 128
"""With more nodes, a rank hardly sends more in a collective."""


class Trial(NamedTuple):
    """What a module takes for each of N packs, on one of its tensor-parallel ranks."""

    seconds_N: Float64s
    """Forward, and the backward that is needed."""
    backward_N: Float64s
    """The backward's share of these seconds."""
    kept_bytes_N: Float64s
    workspace_bytes_N: Float64s


TrialRunner = Callable[[ModuleDescription, int, Sequence[MicrobatchMeta]], Trial]
"""(module, tensor-parallel size, packs that all have something for it) -> what they take."""


def cost_model_run(
    profile: Profile,
    dtype: str,
    modules: Sequence[ModuleDescription],
    *,
    sequence_parallel: bool = False,
    async_tensor: bool = False,
    recompute: Mapping[str, Recompute] | None = None,
    compiled: frozenset[str] = frozenset(),
) -> TrialRunner:
    """Trials that a cost model answers.

    Args:
        modules: all of them: which gradients one needs depends on what is trained before it.
        recompute: activation checkpointing by module name.
        compiled: Names of modules whose layers are compiled.

    Raises:
        ValueError: the device has no peak for the dtype.
    """
    CostModel(profile, dtype)

    def run(module: ModuleDescription, tensor: int, packs: Sequence[MicrobatchMeta]) -> Trial:
        execution = Execution(
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            async_tensor=async_tensor and tensor > 1,
            recompute=(recompute or {}).get(module.name, "none"),
            compiled=module.name in compiled,
        )
        model = CostModel(profile, dtype, {module.name: execution})
        sizes = pack_sizes(module, packs)[1]
        assert sizes is not None
        arrives_N = np.array([gradients_arrive(modules, p)[module.name] for p in packs], bool)
        costs = model.stage_costs(module, 0, len(module.layers), sizes, arrives_N)
        backward_N = costs.backward.total_ms / 1e3
        return Trial(
            costs.forward.total_ms / 1e3 + backward_N,
            backward_N,
            costs.kept_bytes,
            costs.workspace_bytes,
        )

    return run


def fitting_tensor_sizes(module: ModuleDescription, sizes: Sequence[int]) -> list[int]:
    """Those into which attention heads can be split: ranks may share a key-value head."""
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
    profile: Profile,
    dtype: str,
    run: TrialRunner,
    tensor_sizes: Sequence[int] = TENSOR_SIZES,
    states: States = FLOAT32,
) -> tuple[UnitCosts, ...]:
    """Return the costs of each module for an average pack; memory is that of the largest.

    Args:
        modules: Encoders, LLM and generator, complete.
        packs: A sample of the data, each sequence as a separate microbatch.
        profile: Profile of the devices, for links.
        dtype: Dtype in which modules compute.
        run: Times modules.
        tensor_sizes: Tensor-parallel sizes; those that do not divide the heads of a module are left
            out.
        states: States of parameters.

    Raises:
        ValueError: None of the packs has anything for a module.
    """
    element_bytes = ELEMENT_BYTES[dtype]
    units = []
    for module in modules:
        fitting = fitting_tensor_sizes(module, tensor_sizes)
        found = _profile_module(module, packs, run, fitting)
        parameters = stage_parameters(module, 0, len(module.layers), states=states)
        # Encoders' last messages are the widest; what LLMs send beside hidden states ends after a
        # few layers.
        width = module.layers[0].hidden_size * (1 + len(module.taps) * (module.kind == "encoder"))
        sent_bytes = element_bytes * width * float(found.units_N.mean())
        # Gathering all weights and reducing all gradients is that of many shards.
        shards = MANY_NODES * profile.device.devices_per_node
        model = CostModel(profile, dtype, {module.name: Execution(shard=shards)})
        layers = len(module.layers)
        sync_ms = model.gather_ms(module, 0, layers) + model.reduce_ms(module, 0, layers)
        unit = UnitCosts(
            module.name,
            module.kind,
            layers,
            {n: float(seconds_N.mean()) for n, seconds_N in found.seconds.items()},
            {n: float(kept_N.mean()) for n, kept_N in found.kept_bytes.items()},
            unevenness=float(found.seconds[fitting[0]].std() / found.seconds[fitting[0]].mean()),
            replica_bytes=element_bytes * parameters.all + parameters.gradient_bytes,
            sharded_bytes=parameters.weight_bytes + parameters.optimizer_bytes,
            surge_bytes={
                n: SURGE_DEVIATIONS * float(kept_N.std()) for n, kept_N in found.kept_bytes.items()
            },
            peak_bytes={n: float(kept_N.max()) for n, kept_N in found.kept_bytes.items()},
            workspace_bytes=found.workspace_bytes,
            transfer_s=model.transfers_ms([sent_bytes], [NETWORK])[0] / 1e3,
            sync_s=sync_ms / 1e3,
            has_backward=found.has_backward,
            flops=float(module_flops(modules, module, packs).mean()),
        )
        units.append(unit)
    return tuple(units)


class _PackCosts(NamedTuple):
    """Costs of a module for all packs, by tensor-parallel size; 0 for packs without input."""

    units_N: Float64s
    seconds: dict[int, Float64s]
    kept_bytes: dict[int, Float64s]
    workspace_bytes: dict[int, float]
    """Of the largest pack that was timed."""
    has_backward: bool


def _profile_module(
    module: ModuleDescription,
    packs: Sequence[MicrobatchMeta],
    run: TrialRunner,
    tensor_sizes: Sequence[int],
) -> _PackCosts:
    """Time packs at quantiles of the input size, and interpolate the others.

    Raises:
        ValueError: None of the packs has anything for the module.
    """
    at, sizes = pack_sizes(module, packs)
    if sizes is None:
        raise ValueError(
            f"none of {len(packs)} sampled sequences contains data for {module.name!r}; use "
            "data with images for it, or remove it from the model"
        )
    rising = np.sort(sizes.units_N)
    units_X = np.unique(rising[np.linspace(0, len(rising) - 1, KNOTS).astype(int)])
    chosen = [np.flatnonzero(sizes.units_N == units)[:MOST_ALIKE] for units in units_X]
    tried = [packs[at[i]] for own in chosen for i in own]
    stops = np.cumsum([len(own) for own in chosen])[:-1]
    units_N = np.zeros(len(packs))
    units_N[at] = sizes.units_N

    def interpolate(values_N: Float64s) -> Float64s:
        means_X = [part.mean() for part in np.split(values_N, stops)]
        return np.where(units_N > 0, np.interp(units_N, units_X, means_X), 0.0)

    trials = {n: run(module, n, tried) for n in tensor_sizes}
    return _PackCosts(
        units_N,
        {n: interpolate(trial.seconds_N) for n, trial in trials.items()},
        {n: interpolate(trial.kept_bytes_N) for n, trial in trials.items()},
        {n: float(trial.workspace_bytes_N.max()) for n, trial in trials.items()},
        bool(trials[tensor_sizes[0]].backward_N.any()),
    )
