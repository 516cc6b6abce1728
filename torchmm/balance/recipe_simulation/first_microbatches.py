"""Microbatches of the first step of simulations: sampled, or with the sizes of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from itertools import count as count_from
from typing import NamedTuple

import numpy as np

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import PeerMicrobatches
from torchmm.balance.simulation.section import SimulationConfig, sizes_vary
from torchmm.balance.simulation.workload import sample_microbatches
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.costs.flops import step_flops
from torchmm.costs.sizes import module_tasks, text_tokens
from torchmm.data.steps.balanced_packing import FILLED_SEQUENCES, BalancedPacker
from torchmm.data.tokenizer import load_tokenizer
from torchmm.models.multimodal import MultimodalModel
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.planning.first_step import read_first_step
from torchmm.recipe.recipe import Recipe


class Workload(NamedTuple):
    """Microbatches of the data-parallel rank with the most work.

    If ranks run layers in lockstep, microbatch i is the slowest of the microbatches i of the
    slowest group.
    """

    microbatches: list[MicrobatchMeta]
    mean_flops_fraction: float
    """FLOPs of the mean data-parallel rank as a fraction of those of `microbatches`, 0..1."""
    peers: PeerMicrobatches = ()
    """Microbatches of every rank of the group that runs layers in lockstep, rank by rank."""


def first_microbatches(
    recipe: Recipe, model: MultimodalModel, shares: int
) -> list[list[MicrobatchMeta]]:
    """Return the microbatches of the first step by share of the global batch.

    They have the sizes of the data, or of [simulation] if the recipe has no data.

    Raises:
        ConfigError: The sizes of the data are unknown, or an encoder does not support the sizes.
    """
    training = recipe.training
    per_rank = training.global_batch_size // (shares * training.microbatch_size)
    if not recipe.data.sources:
        _check_sizes(recipe, model)
        metas = simulated_microbatches(recipe, shares * per_rank)
        return [metas[rank * per_rank :][:per_rank] for rank in range(shares)]
    shares_of_step = read_first_step(recipe, model, load_tokenizer(recipe.model), shares)
    if not shares_of_step:
        raise ConfigError("data.sources: sample sizes of a stream are unknown; use [simulation]")
    return shares_of_step


def describe_samples(recipe: Recipe) -> str:
    """Return the source of the samples of a simulated step."""
    if recipe.data.sources:
        return "first step of [[data.sources]]"
    return "described in [simulation], not your data"


def simulated_microbatches(recipe: Recipe, count: int) -> list[MicrobatchMeta]:
    """Return the first microbatches of a recipe whose data are statistics.

    With `data.packing` = "balanced", samples are packed into sequences as in the data loader.
    """
    size = recipe.training.microbatch_size
    length = recipe.training.sequence_length
    if recipe.data.packing == "best_fit":
        return sample_microbatches(
            SimulationConfig.from_parent(recipe),
            count,
            sequence_length=length,
            microbatch_size=size,
        )
    samples = (
        sample
        for first in count_from(step=FILLED_SEQUENCES)
        for sequence in sample_microbatches(
            SimulationConfig.from_parent(recipe),
            FILLED_SEQUENCES,
            sequence_length=length,
            first=first,
        )
        for sample in sequence.samples
    )
    packed = pack_balanced_sequences(samples, length, recipe.data.max_tiles_per_sequence)
    sequences = list(islice(packed, count * size))
    return [
        MicrobatchMeta(tuple(chain(*sequences[first : first + size])), size * length)
        for first in range(0, count * size, size)
    ]


def pack_balanced_sequences(
    samples: Iterator[SampleMeta], sequence_length: int, max_tiles: int | None = None
) -> Iterator[list[SampleMeta]]:
    """Yield the samples of each sequence with `data.packing` = "balanced".

    Args:
        samples: Samples in sampling order. The last samples are omitted if they do not fill
            sequences.
        sequence_length: Tokens of a sequence.
        max_tiles: Maximum number of images and tiles of a sequence.
    """
    packer = BalancedPacker(sequence_length, max_tiles)
    members: dict[int, list[SampleMeta]] = {}
    while True:
        missing = packer.missing_tokens
        group = []
        while missing > 0:
            if (sample := next(samples, None)) is None:
                return
            group.append(sample)
            missing -= sample.tokens
        sizes = [(sample.tokens, sample.tiles, sample.patches) for sample in group]
        packs = packer.fill(*np.array(sizes, np.int64).T).tolist()
        for pack, sample in zip(packs, group, strict=True):
            members.setdefault(pack, []).append(sample)
        while packer.closed:
            yield members.pop(packer.closed.popleft())


def _check_sizes(recipe: Recipe, model: MultimodalModel) -> None:
    """Raise if simulated images have several sizes and their encoder resizes all images.

    Raises:
        ConfigError: An encoder resizes all images to one size.
    """
    sizes = SimulationConfig.from_parent(recipe).images
    problems = [
        f"simulation.images.{name}: sizes differ, but this encoder resizes all images to one "
        "size; use a single number of patches"
        for name, spec in model.image_specs().items()
        if spec.inputs == "fixed" and name in sizes and sizes_vary(sizes[name])
    ]
    if problems:
        raise ConfigError(problems)


def find_slowest_group(
    modules: Sequence[ModuleDescription],
    shares: Sequence[list[MicrobatchMeta]],
    ranks: int,
    model: CostModel,
    graph: StageGraph,
) -> Workload:
    """Return the microbatches of the slowest group of ranks that run layers in lockstep.

    The time of a group is the sum over its microbatches of the slowest rank, separately for every
    module in forward and backward. Different groups wait for each other only at the end of a step.

    Args:
        modules: Complete modules.
        shares: Microbatches of each data-parallel rank.
        ranks: Number of consecutive data-parallel ranks of a group.
        model: Costs of the modules.
        graph: Tasks of the microbatches of all ranks, with complete modules as stages.
    """
    metas = [meta for share in shares for meta in share]
    targets = [text_tokens(meta) for meta in metas]
    by_name = {module.name: module for module in modules}
    shape = len(shares) // ranks, ranks, len(shares[0])
    rank_ms_GRM, flops_GRM = np.zeros((2, *shape))
    group_ms_G = np.zeros(shape[0])
    for stage in graph.layout.stages:
        tasks = module_tasks(graph, by_name[stage.module], metas, targets)
        needs_input_grad_N = tasks.sends_gradient_N(graph, stage.index)
        costs = model.stage_costs(
            tasks.module,
            stage.start,
            stage.stop,
            tasks.sizes,
            needs_input_grad_N,
            tasks.unpadded_sizes,
        )
        flops_GRM += np.asarray(sum(costs.flops)).reshape(shape)
        for times in (costs.forward, costs.backward):
            pass_ms_GRM = times.total_ms.reshape(shape)
            rank_ms_GRM += pass_ms_GRM
            group_ms_G += pass_ms_GRM.max(1).sum(1)
    group = int(group_ms_G.argmax())
    slowest_M = rank_ms_GRM[group].argmax(0)
    peers = shares[group * ranks : (group + 1) * ranks]
    longest = [peers[rank][index] for index, rank in enumerate(slowest_M)]
    flops = sum(flops_GRM[group, rank, index] for index, rank in enumerate(slowest_M))
    return Workload(longest, flops_GRM.sum() / len(shares) / flops if flops else 1.0, peers)


def most_loaded_rank(
    modules: Sequence[ModuleDescription], shares: Sequence[list[MicrobatchMeta]]
) -> Workload:
    """Return the microbatches of the data-parallel rank with the most FLOPs."""
    flops = [sum(step_flops(modules, share).tolist()) for share in shares]
    max_flops = max(flops)
    return Workload(
        shares[flops.index(max_flops)], sum(flops) / len(flops) / max_flops if max_flops else 1.0
    )
