"""Trial runs: forward and backward of real layers of every module, timed on the devices at hand.

    trials = make_trials(recipe, torch.device("cuda"))        # on every rank that was started
    save_trials(path, trials)                                 # scripts/plan.py --trials PATH

DistTrain §3: every module is run alone, for each tensor-parallel size that the ranks allow, with
inputs of the sizes that sampled data have: at quantiles of the input size, and at sizes in between,
which tell how far linear interpolation is off. Groups of tensor-parallel ranks run at the same
time, as they do in training, where they compete for memory. A module with many layers is run twice,
with a few and with twice as many of them; the rest follows, so that no device has to hold 72 B
parameters. Weights are random, and so are ids and pixels: times do not depend on them.

What is not in these times stands elsewhere in a plan: gathering and reducing over data-parallel
ranks, messages between pipeline ranks, the optimizer. `[compile]` is left out: layers run eagerly.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from torchmm.balance.disttrain.orchestration.trials import (
    MeasuredRow,
    ModuleTrials,
    checked,
    trial_conditions,
)
from torchmm.balance.disttrain.orchestration.unit_costs import (
    TENSOR_SIZES,
    fitting_tensor_sizes,
    input_knots,
)
from torchmm.balance.measure.operators import machine
from torchmm.balance.measure.trial_inputs import encoder_inputs, generator_inputs, text_microbatch
from torchmm.balance.search.disaggregated import sampled_packs
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.common.processes import keep_freed_memory
from torchmm.costs.flops import gradients_arrive
from torchmm.costs.sizes import pack_sizes
from torchmm.models.encoders import EncoderModule
from torchmm.models.generator import GeneratorModule
from torchmm.models.initialize import init_weights
from torchmm.models.layered import LayeredModule, StageRange
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import Compilation
from torchmm.parallel.tensor.apply import apply_tensor_parallel, choose_overlap
from torchmm.planning.executions import recompute_mode
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.recipe import Recipe

ALIKE = 3
"""Packs of the same input size that are run where all have the same."""
Seconds = tuple[float, float]
"""Of forward and backward."""


class Chosen(NamedTuple):
    """Packs that are run, by what for; `units` are their input sizes."""

    knots: list[MicrobatchMeta]
    units: list[float]
    between: list[MicrobatchMeta]
    between_units: list[float]


def make_trials(
    recipe: Recipe,
    device: torch.device,
    *,
    rounds: int = 5,
    layers: int = 4,
    tensor_sizes: Sequence[int] = TENSOR_SIZES,
) -> ModuleTrials:
    """Runs every module of a recipe; collective, if there is a process group.

    Args:
        rounds: how often everything is timed; the median counts, the mean over ranks.
        layers: of a module that are run, at most; all others take what the last half of them takes.
        tensor_sizes: to be tried, as far as ranks and attention heads allow.

    Raises:
        ConfigError: the model cannot be built, or none of the data is for a module.
    """
    if rounds < 1 or layers < 2:
        raise ConfigError(f"trials: {rounds} rounds of {layers} layers; use >= 1 and >= 2")
    if device.type == "cpu":
        keep_freed_memory()
    model = recipe_model(recipe)
    modules = [module.describe() for module in model.modality_modules()]
    packs = sampled_packs(recipe, model)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    sizes = [size for size in tensor_sizes if ranks % size == 0]
    rows: dict[str, dict[int, MeasuredRow]] = {}
    for module in modules:
        chosen = choose_packs(module, packs)
        rows[module.name] = {
            size: _row(_Case(recipe, device, modules, module, size), chosen, rounds, layers)
            for size in fitting_tensor_sizes(module, sizes)
        }
    recompute = {m.name: recompute_mode(recipe, m, device.type) for m in modules}
    conditions = trial_conditions(
        modules, recipe.training.dtype, recompute, recipe.parallel.sequence_parallel
    )
    return ModuleTrials(conditions, machine(device), rows)


def choose_packs(module: ModuleDescription, packs: Sequence[MicrobatchMeta]) -> Chosen:
    """Packs at quantiles of their input size, the extremes included, and one between each two.

    Raises:
        ConfigError: none of the packs has anything for the module.
    """
    at, sizes = pack_sizes(module, packs)
    if sizes is None:
        raise ConfigError(
            f"none of {len(packs)} sampled sequences has anything for {module.name!r}; give data "
            "with images for it, or leave it out of the model"
        )
    order = np.argsort(sizes.units_N, kind="stable")
    rising = sizes.units_N[order]
    knots = input_knots(sizes.units_N).tolist()
    first = {units: packs[at[order[np.searchsorted(rising, units)]]] for units in rising.tolist()}
    if len(knots) == 1:
        alike = [packs[at[i]] for i in order[:ALIKE]]
        return Chosen(alike, knots * len(alike), [], [])
    between: list[float] = []
    for low, high in itertools.pairwise(knots):
        inside = [units for units in first if low < units < high]
        if inside:
            between.append(min(inside, key=lambda units: abs(2 * units - low - high)))
    return Chosen([first[u] for u in knots], knots, [first[u] for u in between], between)


def _row(case: _Case, chosen: Chosen, rounds: int, layers: int) -> MeasuredRow:
    """Times of all chosen packs, for the whole module."""
    packs = [*chosen.knots, *chosen.between]
    whole = len(case.module.layers)
    depths = [whole] if whole <= layers else [layers // 2, layers]
    found = [case.times(depth, packs, rounds) for depth in depths]
    seconds = found[-1]
    if len(depths) > 1:
        share = (whole - depths[1]) / (depths[1] - depths[0])
        seconds = [
            (f + share * max(0.0, f - less_f), b + share * max(0.0, b - less_b))
            for (f, b), (less_f, less_b) in zip(found[1], found[0], strict=True)
        ]
    at_knots = seconds[: len(chosen.knots)]
    at_others = seconds[len(chosen.knots) :]
    units = sorted(set(chosen.units))
    if len(units) == 1:  # all packs are alike
        at_knots = [(median(f for f, _ in at_knots), median(b for _, b in at_knots))]
    forward_s, backward_s = zip(*at_knots, strict=True)
    row = MeasuredRow(tuple(units), forward_s, backward_s)
    return checked(row, chosen.between_units, [f + b for f, b in at_others])


class _Case:
    """One module with one tensor-parallel size, on this rank."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        modules: Sequence[ModuleDescription],
        module: ModuleDescription,
        tensor: int,
    ) -> None:
        self.recipe, self.device, self.tensor = recipe, device, tensor
        self.modules, self.module = modules, module

    def times(self, depth: int, packs: Sequence[MicrobatchMeta], rounds: int) -> list[Seconds]:
        """Of each pack, with `depth` of the layers; collective."""
        model = self._build(depth)
        module = next(m for m in model.modality_modules() if m.name == self.module.name)
        runs = [self._trial(model, module, pack) for pack in packs]
        for run in runs:
            run()  # what is done for the first time takes longer
        taken = [[run() for run in runs] for _ in range(rounds)]
        found = [
            [median(seconds[side] for seconds in of_pack) for side in (0, 1)]
            for of_pack in zip(*taken, strict=True)
        ]
        if dist.is_initialized():
            means = torch.tensor(found, dtype=torch.float64, device=self.device)
            dist.all_reduce(means)
            found = (means / dist.get_world_size()).tolist()
        return [(forward, backward) for forward, backward in found]

    def _build(self, depth: int) -> MultimodalModel:
        """The model without its other modules, with random weights."""
        recipe = self.recipe
        name = self.module.name
        dtype = DTYPES[self.recipe.training.dtype]
        model = recipe_model(recipe)
        model.cut({name: [StageRange(0, depth, has_pre=True, has_post=True)]})
        module = next(m for m in model.modality_modules() if m.name == name)
        if self.tensor > 1:
            shape = (dist.get_world_size() // self.tensor, self.tensor)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("group", "tensor"))
            parallel = recipe.parallel
            overlap = None
            has_slices = "sequence" in module.tensor_parallel_plan().values()
            if has_slices:
                tokens = recipe.training.sequence_length
                overlap = choose_overlap(module, mesh["tensor"], parallel, dtype, tokens)
            apply_tensor_parallel(module, mesh["tensor"], parallel.sequence_parallel, overlap)
        mode = recompute_mode(recipe, self.module, self.device.type)
        compiles = recipe.compile.concerns(self.module, self.device.type, recipe.parallel)
        compilation = Compilation(recipe.compile.backend, falls_back=True) if compiles else None
        apply_activation_checkpoint(module, mode, compilation)
        materialize(model, self.device)
        init_weights(model, recipe.training.seed)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        return model

    def _trial(
        self, model: MultimodalModel, module: LayeredModule, pack: MicrobatchMeta
    ) -> Callable[[], Seconds]:
        """Runs forward and backward of a pack and times them."""
        arrives = gradients_arrive(self.modules, pack)[self.module.name]
        run = _forward_of(model, module, pack, self.device, arrives)
        # For a single CPU thread, the time on its core: without other programs' turns.
        alone = self.device.type == "cpu" and not dist.is_initialized()
        clock = time.process_time if alone and torch.get_num_threads() == 1 else time.perf_counter

        def now() -> float:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return clock()

        def trial() -> Seconds:
            if dist.is_initialized():
                dist.barrier()
            begin = now()
            outputs = [output for output in run() if output.requires_grad]
            middle = now()
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
            return middle - begin, (now() - middle if outputs else 0.0)

        return trial


def _forward_of(
    model: MultimodalModel,
    module: nn.Module,
    pack: MicrobatchMeta,
    device: torch.device,
    arrives: bool,
) -> Callable[[], tuple[Tensor, ...]]:
    """A forward of the module; its inputs want gradients if `arrives`."""
    dtype = next(p for p in module.parameters() if p.is_floating_point()).dtype
    if isinstance(module, EncoderModule):
        images = encoder_inputs(module, pack, device)
        return lambda: (module(images),)
    if isinstance(module, GeneratorModule):
        drawn = generator_inputs(module, pack, device)
        shape = sum(drawn.contexts), module.llm_hidden_size
        context_KD = torch.randn(shape, device=device, dtype=dtype, requires_grad=arrives)
        return lambda: (module(drawn, context_KD),)
    assert isinstance(module, LlmModule)
    microbatch = text_microbatch(model, pack, device)
    width = module.text_config.hidden_size * (1 + len(module.taps))
    features = {
        name: torch.randn(
            len(inputs.positions_K), width, device=device, dtype=dtype, requires_grad=arrives
        )
        for name, inputs in microbatch.encoders.items()
    }

    def forward() -> tuple[Tensor, ...]:
        output = module(microbatch, features)
        return output if isinstance(output, tuple) else (output,)

    return forward


def interpolation_errors(trials: ModuleTrials) -> dict[str, dict[int, tuple[float, float]]]:
    """(median, largest) of |interpolated - measured| / measured at sizes in between, by module and
    tensor-parallel size; those without such sizes are left out."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for name, rows in trials.rows.items():
        for size, row in rows.items():
            errors = [abs(error) for error in row.checked_error]
            if errors:
                found.setdefault(name, {})[size] = median(errors), max(errors)
    return found
