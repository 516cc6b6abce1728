"""Step time with context-parallel groups that follow the sample lengths, in the cost model.

    python benchmarks/dynamic_context.py [--quick] [--json FILE]

The baseline is a fixed context-parallel degree: all `parallel.llm.context` ranks share every packed
sequence. With `parallel.llm.dynamic_context`, smaller groups share complete samples. Both use the
same samples of a video mixture, with the same number of tokens per rank and microbatch.

Sequences are packed by best fit. The sequences of a step are sorted by cost, so that the ranks that
wait for each other in FSDP2 have similar microbatches. The time of a microbatch is that of the
slowest rank: encoders with the largest share of images, then the LLM with the slowest group.
All-gathers and reductions of parameters overlap in all configurations, and are not included.

    captions   videos of log-normal length, median 20 frames, at most the sequence length
    skewed     95 % chats with one to four images, 5 % videos of at least 30 % of the sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from support.harness import Row, describe_machine, make_parser, report

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.run_costs import build_cost_model
from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import LLM, VISION
from torchmm.common.sequence_slices import (
    SequenceGroup,
    assign_images,
    group_segments,
    segment_lengths,
)
from torchmm.costs.flops import sample_costs
from torchmm.costs.sizes import TaskSizes, encoder_sizes, llm_sizes, text_tokens
from torchmm.data.steps.packing import pack_all
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.read import load_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "zoo" / "qwen3_vl_8b_long.toml"
SEED = 0
MICROBATCHES = 8
"""Microbatches per step and rank."""
SPEEDUP = "speedup over the fixed degree"
PUBLISHED = 1.46
"""Maximum speedup of FCP in average throughput over static degrees (arXiv 2602.21788v2)."""
OPEN_SEQUENCES = 16
"""Open sequences of best-fit packing, the default of `data.packing_buffer_size`."""


class Case(NamedTuple):
    """A model on a cluster.

    Attributes:
        model: Name of the model.
        gpus: Number of GPUs.
        tensor: Tensor-parallel degree.
        context: Smallest context-parallel degree for the longest video.
        rank_tokens: Number of tokens of a microbatch on one rank.
        device: Value of `simulation.device`.
        changes: Changes to the config of `RECIPE`.
    """

    model: str
    gpus: int
    tensor: int
    context: int
    rank_tokens: int
    device: str
    changes: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sample."""
        return self.context * self.rank_tokens

    @property
    def title(self) -> str:
        """Model and cluster."""
        return f"{self.model}, {self.gpus} {self.device}"


QWEN3_32B = (
    "--model.config.text_config.hidden_size=5120",
    "--model.config.text_config.intermediate_size=25600",
    "--model.config.text_config.num_hidden_layers=64",
    "--model.config.text_config.num_attention_heads=64",
    "--model.config.vision_config.out_hidden_size=5120",
)
CASES = (
    Case("Qwen3-VL-8B", 64, 1, 8, 16384, "h100"),
    Case("Qwen3-VL-8B", 64, 1, 8, 16384, "a800_disttrain"),  # a quarter of the network bandwidth
    Case("Qwen3-VL-32B, TP 8", 256, 8, 8, 16384, "a800_disttrain", QWEN3_32B),
)


