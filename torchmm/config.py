"""The recipe schema: every section and key of a recipe, with its type, default and meaning.

A recipe is data: this module knows no torch and no mesh. It is strict (an unknown key or a value
of the wrong type is an error) and frozen. `torchmm.recipe` reads TOML files into it and collects
all problems; `scripts/recipe_reference.py` writes `docs/recipes.md` from the docstrings below.
Only the trainer and `train.py` see a whole `Recipe`; everything else takes its own section.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from torchmm.config_activation import ActivationCheckpointConfig
from torchmm.config_data import DataConfig, SourceConfig
from torchmm.config_model import (
    EncoderConfig,
    FreezeConfig,
    GeneratorConfig,
    LlmConfig,
    ModelConfig,
    Section,
)
from torchmm.config_search import SearchConfig
from torchmm.config_simulation import SimulationConfig
from torchmm.config_video import VideoConfig

__all__ = [
    "COLOCATED_SCHEDULES",
    "MODULE_SIZES",
    "SCHEDULES",
    "ActivationCheckpointConfig",
    "CheckpointConfig",
    "CompileConfig",
    "DataConfig",
    "EncoderConfig",
    "FreezeConfig",
    "GeneratorConfig",
    "LlmConfig",
    "MetricsConfig",
    "ModelConfig",
    "ModuleParallelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Placement",
    "Recipe",
    "SearchConfig",
    "Section",
    "SimulationConfig",
    "SourceConfig",
    "TrainingConfig",
    "ValidationConfig",
    "VideoConfig",
]


class ModuleParallelConfig(Section):
    """One module in the pipeline; NAME is "llm", "generator" or the name of an encoder."""

    pipeline: int | None = Field(default=None, ge=1)
    """Pipeline ranks of this module, where its `parallel.placement` gives it sizes of its own.
    Default, of all four sizes: those of [parallel] for the LLM, 1 for other modules; but where
    encoders are colocated, `tensor` is the LLM's and all other ranks are replicas and shards."""
    replicate: int | None = Field(default=None, ge=-1)
    """Data-parallel replicas of this module; -1: what is left."""
    shard: int | None = Field(default=None, ge=-1)
    """Ranks over which FSDP2 shards this module; -1: what is left."""
    tensor: int | None = Field(default=None, ge=1)
    """Tensor-parallel ranks of this module."""
    segments: int | None = Field(default=None, ge=1)
    """Stages of this module per rank, under a schedule with separated modules ("separated",
    "searched", "csv:..."), and of colocated encoders. Default: `parallel.virtual_stages` for the
    LLM, 1 for encoders; one for each layer of colocated encoders, whose stages have to fit into
    bubbles. Under "searched": so many that stages of all modules take about equally long."""
    sub_microbatch_images: int | None = Field(default=None, ge=1)
    """Encoders and generator: images processed together at most; a microbatch is cut into groups of
    nearly equal size. Fewer fill gaps in the pipeline better, more keep the device busier. Default:
    4 under a schedule with separated modules, all images of a microbatch under the others; under
    "searched" the fewest that are nearly as efficient as any number (by the cost model)."""


Placement = Literal["interleaved", "colocated", "disaggregated"]

MODULE_SIZES = ("pipeline", "replicate", "shard", "tensor")
"""Keys of [parallel] that [parallel.NAME] may set for one module."""

SCHEDULES = (
    "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "megatron", "megatron_balanced",
    "separated", "searched",
)  # fmt: skip
"""Names `parallel.schedule` may have, beside "csv:PATH"."""

