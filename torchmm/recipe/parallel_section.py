"""`[parallel]`: how ranks share the work, and sizes of single modules."""

from __future__ import annotations

from math import gcd
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from torchmm.common.module_names import LLM
from torchmm.recipe.schedules import LlmSchedule, Placement, find_schedule
from torchmm.recipe.section import Section, with_extensions
from torchmm.recipe.sizes import AXES


class ModuleParallelConfig(Section):
    """One module in the pipeline; NAME is "llm", "generator" or the name of an encoder."""

    pipeline: int | None = Field(default=None, ge=1)
    """Pipeline ranks of this module, if `parallel.placement` gives it separate sizes. All four
    sizes default to those of [parallel] for the LLM and to 1 for other modules, except that
    colocated encoders have the LLM's `tensor`, with all other ranks as replicas and shards."""
    replicate: int | None = Field(default=None, ge=-1)
    """Data-parallel replicas of this module; -1: the remaining ranks."""
    shard: int | None = Field(default=None, ge=-1)
    """Ranks over which FSDP2 shards this module; -1: the remaining ranks."""
    tensor: int | None = Field(default=None, ge=1)
    """Tensor-parallel ranks of this module."""
    context: int | None = Field(default=None, ge=1)
    """LLM: ranks out of the `shard` ranks that divide the tokens of every microbatch among
    themselves, and its images among their encoders; in attention, or what layers have in its place,
    they divide heads. For long sequences. Default: 1, each has microbatches of its own."""
    segments: int | None = Field(default=None, ge=1)
    """Stages of this module per rank, for colocated encoders and for the schedules "separated",
    "searched" and "csv:...". Default: `parallel.virtual_stages` for the LLM and 1 for encoders.
    Colocated encoders have one stage per layer by default, so that stages fit into bubbles.
    "searched" chooses the number with the fastest simulated first step."""
    sub_microbatch_images: int | None = Field(default=None, ge=1)
    """Encoders and generator: most images processed together; a microbatch is cut into groups of
    nearly equal size. Smaller groups fill gaps in the pipeline better, larger ones keep the device
    busier. Without a pipeline, all images of a microbatch are processed together. Default: 4 under
    a schedule with separated modules, all images of a microbatch under others; under "searched"
    what makes the first step fastest in simulation."""