class Model:
    """Costs of the encoder and the LLM of a case."""

    def __init__(self, case: Case) -> None:
        changes = [
            "--parallel.pipeline=1", "--parallel.schedule=separated", "--model.chunked_loss=true",
            f"--parallel.tensor={case.tensor}", "--parallel.shard=-1",
            f"--parallel.sequence_parallel={str(case.tensor > 1).lower()}",
            f"--parallel.llm.context={case.context}", "--activation_checkpoint.mode=full",
            f"--training.sequence_length={case.longest}",
            f"--training.global_batch_size={MICROBATCHES * case.gpus // case.tensor}",
            f"--simulation.device={case.device}",
            *case.changes,
        ]  # fmt: skip
        recipe = load_recipe(RECIPE, changes, case.gpus).recipe
        modules = [module.describe() for module in recipe_model(recipe).modality_modules()]
        self.llm, self.encoder = (self._named(modules, name) for name in (LLM, VISION))
        profile = load_profile(recipe.simulation.device)
        self._costs = build_cost_model(resolve_recipe(recipe, case.gpus), modules, profile)
        image = recipe.simulation.images[VISION]
        self.frame = ImageMeta(0, 0, image.patches[0], image.tokens, encoder=VISION)

    @staticmethod
    def _named(modules: Sequence[ModuleDescription], name: str) -> ModuleDescription:
        return next(module for module in modules if module.name == name)

    @cached_property
    def max_context(self) -> int:
        """Number of query heads of a tensor-parallel rank, as a power of two."""
        heads = self.llm.layers[0].heads // self._costs.execution(LLM).tensor
        return 1 << (heads.bit_length() - 1)

    def encoder_ms(self, metas: Sequence[MicrobatchMeta], context: int) -> np.ndarray:
        """Return the time of the encoder rank with the most patches, by microbatch."""
        shares = []
        for meta in metas:
            images = meta.images_of_encoder(VISION)
            ranges = assign_images(meta.patches(VISION), context)
            largest = max(ranges, key=len)
            shares.append(images[largest.start : largest.stop])
        sizes = encoder_sizes(self.encoder, shares)
        return self._step_ms(self._costs, self.encoder, sizes, False)

    def llm_ms(self, groups: Sequence[tuple[MicrobatchMeta, int]]) -> np.ndarray:
        """Return the time of the samples of each group of ranks."""
        times_ms = np.zeros(len(groups))
        for ranks in sorted({ranks for _, ranks in groups}):
            chosen = [i for i, (_, size) in enumerate(groups) if size == ranks]
            metas = [groups[i][0] for i in chosen]
            targets = [text_tokens(meta) for meta in metas]
            sizes = llm_sizes(metas, targets, padding=False, context=ranks)
            execution = replace(self._costs.execution(LLM), context=ranks)
            costs = replace(self._costs, executions={LLM: execution})
            times_ms[chosen] = self._step_ms(costs, self.llm, sizes, True)
        return times_ms

    @staticmethod
    def _step_ms(
        costs: CostModel, module: ModuleDescription, sizes: TaskSizes, gradient: bool
    ) -> np.ndarray:
        stage = costs.stage_costs(module, 0, len(module.layers), sizes, gradient)
        return stage.forward.total_ms + stage.backward.total_ms


