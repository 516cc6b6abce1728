"""The section `[parallel]`: parallelism of the run and of single modules."""

from __future__ import annotations

from math import gcd
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from torchmm.common.module_names import LLM
from torchmm.recipe.mesh_sizes import AXES
from torchmm.recipe.schedules import LlmSchedule, Placement, find_schedule
from torchmm.recipe.section import Section, with_extensions


class ModuleParallelConfig(Section):
    """Parallelism of one module.

    NAME is "llm", "generator" or an encoder name. `pipeline`, `replicate`, `shard` and `tensor`
    require `parallel.placement` = "colocated" (encoders only) or "disaggregated". See
    docs/guides/choose_placement.md.
    """

    pipeline: int | None = Field(default=None, ge=1)
    """Pipeline-parallel size of this module. If None, it is `parallel.pipeline` for the LLM and 1
    for other modules."""
    replicate: int | None = Field(default=None, ge=-1)
    """Number of data-parallel replicas of this module. -1 uses the remaining ranks. If None, it is
    `parallel.replicate` for the LLM and 1 for other modules. Colocated encoders use all remaining
    ranks."""
    shard: int | None = Field(default=None, ge=-1)
    """Number of ranks over which FSDP2 shards this module. -1 uses the remaining ranks. If None,
    see `replicate`."""
    tensor: int | None = Field(default=None, ge=1)
    """Tensor-parallel size of this module. If None, it is `parallel.tensor` for the LLM and
    colocated encoders, and 1 for other modules."""
    context: int | None = Field(default=None, ge=1)
    """Context-parallel size of the LLM, for long sequences. These ranks are part of `shard`. They
    split the tokens of each microbatch, and its images in the encoders. Attention splits heads. If
    None, it is 1. See docs/guides/context_parallelism.md."""
    dynamic_context: bool | None = None
    """Whether smaller groups of the `context` ranks of the LLM share the samples of a packed
    sequence, such as 1 rank for chats and 4 ranks for a video. The groups follow the sample lengths
    of each microbatch. Requires a power of two for `context`, and `training.microbatch_size` = 1.
    Dry runs assume groups of `context` ranks. If None, it is false. See
    docs/guides/context_parallelism.md."""
    segments: int | None = Field(default=None, ge=1)
    """Number of stages of this module per rank. Supported for colocated encoders and for the
    schedules "separated", "searched" and "csv:...". If None, it is `parallel.virtual_stages` for
    the LLM and 1 for encoders. "searched" selects the value with the fastest simulated first step.
    Colocated encoders have one stage per layer."""
    sub_microbatch_images: int | None = Field(default=None, ge=1)
    """Maximum number of images that an encoder or the generator processes at once in a pipeline. A
    microbatch is split into groups of similar size. Small groups fill pipeline bubbles better,
    large groups use the GPU better. If None, it is 4 with separated modules, and all images
    otherwise. "searched" selects the value with the fastest simulated first step."""