@with_extensions
class ParallelConfig(Section):
    """How ranks share the work. pipeline x replicate x shard x tensor = number of ranks."""

    model_config = ConfigDict(extra="allow")
    named_tables: ClassVar[type[Section] | None] = ModuleParallelConfig
    __pydantic_extra__: dict[str, ModuleParallelConfig] = Field(init=False)

    pipeline: int = Field(default=1, ge=1)
    """Pipeline ranks, among which every module's layers are divided."""
    schedule: str = "separated"
    """Order of forwards and backwards in a pipeline, and how modules are cut for it. "gpipe",
    "1f1b", "interleaved_1f1b", "zero_bubble", "megatron_balanced": all layers as one chain in
    equally costly stages; "megatron": whole encoders in front of the LLM's first stage;
    "separated": every module in separate segments over all ranks; "searched": the same in an
    order that is searched for each step ([parallel.search]); "csv:PATH": an order from a file, for
    separated modules; "optimus": colocated encoders in the LLM's bubbles."""
    placement: Placement = "interleaved"
    """Which ranks run which module. "interleaved": all ranks run all modules; "colocated": the
    same, but encoders have separate sizes ([parallel.NAME]), with several shorter pipelines;
    "disaggregated": each module has separate ranks and sizes, with the LLM's in [parallel],
    under schedule "separated", "1f1b", "interleaved_1f1b", "gpipe" or "zero_bubble"."""
    auto_sizes: bool = False
    """Choose sizes for `simulation.device`, by simulating the first step. With colocated encoders:
    what is not given of pipeline and tensor-parallel sizes, images at once and stages of encoders;
    with disaggregated modules: all sizes of
    all modules for exactly the ranks there are, schedule and recomputation, whatever is given
    (`scripts/plan.py` shows them)."""
    llm_schedule: LlmSchedule = "interleaved_1f1b"
    """Order of the LLM's own forwards and backwards under "optimus". "searched": interleaved 1F1B,
    or what a search of the LLM alone finds, whichever makes the step shorter."""
    bubble_granularity: Literal["fine", "coarse"] = "fine"
    """Where "optimus" puts encoders: "fine": wherever a rank of the LLM is idle; "coarse": only
    before its first action and after its last."""
    tp_comm_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the LLM's actions in which tensor-parallel communication leaves ranks idle.
    "optimus" runs encoder layers in pieces (groups of kernels) during this communication, if the
    simulated step becomes shorter. Layers are then not compiled. 0: encoders never run there."""
    replan_threshold: float = Field(default=0.0, ge=0)
    """With a pipeline: relative difference between measured and planned times above which the next
    steps are planned with measured times, for example 0.1 for 10 %. Before that, plans use FLOPs,
    and "optimus" uses all costs of the device profile. With 0, plans use FLOPs only and a resumed
    run is bit-identical; "optimus" then uses [parallel.search]."""
    virtual_stages: int = Field(default=1, ge=1)
    """Stages per rank; with separated modules: of the LLM."""
    replicate: int = Field(default=1, ge=-1)
    """Data-parallel replicas, each holding all parameters of its shards (HSDP); -1: the remaining
    ranks."""
    shard: int = Field(default=-1, ge=-1)
    """Ranks over which FSDP2 shards parameters, gradients and optimizer state; -1: the remaining
    ranks."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP2 frees gathered parameters after each forward and gathers them again for
    backward; "default": only without a pipeline, which gathers them once per step."""
    gradient_reduction: Literal["step", "microbatch"] = "step"
    """When FSDP2 reduces gradients. "step": once per step, in the last backward; until then every
    rank accumulates unsharded gradients, 4 bytes per trained parameter (gradient accumulation with
    `no_sync`). "microbatch": in every backward, into sharded gradients (gradient accumulation
    without `no_sync`), which uses less memory and sends more; replicas are all-reduced once per
    step in both cases. Requires `pipeline` = 1 and float32 parameters."""
    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel ranks that split every layer."""
    expert: int = Field(default=1, ge=1)
    """Ranks out of the `shard` ranks that divide the LLM's experts among themselves and exchange
    tokens; 1: every rank computes all experts (those of its tensor-parallel part), whose weights
    FSDP2 gathers."""
    sequence_parallel: bool = False
    """Also split activations between the tensor-parallel regions along the sequence. Ranks then
    send each other slices of messages, too."""
    async_tensor_parallel: bool = False
    """Gather and scatter these activations in blocks, overlapped with the matrix products that
    produce and consume them; needs `tensor` > 1 and `sequence_parallel`."""
    async_tensor_backend: Literal["auto", "symmetric_memory", "ring", "collective"] = "auto"
    """How: "symmetric_memory" (CUDA, one host: copies without multiprocessors), "ring" (sends and
    receives), "collective" (overlap in backward only); "auto": the first that works."""
    async_tensor_chunks: int = Field(default=0, ge=0)
    """Blocks into which "ring" cuts a rank's slice of the sequence; 0: the fastest in a short
    measurement at the start."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective backend; "auto": NCCL on CUDA, gloo on CPU. Several ranks' tensors travel by no
    other, which is refused."""
    timeout_s: int = Field(default=300, ge=1)
    """Seconds a rank waits for a peer before the run stops with exit code 6."""
    slow_rank_threshold: float = Field(default=2.0, ge=0)
    """Before the first step all ranks time a matrix product, a copy and a gather in each of their
    groups; the log names ranks that are so many times slower than usual. 0: nothing is timed."""

    @property
    def modules(self) -> dict[str, ModuleParallelConfig]:
        """The tables [parallel.NAME], by name."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def leaves_units_open(self) -> bool:
        """Whether sizes of modules on ranks of their own are still to be planned, whatever is
        given: they and the schedule are no concern of checks until then."""
        return self.auto_sizes and self.placement == "disaggregated"

    @property
    def separates_modules(self) -> bool:
        """Whether the schedule gives every module separate stages on all pipeline ranks."""
        schedule = find_schedule(self.schedule)
        return schedule is not None and schedule.cut == "separated"

    @property
    def splits_backward(self) -> bool:
        """Return True if backward passes compute gradients of inputs and weights separately."""
        colocated = self.placement == "colocated"
        schedule = find_schedule(self.llm_schedule if colocated else self.schedule)
        is_cut = self.pipeline > 1 or self.placement == "disaggregated"
        return is_cut and schedule is not None and schedule.splits_backward

    def sizes_given(self, name: str) -> dict[str, int]:
        """Those of `pipeline`, `replicate`, `shard` and `tensor` that are set for a module."""
        module = self.modules.get(name, ModuleParallelConfig())
        return module.model_dump(include=set(AXES), exclude_none=True)

    @property
    def context(self) -> int:
        """Ranks that divide the tokens of a microbatch of the LLM."""
        return self.modules.get(LLM, ModuleParallelConfig()).context or 1

    @property
    def mirrors(self) -> int:
        """Ranks of a plan that are one tensor-parallel group of the LLM: each as many ranks as
        divide the groups of all colocated encoders."""
        if self.placement != "colocated":
            return 1
        sizes = (module.tensor or self.tensor for module in self.modules.values())
        return self.tensor // gcd(self.tensor, *sizes)

    def encoder_tensor(self, name: str) -> int:
        """Tensor-parallel ranks of a colocated encoder."""
        return self.sizes_given(name).get("tensor", self.tensor)

    def encoder_mirrors(self, name: str) -> int:
        """Ranks of a plan that are one tensor-parallel group of a colocated encoder."""
        if self.placement != "colocated":
            return 1
        return self.encoder_tensor(name) * self.mirrors // self.tensor

    @property
    def bounds_encoders(self) -> bool:
        """Whether encoders recompute in tasks that would not fit into memory otherwise."""
        return self.schedule == "optimus"

    def segments(self, name: str) -> int:
        """Stages of a module per pipeline rank, under a schedule with separated modules."""
        given = self.modules.get(name, ModuleParallelConfig()).segments
        return given or (self.virtual_stages if name == "llm" else 1)

    def slices(self, name: str) -> int | None:
        """Stages of a colocated encoder per rank of its pipelines; None: one for each layer."""
        return self.modules.get(name, ModuleParallelConfig()).segments

    def sub_microbatch_images(self, name: str) -> int | None:
        """Most images an encoder processes together; None: all of a microbatch."""
        given = self.modules.get(name, ModuleParallelConfig()).sub_microbatch_images
        return given or (4 if self.separates_modules else None)