def draw_samples(
    mixture: str, case: Case, frame: ImageMeta, tokens: int, seed: int
) -> list[SampleMeta]:
    """Return samples with `tokens` tokens in total. A video has a text of 100 to 500 tokens."""
    rng = np.random.default_rng(seed)
    max_frames = (case.longest - 500) // frame.tokens
    samples: list[SampleMeta] = []
    total = 0
    while total < tokens:
        if mixture == "captions":
            frames = int(np.clip(rng.lognormal(np.log(20), 1.0), 1, max_frames))
        elif rng.random() < 0.05:
            frames = int(rng.integers(max_frames * 3 // 10, max_frames + 1))
        else:
            frames = int(rng.integers(1, 5))
        length = frames * frame.tokens + int(rng.integers(100, 501))
        samples.append(SampleMeta(mixture, len(samples), length, (frame,) * frames, VISION))
        total += length
    return samples


def pack(samples: Sequence[SampleMeta], length: int) -> list[MicrobatchMeta]:
    """Return packed sequences of `length` tokens."""
    packs = pack_all([s.tokens for s in samples], length, OPEN_SEQUENCES, flush=False)
    return [MicrobatchMeta(tuple(samples[i] for i in pack), length) for pack in packs]


def groups_of(
    model: Model, meta: MicrobatchMeta, context: int, dynamic: bool
) -> list[SequenceGroup]:
    """Return the groups of ranks of a packed sequence."""
    tokens = segment_lengths(meta)
    if not dynamic:
        return [SequenceGroup(range(context), list(range(len(tokens))))]
    return group_segments(tokens, sample_costs(model.llm, tokens), context)


class Outcome(NamedTuple):
    """Times and groups of all steps."""

    us_per_token: float
    """Time per token of the cluster, without padding."""
    mean_ranks: float
    """Number of ranks that share a sample, averaged over tokens."""
    max_load: float
    """Maximum number of tokens of a rank, relative to equal slices."""


def simulate(
    model: Model, case: Case, samples: Sequence[SampleMeta], context: int, dynamic: bool
) -> Outcome:
    """Return the time of all complete steps."""
    metas = pack(samples, context * case.rank_tokens)
    replicas = case.gpus // case.tensor // context
    steps = len(metas) // (replicas * MICROBATCHES)
    metas = metas[: steps * replicas * MICROBATCHES]
    parts: list[tuple[MicrobatchMeta, int]] = []
    owners: list[int] = []
    loads: list[float] = []
    shared = 0
    for index, meta in enumerate(metas):
        padding = SampleMeta("padding", 0, meta.tokens - meta.used_tokens)
        segments = [*meta.samples, padding][: len(segment_lengths(meta))]
        for group in groups_of(model, meta, context, dynamic):
            members = tuple(segments[i] for i in group.segments)
            tokens = sum(sample.tokens for sample in members)
            parts.append((MicrobatchMeta(members, tokens), len(group.ranks)))
            owners.append(index)
            loads.append(tokens / len(group.ranks) / case.rank_tokens)
            shared += tokens * len(group.ranks)
    times_ms = np.zeros(len(metas))
    np.maximum.at(times_ms, owners, model.llm_ms(parts))
    times_ms += model.encoder_ms(metas, context)
    # Ranks of a microbatch wait for each other. Similar sequences form a microbatch.
    sorted_ms = np.sort(times_ms.reshape(steps, -1), axis=1)
    step_ms = sorted_ms.reshape(steps, MICROBATCHES, replicas).max(-1).sum(-1)
    used = sum(meta.used_tokens for meta in metas)
    total = sum(meta.tokens for meta in metas)
    return Outcome(1e3 * step_ms.sum() / used, shared / total, max(loads))


def rows_of(case: Case, mixture: str, steps: int, model: Model) -> list[Row]:
    """Return the rows of a case, with all fixed degrees and all maximum degrees."""
    tokens = steps * MICROBATCHES * case.rank_tokens * case.gpus // case.tensor
    tokens += 2 * OPEN_SEQUENCES * model.max_context * case.rank_tokens
    samples = draw_samples(mixture, case, model.frame, tokens, SEED)
    degrees = [case.context]
    limit = min(model.max_context, case.gpus // case.tensor)
    while degrees[-1] * 2 <= limit:
        degrees.append(degrees[-1] * 2)
    fixed = {n: simulate(model, case, samples, n, dynamic=False) for n in degrees}
    best = min(outcome.us_per_token for outcome in fixed.values())
    name = f"{case.title}, {mixture}"
    rows = []
    for degree in degrees:
        ours = simulate(model, case, samples, degree, dynamic=True)
        same = fixed[degree].us_per_token
        values: list[tuple[str, str, float, float, bool]] = [
            ("time per token", "us", ours.us_per_token, same, False),
            (SPEEDUP, "x", same / ours.us_per_token, 1.0, True),
            ("speedup over the best fixed degree", "x", best / ours.us_per_token, 1.0, True),
            ("mean ranks per sample", "ranks", ours.mean_ranks, degree, False),
            ("maximum tokens of a rank", "x", ours.max_load, 1.0, False),
        ]
        rows += [
            Row(
                f"{name}, context {degree}",
                metric,
                unit,
                float(value),
                baseline,
                PUBLISHED if metric == SPEEDUP else None,
                better="higher" if is_gain else "lower",
                kind="simulated",
            )
            for metric, unit, value, baseline, is_gain in values
        ]
    return rows


def main() -> None:
    """Print the table."""
    arguments = make_parser((__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    quick: bool = arguments.quick
    rows = []
    for case in CASES[:1] if quick else CASES:
        model = Model(case)
        for mixture in ("captions", "skewed"):
            rows += rows_of(case, mixture, 1 if quick else 2, model)
    machine = describe_machine(torch.device("cpu"))
    report(f"Dynamic context parallelism, seed {SEED}; {machine}", rows, arguments.json)


if __name__ == "__main__":
    main()