COLOCATED_SCHEDULES = ("optimus",)
"""Those it may have where encoders are colocated."""


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
    "separated": every module in segments of its own over all ranks; "searched": the same in an
    order that is searched for each step ([parallel.search]); "csv:PATH": an order from a file, for
    separated modules; "optimus": colocated encoders in the LLM's bubbles."""
    placement: Placement = "interleaved"
    """Where modules lie: "interleaved": on the same ranks; "colocated": too, but encoders have
    sizes of their own ([parallel.NAME]): pipelines with fewer ranks, and so several of them;
    "disaggregated": each on ranks and with sizes of its own, those of [parallel] being the LLM's,
    under schedule "separated", "1f1b", "interleaved_1f1b", "gpipe" or "zero_bubble"."""
    orchestrate: bool = False
    """Choose sizes for `simulation.device`: with colocated encoders, the pipeline and
    tensor-parallel ranks of those that have none given, by simulating the first step; with
    disaggregated modules, all sizes of all modules, from costs on sampled data (`scripts/plan.py`
    shows them)."""
    llm_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "interleaved_1f1b"
    """Order of the LLM's own forwards and backwards under "optimus"."""
    bubbles: Literal["fine", "coarse"] = "fine"
    """Where "optimus" puts encoders: "fine": wherever a rank of the LLM is idle; "coarse": before
    its first action and behind its last only."""
    tensor_bubbles: float = Field(default=0.0, ge=0, lt=1)
    """Share of the LLM's actions in which tensor-parallel communication leaves ranks idle, for
    "optimus" to put encoder layers into; on CUDA they run beside, on the CPU before the LLM's."""
    search: SearchConfig = SearchConfig()
    replan_drift: float = Field(default=0.0, ge=0)
    """With a pipeline: how far measured times may drift away from those that steps are planned with
    (0.1: 10 %) before the next steps are planned with new ones. 0: never; orders then follow from
    FLOPs alone, and a resumed run gives the same bits."""
    virtual_stages: int = Field(default=1, ge=1)
    """Stages per rank; with separated modules: of the LLM."""
    replicate: int = Field(default=1, ge=-1)
    """Data-parallel replicas, each holding all parameters of its shards (HSDP); -1: what is
    left."""
    shard: int = Field(default=-1, ge=-1)
    """Ranks over which FSDP2 shards parameters, gradients and optimizer state; -1: what is left."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP2 frees gathered parameters behind each forward and gathers them again for
    backward; "default": only without a pipeline, which gathers them once per step."""
    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel ranks that split every layer."""
    sequence_parallel: bool = False
    """Also split activations between the tensor-parallel regions along the sequence."""
    async_tensor_parallel: bool = False
    """Gather and scatter these activations in blocks, below the matrix products in front of and
    behind them; needs `tensor` > 1 and `sequence_parallel`."""
    async_tensor_backend: Literal["auto", "symmetric_memory", "ring", "collective"] = "auto"
    """How: "symmetric_memory" (CUDA, one host: copies without multiprocessors), "ring" (sends and
    receives), "collective" (below backward's products only); "auto": the first that works."""
    async_tensor_chunks: int = Field(default=0, ge=0)
    """Blocks into which "ring" cuts what a rank has of the sequence; 0: the fastest in a short
    measurement at the start."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective backend; "auto": NCCL on CUDA, gloo on CPU."""
    timeout_s: int = Field(default=300, ge=1)
    """Seconds a rank waits for a peer before the run stops with exit code 6."""

    @property
    def modules(self) -> dict[str, ModuleParallelConfig]:
        """The tables [parallel.NAME], by name."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def separates_modules(self) -> bool:
        """Whether the schedule gives every module stages of its own on all pipeline ranks."""
        return self.schedule in ("separated", "searched") or self.schedule.startswith("csv:")

    def sizes_given(self, name: str) -> dict[str, int]:
        """A module's own `pipeline`, `replicate`, `shard` and `tensor`, as far as they are set."""
        module = self.modules.get(name, ModuleParallelConfig())
        return module.model_dump(include=set(MODULE_SIZES), exclude_none=True)

    @property
    def mirrors(self) -> int:
        """Tensor-parallel groups of colocated encoders in one of the LLM."""
        if self.placement != "colocated":
            return 1
        sizes = (module.tensor or self.tensor for module in self.modules.values())
        return self.tensor // min(sizes, default=self.tensor)

    def segments(self, name: str) -> int:
        """Stages of a module per pipeline rank, under a schedule with separated modules."""
        given = self.modules.get(name, ModuleParallelConfig()).segments
        return given or (self.virtual_stages if name == "llm" else 1)

    def slices(self, name: str) -> int | None:
        """Stages of a colocated encoder per rank of its pipelines; None: one for each layer."""
        return self.modules.get(name, ModuleParallelConfig()).segments

    def sub_microbatch_images(self, name: str) -> int | None:
        """Images an encoder processes together at most; None: all of a microbatch."""
        given = self.modules.get(name, ModuleParallelConfig()).sub_microbatch_images
        return given or (4 if self.separates_modules else None)


class OptimizerConfig(Section):
    """AdamW and the learning rate schedule."""

    lr: float = Field(default=3e-4, ge=0)
    """Peak learning rate."""
    module_lr: dict[str, float] = Field(default={})
    """Peak learning rate by module name ("llm", "NAME", "generator", "NAME.connector"), instead of
    `lr`."""
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """AdamW decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay; not applied to vectors (norms, biases) and embeddings."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after warmup: cosine, warmup-stable-decay (linear decay at the end), constant."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of all steps spent decaying ("wsd")."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, relative to the peak ("cosine", "wsd")."""


class TrainingConfig(Section):
    """Length of the run, batch sizes, numerics."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    global_batch_size: int = Field(default=8, ge=1)
    """Packed sequences per optimizer step over all ranks."""
    microbatch_size: int = Field(default=1, ge=1)
    """Packed sequences per forward and backward on one rank; the rest is gradient accumulation."""
    sequence_length: int = Field(default=1024, ge=8)
    """Tokens per packed sequence; longer samples are truncated."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, sample order and dropout."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype. With bfloat16, parameters, reductions and optimizer state stay float32."""
    deterministic: bool = False
    """Deterministic kernels only (slower); two runs then give the same bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto": CUDA where there is a device."""


class ValidationConfig(Section):
    """Loss and captions on held-out samples during the run."""

    interval: int = Field(default=0, ge=0)
    """Steps between validations; also done after the last step; 0: never."""
    batches: int = Field(default=4, ge=1)
    """Global batches of held-out samples per validation (always the same ones)."""
    samples: int = Field(default=0, ge=0)
    """Held-out images for which the model generates text, saved in samples.json."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Longest generated text, in tokens."""
    drawings: int = Field(default=0, ge=0)
    """Held-out texts for which the generator draws images, saved in `drawings/`."""
    denoising_steps: int = Field(default=25, ge=1)
    """Steps from noise to image; each is a forward of the whole model."""


class CheckpointConfig(Section):
    """Saving, keeping and resuming."""

    interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; also saved after the last step; 0: never."""
    keep: int = Field(default=2, ge=1)
    """Newest valid checkpoints kept; older ones are removed."""
    asynchronous: bool = True
    """Write in the background while training goes on."""
    resume: str = "auto"
    """"auto": newest valid checkpoint of the run directory, if any; "none": start afresh;
    otherwise the directory of a checkpoint."""
    resume_changed_data: bool = False
    """Resume although samples or their order are not those the checkpoint was trained on. Sources
    with random access go on at the number of samples drawn, changed streams from their beginning;
    samples of the current pass may come again or be left out. Without it: exit code 4."""
    export_hf: bool = True
    """Write a Hugging Face directory (`hf/`) after the last step."""


class MetricsConfig(Section):
    """What is recorded and where it is shown. metrics.jsonl is always written."""

    log_interval: int = Field(default=1, ge=1)
    """Steps between progress lines and tracker records."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode. If the service cannot be reached, training goes on without it."""
    wandb_project: str = "torchmm"
    """Weights & Biases project."""
    tensorboard: bool = False
    """Write TensorBoard events to `tensorboard/` in the run directory."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak of one device in TFLOP/s for MFU; default: the data sheet value of a known GPU,
    a short matrix-product measurement on CPU."""
    profile_step: int = Field(default=0, ge=0)
    """Step recorded by the PyTorch profiler as a trace in `profile/`; 0: none."""
    timeline_step: int = Field(default=5, ge=0)
    """Step of whose pipeline a picture, a trace and the records are saved in `timeline/` (the last
    step if there are fewer); 0: none. Without a pipeline there is nothing to show."""
    memory_snapshot_step: int = Field(default=0, ge=0)
    """Step after which a CUDA memory snapshot is written to `profile/`; 0: none."""


class CompileConfig(Section):
    """torch.compile."""

    enabled: bool = False
    """Compile every layer."""
    modules: list[str] = Field(default=[])
    """Module names to compile; empty: all."""


class Recipe(Section):
    """A whole run."""

    name: str = "run"
    """Name of the run; its files lie in `output_dir`/`name`."""
    output_dir: str = "outputs"
    """Parent of the run directory."""
    model: ModelConfig = ModelConfig()
    freeze: FreezeConfig = FreezeConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: CompileConfig = CompileConfig()
    simulation: SimulationConfig = SimulationConfig()
