"""Costs of units for orchestration: trials at a few sizes, interpolated over sampled data.

DistTrain §3: a sample of the data shows which input sizes there are, trials are run at some of
them, and a piecewise linear function gives all others. A trial is anything that says what a module
takes for some packs with a tensor-parallel size. Without devices that is a cost model, whose
profile may have been measured on one of them (scripts/calibrate.py); where devices exist, it may
run the module. Tensor-parallel sizes without trials lie between those that have some: linearly in
the seconds over the logarithm of the size.

Packs with equally many units may differ (in the lengths of their samples), so trials with several
of them are averaged. What packs keep in memory adds up over those that wait for
their backward: the mean for each, and four standard deviations of the sum beyond that, so that a
plan holds in all but about one of 30,000 such windows; temporaries are those of the largest pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
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
"""So many that what a collective sends hardly depends on their number."""


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


@dataclass(frozen=True)
class ModuleProfile:
    """What a module takes, as a function of tensor-parallel size and units of input.

    Attributes:
        tensor_T: sizes with trials, rising.
        units_X: input sizes with trials, rising.
        seconds_TX, kept_bytes_TX: of a pack.
        workspace_bytes_T: of the largest.
        has_backward: whether any was needed.
    """

    tensor_T: tuple[int, ...]
    units_X: Float64s
    seconds_TX: Float64s
    kept_bytes_TX: Float64s
    workspace_bytes_T: tuple[float, ...]
    has_backward: bool

    def seconds(self, tensor: int, units_N: Float64s) -> Float64s:
        """Seconds of packs with these numbers of units; 0 for those without any.

        Raises:
            ValueError: the tensor-parallel size is outside of those with trials.
        """
        return self._interpolate(self.seconds_TX, tensor, units_N)

    def kept_bytes(self, tensor: int, units_N: Float64s) -> Float64s:
        """The same of memory between forward and backward."""
        return self._interpolate(self.kept_bytes_TX, tensor, units_N)

    def _interpolate(self, values_TX: Float64s, tensor: int, units_N: Float64s) -> Float64s:
        if not self.tensor_T[0] <= tensor <= self.tensor_T[-1]:
            raise ValueError(f"tensor = {tensor}: trials were made with {list(self.tensor_T)}")
        at = [log2(size) for size in self.tensor_T]
        rows = [np.interp(log2(tensor), at, column) for column in values_TX.T]
        return np.where(units_N > 0, np.interp(units_N, self.units_X, rows), 0.0)


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


def input_knots(units_N: Float64s) -> Float64s:
    """Input sizes at which to make trials, rising: quantiles, the extremes included."""
    rising = np.sort(units_N)
    return np.unique(rising[np.linspace(0, len(rising) - 1, KNOTS).astype(int)])


def profile_module(
    module: ModuleDescription,
    packs: Sequence[MicrobatchMeta],
    units_N: Float64s,
    run: TrialRunner,
    tensor_sizes: Sequence[int],
) -> ModuleProfile:
    """Trials of a module with packs of the sizes of `input_knots`.

    Args:
        packs: that have something for it.
        units_N: their input sizes.
    """
    units_X = input_knots(units_N)
    chosen = [np.flatnonzero(units_N == units)[:MOST_ALIKE] for units in units_X]
    tried = [packs[i] for own in chosen for i in own]
    stops = np.cumsum([len(own) for own in chosen])[:-1]

    def means(values_N: Float64s) -> Float64s:
        return np.array([part.mean() for part in np.split(values_N, stops)])

    trials = [run(module, size, tried) for size in tensor_sizes]
    return ModuleProfile(
        tuple(tensor_sizes),
        units_X,
        np.stack([means(trial.seconds_N) for trial in trials]),
        np.stack([means(trial.kept_bytes_N) for trial in trials]),
        tuple(float(trial.workspace_bytes_N.max()) for trial in trials),
        bool(trials[0].backward_N.any()),
    )


@dataclass(frozen=True)
class Profiler:
    """Makes trials and turns them into costs of units.

    Attributes:
        modules: encoders, LLM and generator, whole.
        packs: a sample of the data, each sequence as a microbatch of its own.
        profile: of the devices, for links.
        dtype: in which modules compute.
        run: makes trials.
        tensor_sizes: with trials; those that a module's heads cannot be split into are left out.
        states: of parameters.
    """

    modules: Sequence[ModuleDescription]
    packs: Sequence[MicrobatchMeta]
    profile: Profile
    dtype: str
    run: TrialRunner
    tensor_sizes: Sequence[int] = TENSOR_SIZES
    states: States = FLOAT32

    def units(self) -> tuple[UnitCosts, ...]:
        """Costs of all modules.

        Raises:
            ValueError: a module has nothing to do in any of the packs.
        """
        return tuple(self.unit(module) for module in self.modules)

    def unit(self, module: ModuleDescription) -> UnitCosts:
        """Costs of one module, of an average pack; memory is that of the largest.

        Raises:
            ValueError: none of the packs has anything for it.
        """
        at, sizes = pack_sizes(module, self.packs)
        if sizes is None:
            raise ValueError(
                f"none of {len(self.packs)} sampled sequences has anything for {module.name!r}; "
                "give data with images for it, or leave it out of the model"
            )
        fitting = fitting_tensor_sizes(module, self.tensor_sizes)
        found = profile_module(
            module, [self.packs[i] for i in at], sizes.units_N, self.run, fitting
        )
        units_N = np.zeros(len(self.packs))
        units_N[at] = sizes.units_N
        kept = {n: found.kept_bytes(n, units_N) for n in fitting}
        seconds_N = found.seconds(fitting[0], units_N)
        parameters = stage_parameters(module, 0, len(module.layers), states=self.states)
        element_bytes = ELEMENT_BYTES[self.dtype]
        # Encoders' last messages are the widest; what LLMs send beside hidden states ends after a
        # few layers.
        width = module.layers[0].hidden_size * (1 + len(module.taps) * (module.kind == "encoder"))
        sent_bytes = element_bytes * width * float(units_N.mean())
        transfer_s, sync_s = self._network_s(module, sent_bytes)
        return UnitCosts(
            module.name,
            module.kind,
            len(module.layers),
            {n: float(found.seconds(n, units_N).mean()) for n in fitting},
            {n: float(kept[n].mean()) for n in fitting},
            unevenness=float(seconds_N.std() / seconds_N.mean()),
            replica_bytes=element_bytes * parameters.all + parameters.gradient_bytes,
            sharded_bytes=parameters.weight_bytes + parameters.optimizer_bytes,
            surge_bytes={n: SURGE_DEVIATIONS * float(kept[n].std()) for n in fitting},
            peak_bytes={n: float(kept[n].max()) for n in fitting},
            workspace_bytes=dict(zip(fitting, found.workspace_bytes_T, strict=True)),
            transfer_s=transfer_s,
            sync_s=sync_s,
            has_backward=found.has_backward,
            flops=float(module_flops(self.modules, module, self.packs).mean()),
        )

    def _network_s(self, module: ModuleDescription, sent_bytes: float) -> tuple[float, float]:
        """Sending that much; gathering all weights and reducing all gradients, of many shards."""
        shards = MANY_NODES * self.profile.device.devices_per_node
        model = CostModel(self.profile, self.dtype, {module.name: Execution(shard=shards)})
        layers = len(module.layers)
        sync_ms = model.gather_ms(module, 0, layers) + model.reduce_ms(module, 0, layers)
        return model.transfers_ms([sent_bytes], [NETWORK])[0] / 1e3, sync_ms / 1e3
