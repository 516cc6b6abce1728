"""Pipeline of a run: the model, split into stages, and the runtimes that execute plans of steps.

    layout = plan_layout(recipe.parallel, descriptions, metas)     before the model is split
    pipeline = Pipeline(model, stages, layout, descriptions, recipe.parallel, mesh, dtype)
    planned = planner.plan(step, microbatches, ...)                every step, see `planners`
    result = pipeline.run(planned.plan, microbatches, loss_scale=...)

A run without pipeline parallelism also has plans. They have one rank and run the microbatches
sequentially. In such runs, FSDP2 may all-gather and free parameters layer by layer instead of once
per step (`reshard_after_forward`). All data-parallel ranks must then run the same forward and
backward passes. An encoder or generator therefore runs once per microbatch, with a dummy image if
the microbatch has no image.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.common.extensions import load_entry
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import GENERATOR, LLM
from torchmm.common.sequence_slices import (
    BalancedMicrobatch,
    DecodeAssignment,
    SequenceGroup,
    group_segments,
    segment_lengths,
    slice_balanced_microbatch,
    slice_meta,
    slice_microbatch,
    slice_ranges,
)
from torchmm.costs.flops import sample_costs
from torchmm.models.generator import GeneratorModule
from torchmm.models.layered import LayeredModule
from torchmm.models.layers.experts import RouterBalance
from torchmm.models.layers.sequence_exchange import SequenceRanks
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.exchange import FeatureExchange
from torchmm.parallel.fsdp import (
    FSDPModule,
    LayerSharding,
    Sharding,
    StepSharding,
    should_reshard_after_forward,
)
from torchmm.parallel.mesh import ParallelMesh
from torchmm.parallel.p2p import P2PChannels
from torchmm.parallel.precision import mixed_precision
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageLayout, Task
from torchmm.pipelining.plan.plan import MessageSpecs, PipelinePlan, UnshardMode
from torchmm.pipelining.plan.serialization import decode_plan
from torchmm.pipelining.run.messages import message_sizes, message_specs
from torchmm.pipelining.run.pixel_exchange import PixelExchange, reading_stages
from torchmm.pipelining.run.runtime import PipelineRuntime, StepResult, channel_pairs
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.pipelining.run.stage import (
    AnswerStage,
    LatentDecodeStage,
    LlmStage,
    PipelineStage,
    TextStage,
    VelocityStage,
    make_stage,
)
from torchmm.planning.step import Purpose, plan_layout, plan_step, step_graph
from torchmm.recipe.parallel_section import ParallelConfig

LossInputs = Callable[[Sequence[Microbatch]], Sequence[Microbatch]]
"""Function that returns microbatches with further inputs of the loss. It may communicate."""


def unsplit_pipeline(model: MultimodalModel, mesh: ParallelMesh, dtype: torch.dtype) -> Pipeline:
    """Return the pipeline of a model that is not split over pipeline ranks."""
    config = ParallelConfig()
    descriptions = [module.describe() for module in model.modality_modules()]
    layout = plan_layout(config, descriptions, [MicrobatchMeta((), 1)])
    stages = split_model_for_rank(model, layout, 0)
    return Pipeline(model, stages, layout, descriptions, config, mesh, dtype)


class Pipeline:
    """Planning and execution of the steps of one rank. Construction is collective over all ranks.

    Args:
        model: Model with the stages of this rank, parallelized.
        modules: Maps a stage index to the module that runs on this rank (from
            `split_model_for_rank`).
        layout: Stages of all ranks.
        descriptions: Descriptions of the complete modules.
        config: Section [parallel] of the recipe.
        mesh: Mesh of the run.
        dtype: Compute dtype of the modules.
        feature_exchange: Data-parallel ranks that encode images for each other. If None, each rank
            encodes the images of its samples.
    """

    def __init__(
        self,
        model: MultimodalModel,
        modules: Mapping[int, LayeredModule],
        layout: StageLayout,
        descriptions: Sequence[ModuleDescription],
        config: ParallelConfig,
        mesh: ParallelMesh,
        dtype: torch.dtype,
        feature_exchange: FeatureExchange | None = None,
    ) -> None:
        self.layout = layout
        self.descriptions = descriptions
        self.config = config
        self.dtype = dtype
        self.device = mesh.device
        self._sequence_ranks: SequenceRanks | None = model.llm.sequence_ranks
        self._slice = mesh.context_rank, mesh.context_size
        """Index of the token slice of this rank, and the number of slices per packed sequence."""
        self._pixels = PixelExchange(layout, mesh)
        self.message_sizes = {m.name: message_sizes(m) for m in model.modality_modules()}
        self.sharding: UnshardMode = "none"
        """When FSDP2 all-gathers parameters."""
        if any(isinstance(module, FSDPModule) for module in modules.values()):
            self.sharding = "layer" if should_reshard_after_forward(config) else "step"
        self._feature_ranks = feature_exchange
        self._widths = {
            m.name: 1 + len(m.deepstack_layers) for m in descriptions if m.kind == "encoder"
        }
        """Widths of the features of each encoder, relative to the LLM."""
        stages = {i: make_stage(m, self._sharding_of(m)) for i, m in modules.items()}
        for stage in stages.values():
            if isinstance(stage, LlmStage):
                stage.feature_exchange = feature_exchange
        self._modules_with_pixels = {
            m for m, indices in reading_stages(layout).items() if {*indices} & {*modules}
        }
        """Modules whose pixels the stages of this rank read."""
        for index, module in modules.items():
            trained = any(p.requires_grad for p in module.parameters())
            assert trained == layout.stages[index].trainable, layout.stages[index]
        self.router_balance: RouterBalance | None = getattr(model.llm, "balance", None)
        """Router that adds the load-balancing losses of experts."""
        channels = None
        if mesh.plan_size > 1:
            channels = P2PChannels(mesh.device, mesh.plan_ranks, config.timeout_s)
            channels.warm_up(channel_pairs(layout))
        runtime = partial(PipelineRuntime, mesh.plan_rank, channels=channels, device=mesh.device)
        self.caches_tokens = model.llm.family.is_registered and config.context == 1
        """Whether LLM stages can cache keys and values of earlier tokens.

        No cache is used for model types that are not registered, or if ranks share packed
        sequences, because tests do not cover these cases.
        """
        self.rotary_limits = model.llm.rotary_limits
        self.add_loss_inputs: LossInputs = list
        """Function that adds inputs of the loss to the microbatches of each step."""
        self._text_plan: tuple[MicrobatchMeta, PipelinePlan] | None = None
        interleave = None
        if mesh.layer_hooks is not None:
            interleave = partial(load_entry("action_runners", "launches"), mesh.layer_hooks)
        self._runtime = runtime(stages, interleave=interleave)
        self._text_runtime = runtime(_text_generation_stages(stages))
        self._answer_runtime = runtime(_answer_stages(stages))
        self._velocity_runtime = runtime(_image_generation_stages(stages, VelocityStage))
        self._decode_runtime = runtime(_image_generation_stages(stages, LatentDecodeStage))

    @property
    def reads(self) -> DecodeAssignment:
        """Content of the microbatches that this rank decodes."""
        return self._pixels.assignment

    def _sharding_of(self, module: LayeredModule) -> Sharding | None:
        if not isinstance(module, FSDPModule):
            return mixed_precision(module)  # other modules of this rank may have FSDP2
        if self.sharding == "layer":
            return LayerSharding(module, self.config.gradient_reduction == "microbatch")
        return StepSharding(module)

    def plan(self, metas: Sequence[MicrobatchMeta], purpose: Purpose = "training") -> PipelinePlan:
        """Return the plan of a step with these microbatches.

        Raises:
            PlanError: The schedule does not support the microbatches.
        """
        return plan_step(
            self.layout,
            self.config,
            self.descriptions,
            metas,
            specs=self.specs(metas, purpose),
            sharding=self.sharding,
            purpose=purpose,
            reduces_early=purpose == "training" and self.device.type == "cuda",
        )

    def plan_training(self, microbatches: Sequence[Microbatch]) -> PipelinePlan:
        """Return the plan of a training step on these microbatches.

        The plan depends only on their sizes, which are known before the microbatches are decoded,
        and not on the number of targets.

        Raises:
            PlanError: See `plan`.
        """
        return self.plan([m.task_meta for m in microbatches])

    def load_plan(self, numbers: np.ndarray, metas: Sequence[MicrobatchMeta]) -> PipelinePlan:
        """Return the training plan that another process has encoded (`encode_plan`).

        The result has the specs of the tensors that this rank sends and receives.
        """
        graph = step_graph(self.layout, self.config, metas, self.sharding)
        plan = decode_plan(numbers, graph, lambda graph: {})
        tasks = local_tasks(plan, self._runtime.plan_rank)
        return replace(plan, specs=self.specs(metas)(plan.graph, tasks=tasks))

    def specs(
        self, metas: Sequence[MicrobatchMeta], purpose: Purpose = "training"
    ) -> Callable[..., MessageSpecs]:
        """Return the function that computes the tensors of the messages of this rank."""
        local_metas = [
            slice_meta(meta, *self._slice, self._context_groups(meta, purpose)) for meta in metas
        ]
        sizes = self.message_sizes
        return partial(message_specs, modules=sizes, microbatches=local_metas, dtype=self.dtype)

    def run(
        self,
        plan: PipelinePlan,
        microbatches: Sequence[Microbatch],
        *,
        loss_scale: float | Mapping[str, float] = 1.0,
        annotate: bool = False,
    ) -> StepResult:
        """Run a training step, which accumulates gradients and records the time of each action.

        Args:
            plan: Plan of these microbatches, identical on all of its ranks.
            microbatches: Microbatches of this data-parallel rank, identical on all ranks of the
                plan, on any device. Only microbatches with tasks on this rank are copied to its
                device.
            loss_scale: Factor of the summed losses in backward passes, or one factor per module.
            annotate: Whether to name each action in profiles.
        """
        microbatches = self.add_loss_inputs(microbatches)
        used = {a.microbatch for a in plan.actions[self._runtime.plan_rank] if a.microbatch >= 0}
        moved = [
            drop_unread_pixels(self._modules_with_pixels, m).to(self.device) if i in used else m
            for i, m in enumerate(self._local_microbatches(plan, microbatches))
        ]
        return self._runtime.step(
            plan, moved, loss_scale=loss_scale, record=True, annotate=annotate
        )

    def _context_groups(
        self, meta: MicrobatchMeta, purpose: Purpose = "training"
    ) -> Sequence[SequenceGroup]:
        """Return the context-parallel ranks that share samples. Empty if all ranks share them.

        All ranks share prompts, so that `next_token_logits` has the logits in their order.
        """
        if not self.config.dynamic_context or purpose == "text":
            return ()
        tokens = segment_lengths(meta)
        llm = next(module for module in self.descriptions if module.name == LLM)
        return group_segments(tokens, sample_costs(llm, tokens), self._slice[1])

    def _local_microbatches(
        self,
        plan: PipelinePlan,
        microbatches: Sequence[Microbatch],
        purpose: Purpose = "training",
    ) -> list[Microbatch]:
        """Return the slices of this rank, with the pixels that its tasks read."""
        return self._pixels.distribute(
            plan.graph, [self._local_microbatch(m, purpose) for m in microbatches]
        )

    def _local_microbatch(self, microbatch: Microbatch, purpose: Purpose) -> Microbatch:
        if isinstance(microbatch, BalancedMicrobatch):
            assert self._feature_ranks is not None
            part: Microbatch = slice_balanced_microbatch(
                microbatch, self._feature_ranks.size, self._widths
            )
        else:
            groups = self._context_groups(microbatch.meta, purpose)
            part = slice_microbatch(microbatch, *self._slice, self._widths, groups)
        # Views of pinned memory are pinned. Tensors that slicing has allocated are not.
        is_copied = part is not microbatch and self.device.type == "cuda"
        return part.pin_memory() if is_copied else part

    def losses(self, microbatches: Sequence[Microbatch]) -> dict[str, list[torch.Tensor]]:
        """Return summed losses without gradients, by module ("llm", "generator") and microbatch.

        The result has the modules whose last stage is on this rank. If ranks share packed
        sequences, it has the losses of the targets of this rank.

        Args:
            microbatches: Microbatches of this data-parallel rank, on the CPU.
        """
        microbatches = self.add_loss_inputs(microbatches)
        plan = self.plan([m.meta for m in microbatches], purpose="losses")
        moved = [part.to(self.device) for part in self._local_microbatches(plan, microbatches)]
        result = self._runtime.step(plan, moved)
        by_module: dict[str, list[torch.Tensor]] = {}
        for (module, _), loss in sorted(result.module_losses.items()):
            by_module.setdefault(module, []).append(loss)
        return by_module

    def answer_log_probs(self, microbatches: Sequence[Microbatch]) -> dict[int, torch.Tensor]:
        """Return the log-probabilities (A,) of the answers by microbatch, without gradients.

        The result is empty on ranks without the last LLM stage.

        Args:
            microbatches: Microbatches of preference pairs of this data-parallel rank, on the CPU.
        """
        plan = self.plan([m.task_meta for m in microbatches], purpose="losses")
        moved = [part.to(self.device) for part in self._local_microbatches(plan, microbatches)]
        return self._answer_runtime.step(plan, moved).losses_of("llm")

    @contextmanager
    def text_generation(self) -> Iterator[None]:
        """Enable token caches of the LLM stages, if they are supported (`caches_tokens`).

        The first packed sequence has full prompts. Later sequences have the next token of each
        prompt.
        """
        self.reset_caches()
        try:
            yield
        finally:
            for stage in self._text_stages():
                stage.cache = None

    def reset_caches(self) -> None:
        """Reset the caches. The next packed sequence has full prompts."""
        for stage in self._text_stages():
            stage.cache = stage.module.new_cache() if self.caches_tokens else None

    def _text_stages(self) -> list[TextStage]:
        return [s for s in self._text_runtime.stages.values() if isinstance(s, TextStage)]

    def next_token_logits(self, microbatch: Microbatch) -> torch.Tensor | None:
        """Return logits (B, V) after the last token of each of B prompts.

        The result is None on ranks without the last LLM stage.
        """
        meta = microbatch.meta
        if self._text_plan is None or self._text_plan[0] != meta:
            self._text_plan = meta, self.plan([meta], purpose="text")
        plan = self._text_plan[1]  # all sequences with one token per prompt have the same plan
        moved = [
            part.to(self.device) for part in self._local_microbatches(plan, [microbatch], "text")
        ]
        result = self._text_runtime.step(plan, moved)
        logits_BV = result.losses_of("llm").get(0)
        if logits_BV is None or self._sequence_ranks is None:
            return logits_BV
        # Each rank has the logits of the prompts whose last token is in its slice.
        rank, ranks = self._slice
        positions = slice_ranges(len(microbatch.input_ids_T), ranks)[rank]
        stops = microbatch.cu_seqlens[1:]
        prompts = [number for number, stop in enumerate(stops) if stop - 1 in positions]
        all_BV = logits_BV.new_zeros(len(stops), logits_BV.shape[1])
        all_BV[torch.tensor(prompts, dtype=torch.int64)] = logits_BV
        return self._sequence_ranks.summed(all_BV)

    def velocities(self, microbatch: Microbatch) -> torch.Tensor | None:
        """Return the velocities of the pixels of the images to generate, (P, V), float32.

        A velocity is the direction in which a pixel moves with increasing noise. Returns None on
        ranks without the last stage of the generator.
        """
        plan = self.plan([microbatch.meta], purpose="drawing")
        return self._velocity_runtime.step(plan, [microbatch]).losses_of(GENERATOR).get(0)

    def decode_latents(self, microbatch: Microbatch) -> torch.Tensor | None:
        """Return the pixels of images from their denoised latents, (P, X), float32.

        Returns None on ranks without the last stage of the generator.
        """
        plan = self.plan([microbatch.meta], purpose="drawing")
        return self._decode_runtime.step(plan, [microbatch]).losses_of(GENERATOR).get(0)

    def last_rank(self, module: str) -> int:
        """Return the rank of the plan with the last stage of a module."""
        return next(s.ranks[0] for s in reversed(self.layout.stages) if s.module == module)


def local_tasks(plan: PipelinePlan, rank: int) -> list[Task]:
    """Return the tasks whose outputs a rank computes or receives."""
    graph = plan.graph
    local = [action.task for action in plan.actions[rank] if action.type is ActionType.F]
    tasks = dict.fromkeys(local)
    tasks |= dict.fromkeys(graph.producer(m) for task in local for m in graph.incoming(task))
    return list(tasks)


def drop_unread_pixels(modules: Collection[str], microbatch: Microbatch) -> Microbatch:
    """Return the microbatch without the pixels that only other modules read."""
    encoders = {
        name: inputs if name in modules else inputs.without_pixels()
        for name, inputs in microbatch.encoders.items()
    }
    generator = microbatch.generator
    if generator is not None and GENERATOR not in modules:
        generator = generator.without_pixels()
    return replace(microbatch, encoders=encoders, generator=generator)


def _text_generation_stages(stages: Mapping[int, PipelineStage]) -> dict[int, PipelineStage]:
    """Return the stages with `TextStage` in place of the LLM stages."""
    return {
        index: TextStage(stage.module, stage.sharding)
        if isinstance(stage.module, LlmModule)
        else stage
        for index, stage in stages.items()
    }


def _answer_stages(stages: Mapping[int, PipelineStage]) -> dict[int, PipelineStage]:
    """Return the stages with `AnswerStage` in place of the LLM stages."""
    answer_stages = dict(stages)
    for index, stage in stages.items():
        if isinstance(stage, LlmStage):
            answer_stages[index] = answer_stage = AnswerStage(stage.module, stage.sharding)
            answer_stage.feature_exchange = stage.feature_exchange
    return answer_stages


def _image_generation_stages(
    stages: Mapping[int, PipelineStage], kind: type[VelocityStage] | type[LatentDecodeStage]
) -> dict[int, PipelineStage]:
    """Return the stages with a last generator stage of type `kind`, which has no loss."""
    return {
        index: kind(stage.module, stage.sharding)
        if isinstance(stage.module, GeneratorModule) and stage.module.is_last
        else stage
        for index, stage in stages.items()
    }