@with_extensions
class ParallelConfig(Section):
    """Distribution of the model and the data over ranks.

    pipeline x replicate x shard x tensor = number of ranks. See docs/guides/one_node.md and
    docs/guides/choose_placement.md.
    """

    model_config = ConfigDict(extra="allow")
    named_tables: ClassVar[type[Section] | None] = ModuleParallelConfig
    __pydantic_extra__: dict[str, ModuleParallelConfig] = Field(init=False)

    pipeline: int = Field(default=1, ge=1)
    """Pipeline-parallel size. The layers of every module are split over these ranks."""
    schedule: str = "separated"
    """Pipeline schedule. "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble" and "megatron_balanced"
    split all layers as one chain into stages of equal cost. "megatron" puts the encoders into the
    first LLM stage. "separated" splits each module over all ranks. "searched" does the same and
    searches a schedule for each step. "csv:PATH" reads a schedule from a file. "optimus" runs
    colocated encoders in the LLM bubbles. See docs/concepts/pipelining.md."""
    placement: Placement = "interleaved"
    """Assignment of modules to ranks. "interleaved": all modules on all ranks, with the same
    parallelism. "colocated": all modules on all ranks, with separate [parallel.NAME] settings for
    encoders. "disaggregated": separate ranks for each module, with [parallel] for the LLM and
    [parallel.NAME] for the others. "disaggregated" supports the schedules "separated", "1f1b",
    "interleaved_1f1b", "gpipe" and "zero_bubble". See docs/guides/choose_placement.md."""
    auto_sizes: bool = False
    """Whether to choose the parallelism by simulating the first step on `simulation.device`. With
    colocated encoders, it chooses omitted sizes, `segments` and `sub_microbatch_images` of
    encoders. With disaggregated modules, it replaces all sizes, the schedule and the recomputation
    for the given number of ranks. See docs/guides/plan_cluster.md."""
    llm_schedule: LlmSchedule = "interleaved_1f1b"
    """LLM schedule under "optimus". "searched" uses interleaved 1F1B or a searched LLM schedule,
    whichever gives the shorter step."""
    bubble_granularity: Literal["fine", "coarse"] = "fine"
    """Bubbles that "optimus" fills with encoder work. "fine" uses all idle time of the LLM ranks.
    "coarse" only uses the time before the first and after the last LLM action. See
    docs/concepts/optimus.md."""
    tp_comm_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of LLM time in which tensor-parallel communication leaves ranks idle. "optimus" runs
    groups of encoder kernels in this time, if the simulated step becomes shorter. Layers are then
    not compiled. 0 disables it."""
    replan_threshold: float = Field(default=0.0, ge=0)
    """Relative difference between measured and planned times above which later steps are planned
    with measured times, for example 0.1. It applies to static schedules, which are planned with
    FLOPs until then, and to "optimus", which is planned with the device profile. With 0, static
    schedules only use FLOPs, and their resumed runs are bitwise identical. "optimus" then uses
    [parallel.search], as "searched" always does."""
    virtual_stages: int = Field(default=1, ge=1)
    """Number of stages per rank. With separated modules, number of LLM stages per rank."""
    replicate: int = Field(default=1, ge=-1)
    """Number of data-parallel replicas (HSDP). -1 uses the remaining ranks."""
    shard: int = Field(default=-1, ge=-1)
    """Number of ranks over which FSDP2 shards parameters, gradients and optimizer state. -1 uses
    the remaining ranks."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """FSDP2 policy that frees unsharded parameters after each forward pass. "default" does so
    without a pipeline. With a pipeline, parameters are all-gathered once per step. "always"
    requires `pipeline` = 1 and colocated or interleaved modules."""
    gradient_reduction: Literal["step", "microbatch"] = "step"
    """Time at which FSDP2 reduces gradients. "step" reduces once per step and accumulates unsharded
    gradients, 4 bytes per trained parameter (as with `no_sync`). "microbatch" reduces in every
    backward pass, which uses less memory and more communication. It requires `pipeline` = 1,
    interleaved modules and float32 parameters. Replicas are all-reduced once per step in both
    cases."""
    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel size."""
    expert: int = Field(default=1, ge=1)
    """Expert-parallel size of the LLM. These ranks are part of `shard` and exchange tokens. 1
    computes all experts on every rank. FSDP2 then all-gathers their weights."""
    sequence_parallel: bool = False
    """Whether to also split activations along the sequence between tensor-parallel regions.
    Pipeline messages are split, too."""
    async_tensor_parallel: bool = False
    """Whether to overlap the tensor-parallel communication of these activations with matmuls, in
    chunks. Requires `tensor` > 1 and `sequence_parallel`. See docs/guides/async_tp.md."""
    async_tensor_backend: Literal["auto", "symmetric_memory", "ring", "collective"] = "auto"
    """Implementation of this overlap. "symmetric_memory" copies without SMs (CUDA, one host).
    "ring" uses send and receive. "collective" overlaps in the backward pass only. "auto" uses the
    first that is available."""
    async_tensor_chunks: int = Field(default=0, ge=0)
    """Number of chunks of the "ring" backend per rank. 0 selects the fastest in a short measurement
    at the start."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of torch.distributed. "auto" uses NCCL on CUDA and gloo on CPU. Other combinations
    are not supported."""
    timeout_s: int = Field(default=300, ge=1)
    """Time in seconds a rank waits for another rank before the run stops with exit code 6."""
    slow_rank_threshold: float = Field(default=2.0, ge=0)
    """Factor above which a rank is logged as slow before the first step. All ranks time a matmul, a
    memory copy and an all-gather in each process group, and compare with the median. 0 disables
    this check."""

    @property
    def modules(self) -> dict[str, ModuleParallelConfig]:
        """Tables [parallel.NAME] by name."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def needs_orchestration(self) -> bool:
        """True if the planner still has to select the degrees of disaggregated modules.

        Checks ignore these degrees and the schedule until then.
        """
        return self.auto_sizes and self.placement == "disaggregated"

    @property
    def has_module_segments(self) -> bool:
        """True if the schedule assigns every module separate stages on all pipeline ranks."""
        schedule = find_schedule(self.schedule)
        return schedule is not None and schedule.cut == "separated"

    @property
    def splits_backward(self) -> bool:
        """True if backward passes compute gradients of inputs and weights separately."""
        colocated = self.placement == "colocated"
        schedule = find_schedule(self.llm_schedule if colocated else self.schedule)
        is_cut = self.pipeline > 1 or self.placement == "disaggregated"
        return is_cut and schedule is not None and schedule.splits_backward

    def explicit_sizes(self, name: str) -> dict[str, int]:
        """Return the values of `pipeline`, `replicate`, `shard` and `tensor` that a module sets."""
        module = self.modules.get(name, ModuleParallelConfig())
        return module.model_dump(include=set(AXES), exclude_none=True)

    @property
    def context(self) -> int:
        """Number of ranks that divide the tokens of a microbatch of the LLM."""
        return self.modules.get(LLM, ModuleParallelConfig()).context or 1

    @property
    def dynamic_context(self) -> bool:
        """True if smaller groups of context-parallel ranks share the samples of a sequence."""
        return bool(self.modules.get(LLM, ModuleParallelConfig()).dynamic_context)

    @property
    def mirrors(self) -> int:
        """Number of ranks of a plan per tensor-parallel group of the LLM.

        One rank of the plan represents as many ranks as the greatest common divisor of the
        tensor-parallel sizes of the LLM and all colocated encoders.
        """
        if self.placement != "colocated":
            return 1
        sizes = (module.tensor or self.tensor for module in self.modules.values())
        return self.tensor // gcd(self.tensor, *sizes)

    def encoder_tensor(self, name: str) -> int:
        """Return the tensor-parallel size of a colocated encoder."""
        return self.explicit_sizes(name).get("tensor", self.tensor)

    def encoder_mirrors(self, name: str) -> int:
        """Return the number of ranks of a plan per tensor-parallel group of a colocated encoder."""
        if self.placement != "colocated":
            return 1
        return self.encoder_tensor(name) * self.mirrors // self.tensor

    @property
    def bounds_encoders(self) -> bool:
        """True if encoders recompute in tasks that exceed the memory limit otherwise."""
        return self.schedule == "optimus"

    def segments(self, name: str) -> int:
        """Return the number of stages of a module per pipeline rank, with separated modules."""
        configured = self.modules.get(name, ModuleParallelConfig()).segments
        return configured or (self.virtual_stages if name == "llm" else 1)

    def slices(self, name: str) -> int | None:
        """Return the number of stages of a colocated encoder per pipeline rank.

        None is one stage per layer.
        """
        return self.modules.get(name, ModuleParallelConfig()).segments

    def sub_microbatch_images(self, name: str) -> int | None:
        """Return the maximum number of images in an encoder batch, or None without a limit."""
        configured = self.modules.get(name, ModuleParallelConfig()).sub_microbatch_images
        return configured or (4 if self.has_module_segments else None)
