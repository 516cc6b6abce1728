"""`[training]` and its neighbours: optimizer, validation, checkpoints, metrics, compilation and
recomputation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from torchmm.common.extensions import Entry, find_entries
from torchmm.common.layers import DeltaSizes, ModuleDescription
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.section import Section, with_extensions

FixedMode = Literal["none", "selective", "full"]
Mode = Literal["none", "selective", "full", "auto"]
STATE_BLOCK = 64
"""Values of 8 bits that have a common scale."""
UPDATE_PORTION = 2**24
"""Parameters that are updated together where they or their states rest in fewer bytes."""
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "%": 0.01}


class ActivationCheckpointConfig(Section):
    """What backward recomputes instead of keeping."""

    mode: Mode = "none"
    """"none" keeps all activations; "full" keeps only layer inputs; "selective" keeps the results
    of matrix products and attention and recomputes the rest. It is "full" for layers that run on
    CUDA without torch.compile (`compile.enabled`), where it would take longer. "auto" chooses one
    of these for every layer and microbatch, anew in every step, so as to use memory up to
    `memory_limit` and recompute as little as possible. Under schedule "optimus" encoders with
    "none" are tuned too where a step would not fit into `memory_limit`; it is not refused if it
    still does not."""
    modules: dict[str, Mode] = Field(default={})
    """Mode by module name, instead of `mode`."""
    memory_limit: str = "85%"
    """With mode "auto", and of encoders under "optimus": what a rank may use, as a share of the
    device's memory ("85%"; on a CPU, of that of `simulation.device`) or as an amount ("60 GiB",
    "512 MiB"). It includes weights, gradients, optimizer state, messages and activations; leave
    room for temporaries inside layers and fragmentation. An "auto" step that does not fit with
    everything recomputed is refused."""
    offload: bool = True
    """With mode "auto", on devices with separate memory: whether inputs of recomputed layers may
    be kept in the host's memory where that costs the least time."""

    def fixed_mode(self, module: str, *, is_eager_on_cuda: bool) -> FixedMode:
        """Return the mode of all tasks of a module, or "none" if plans choose the modes.

        Args: See `mode_of`.
        """
        mode = self.mode_of(module, bounded=False, is_eager_on_cuda=is_eager_on_cuda)
        return "none" if mode == "auto" else mode

    def tunes(self, module: str) -> bool:
        """Whether plans choose what the module's layers recompute, and have to fit."""
        return self.modules.get(module, self.mode) == "auto"

    def mode_of(self, module: str, *, bounded: bool, is_eager_on_cuda: bool) -> Mode:
        """Return the mode that a module is built for, "auto" if plans choose the modes.

        Args:
            module: Name of the module.
            bounded: Whether plans choose the modes of modules with "none", see `mode`.
            is_eager_on_cuda: Whether the layers run on CUDA without torch.compile. Eager selective
                recomputation dispatches every operator in Python, which takes the host more time
                than recomputing the layer takes the GPU. "selective" is then "full".
        """
        mode = self.modules.get(module, self.mode)
        if mode == "selective" and is_eager_on_cuda:
            return "full"
        return "auto" if bounded and mode == "none" else mode


def limit_bytes(limit: str, device_bytes: float) -> int:
    """A memory limit in bytes.

    Args:
        limit: as in the recipe.
        device_bytes: memory of the device, for limits that are a share of it.

    Raises:
        ValueError: it is neither a share nor an amount.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|%)\s*", limit)
    number = float(found[1]) if found else 0.0
    if found is None or number == 0 or (found[2] == "%" and number > 100):
        raise ValueError(
            'is not a memory limit; use a fraction of the device memory ("85%") or an amount '
            '("60 GiB", "512 MiB") above 0'
        )
    scale = _UNITS[found[2]]
    return round(number * scale * (device_bytes if found[2] == "%" else 1))


OPTIMIZERS: Sequence[Entry] = (
    Entry("adamw", "torchmm.training.optimizers.adamw:LocalAdamW"),
    Entry("muon", "torchmm.training.optimizers.muon:LocalMuon"),
)
"""Optimizers of the core (`torchmm.training.optimizers.optimizer`)."""
COMPACT = "compact_"
"""Prefix of optimizers whose parameters or states are not stored in float32 on the device."""

if TYPE_CHECKING:
    OptimizerName = str
else:
    _entries = (*OPTIMIZERS, *find_entries("optimizers"))
    _names = [entry.name for entry in _entries if not entry.name.startswith(COMPACT)]
    OptimizerName = Literal[tuple(_names)]


class OptimizerConfig(Section):
    """The optimizer, how its states rest, and the learning rate schedule."""

    name: OptimizerName = "adamw"
    """"adamw"; "muon": matrices of layers move by their momentum, made orthogonal (scaled so that
    AdamW's learning rates and weight decay fit), all else by AdamW."""
    lr: float = Field(default=3e-4, ge=0)
    """Peak learning rate."""
    module_lr: dict[str, float] = Field(default={})
    """Peak learning rate by module name ("llm", "NAME", "generator", "NAME.connector"), instead of
    `lr`."""
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """AdamW decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's (Nesterov) momentum."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """How moments rest between steps; updates are computed in float32. "bfloat16" is rounded at
    random, right in the mean; "int8" has a float32 scale for every 64 values, and leaves vectors in
    float32."""
    stochastic_rounding: bool = True
    """Whether updated bfloat16 parameters (`training.parameter_dtype`) are rounded at random, so
    that steps smaller than their resolution count in the mean, or to the nearest."""
    offload: bool = False
    """Keep the states in the host's memory; they visit the device for the update, a portion at a
    time, copied while others are computed with."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay; not applied to vectors (norms, biases) and embeddings."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after warmup: cosine, warmup-stable-decay (linear decay at the end), constant."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of all steps spent decaying ("wsd")."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, relative to the peak ("cosine", "wsd")."""


def optimizer_entry(config: OptimizerConfig, *, is_narrow: bool) -> Entry | None:
    """Return the entry of an optimizer. None if no installed extension has it.

    Args:
        config: Section of the recipe.
        is_narrow: Whether parameters are stored in bfloat16.
    """
    is_compact = is_narrow or config.offload or config.state_dtype != "float32"
    name = f"{COMPACT}{config.name}" if is_compact else config.name
    entries = (*OPTIMIZERS, *find_entries("optimizers"))
    return next((entry for entry in entries if entry.name == name), None)


class TrainingConfig(Section):
    """Length of the run, batch sizes, numerics."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps. Set either `steps` or `epochs`; it replaces the other one of a base."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training data instead of `steps`, as the metric `epoch` counts them. Needs
    data with random access (not `streaming`). The run counts the steps before it starts, and the
    learning rate schedule uses them. Above 1,000 steps the count is extrapolated from the first
    1,000."""
    global_batch_size: int = Field(default=8, ge=1)
    """Packed sequences per optimizer step over all ranks."""
    microbatch_size: int = Field(default=1, ge=1)
    """Packed sequences per forward and backward on one rank; the rest is gradient accumulation."""
    sequence_length: int = Field(default=1024, ge=8)
    """Tokens per packed sequence; longer samples are truncated."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, sample order and dropout."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype. With bfloat16, reductions and sums of gradients stay float32; so do parameters
    and optimizer state, unless `parameter_dtype` and `optimizer.state_dtype` say otherwise."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """How parameters rest, frozen ones too. "bfloat16" needs `dtype` = "bfloat16"; the optimizer
    then gets gradients in bfloat16, and `optimizer.stochastic_rounding` says how it rounds."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keep an exponential moving average of the trained weights, in float32: after each step
    `ema_decay` of what it was, and the rest of what the weights are. It begins as the weights after
    the first step, is saved in checkpoints and exported beside the weights (`hf-ema/`)."""
    deterministic: bool = False
    """Deterministic kernels only (slower); runs are then bit-identical."""
    attention: Literal["default", "fa3", "fa4"] = "default"
    """Kernels of attention on CUDA: torch's own, or those of FlashAttention 3 or 4, where their
    packages are installed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto": CUDA if there is a device."""


@with_extensions
class ValidationConfig(Section):
    """Loss and captions on held-out samples during the run."""

    interval: int = Field(default=0, ge=0)
    """Steps between validations; also done after the last step; 0: never."""
    ema: bool = False
    """Validate the averaged weights (`training.ema_decay`) instead of those that are trained; then
    `hf-best/` has these, too."""
    batches: int = Field(default=4, ge=1)
    """Global batches of held-out samples per validation (always the same ones)."""
    num_samples: int = Field(default=0, ge=0)
    """Held-out samples for which the model generates text, saved in samples.json and judged by the
    sources' `metrics`; of sources without, samples with images or sounds."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Longest generated text, in tokens."""
    generated_images: int = Field(default=0, ge=0)
    """Held-out texts for which the generator draws images, saved in `generated_images/`."""
    denoising_steps: int = Field(default=25, ge=1)
    """Steps from noise to image; each is a forward of the whole model."""


Figure = Literal[
    "validation_loss",
    "validation_loss_text",
    "validation_loss_image",
    "word_error_rate",
    "loss",
]


class BestConfig(Section):
    """Which checkpoints are the best."""

    metric: str = "validation_loss"
    """Figure of metrics.jsonl, of the step after which a checkpoint is saved: "validation_loss",
    "validation_loss_text", "validation_loss_image", "word_error_rate", "loss", or a score of a
    held-out source, as in "NAME/vqa_accuracy"."""
    mode: Literal["min", "max"] = "min"
    """Whether low or high values are good."""
    count: int = Field(default=1, ge=1)
    """How many of them are kept."""

    def badness(self, value: float) -> float:
        """The lower, the better."""
        return value if self.mode == "min" else -value


class CheckpointConfig(Section):
    """Saving, keeping and resuming."""

    interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; also saved after the last step; 0: never."""
    keep_latest: int = Field(default=2, ge=1)
    """Newest valid checkpoints kept, here and at `remote_dir`; older ones are removed."""
    keep_best: BestConfig | None = None
    """Older checkpoints that stay, as in { metric = "validation_loss", count = 2 }. Whenever the
    metric is better than ever before, the model is exported to `hf-best/` too."""
    async_save: bool = True
    """Write in the background while training continues."""
    remote_dir: str | None = None
    """Address of a store (`s3://bucket/runs`, `gs://`, any that fsspec writes to) or directory
    (a path, `~/...` or `file:///...`). Committed checkpoints are copied below it in the background,
    into a folder with the name of the run. If the store is slower than checkpoints are saved, only
    the newest is copied. "auto" also resumes from these copies, so machines need not share a disk.
    A copy that fails is logged and counted, and training continues."""
    staging_dir: str | None = None
    """With `remote_dir`: directory where checkpoints are written (below it, in a folder of the
    run's name), instead of the run directory. It may be on a disk of each node's own: every node
    copies what its ranks have written, and what counts is the copy."""
    resume: str = "auto"
    """"auto": newest valid checkpoint of the run directory (or of `staging_dir`) and of
    `remote_dir`, if any; "none": start afresh; otherwise the directory of a checkpoint, or its
    address (`s3://bucket/runs/NAME/step-N-DIGITS`)."""
    allow_data_change: bool = False
    """Resume although samples or their order have changed since the checkpoint. Sources with random
    access continue at the number of samples drawn, changed streams start from their beginning;
    samples of the current pass may be repeated or left out. If false: exit code 4."""
    export_interval: int = Field(default=0, ge=0)
    """Steps between exports to `hf-N/`, which stay; 0: none on the way."""
    export_hf: bool = True
    """Write a Hugging Face directory (`hf/`) after the last step, with adapters added to the
    weights; adapters by themselves are in `adapters/`."""


Artifact = Literal["checkpoints", "exports"]


@with_extensions
class MetricsConfig(Section):
    """What is recorded and where it is shown. metrics.jsonl is always written."""

    log_interval: int = Field(default=1, ge=1)
    """Steps between progress lines and tracker records."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode. If the service cannot be reached, training continues without it."""
    wandb_project: str = "torchmm"
    """Project in Weights & Biases, and in Trackio."""
    artifacts: list[Artifact] = Field(default=[])
    """What becomes artifacts in Weights & Biases as it appears: "checkpoints", "exports" (`hf/` and
    its like, adapters). At its end the run waits until they are sent, for an hour at most."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak of one device in TFLOP/s for MFU; default: the data sheet value of a known GPU,
    a short matrix-product measurement on CPU."""
    profile_step: int = Field(default=0, ge=0)
    """Step recorded by the PyTorch profiler as a trace in `profile/`; 0: none."""


class CompileConfig(Section):
    """torch.compile and CUDA graphs. Compiled code is kept in `~/.cache/torchmm/compile/`, or in
    the directory that the environment variable TORCHINDUCTOR_CACHE_DIR names."""

    enabled: Literal["auto", True, False] = "auto"
    """Whether to compile layers. "auto" compiles on CUDA the layers of LLMs and of encoders that
    pack images and rotate queries and keys (Qwen-VL, Pixtral). Other layers are short: the host
    needs more time for a compiled call than the GPU saves. "auto" does not compile LLMs with
    experts or delta nets, and no layer on the CPU. If torch.compile fails under "auto", the layers
    run without it and the log shows the reason; with true the run fails."""
    modules: list[str] = Field(default=[])
    """Names of the modules to compile. Default: all that `enabled` selects."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile. The others only trace (and differentiate), to find the cause of
    an error."""
    cuda_graphs: bool = False
    """Whether encoders whose images all have one size (SigLIP, CLIP) launch their layers as CUDA
    graphs, on one GPU. This saves host time. The number of images is rounded up to 1, 2, 3, 4, 6,
    8, 12 and so on. Layers that are compiled or recomputed run without graphs, and so do all
    layers of runs on several ranks. If CUDA cannot capture a graph, the log shows the reason and
    the layers run without it."""

    def forces(self, module: str) -> bool:
        """Return True if the recipe requires compiled layers for the module of this name."""
        return self.enabled is True and module in (self.modules or [module])

    def concerns(self, module: ModuleDescription, device: str, parallel: ParallelConfig) -> bool:
        """Return True if the layers of a module are compiled.

        Args:
            module: Sizes of the module.
            device: Type of the device that runs the module, "cuda" or "cpu".
            parallel: Parallelism of the run.
        """
        return not self.reason_for_eager(module, device, parallel)

    def reason_for_eager(
        self, module: ModuleDescription, device: str, parallel: ParallelConfig
    ) -> str:
        """Return why the layers of a module are not compiled, or "" if they are.

        Args: See `concerns`.
        """
        if self.enabled is False or module.name not in (self.modules or [module.name]):
            return "not enabled by compile.enabled and compile.modules"
        if self.enabled is True:
            return ""
        is_llm = module.kind == "llm"
        reasons = {
            f"device is {device}": device != "cuda",
            "parallel.tp_comm_fraction interleaves the layers": parallel.tp_comm_fraction > 0,
            "the schedule splits backward passes": parallel.splits_backward,
            "ranks exchange expert tokens": is_llm and parallel.expert > 1,
            "ranks exchange attention heads": is_llm and parallel.context > 1,
            "layers have experts": any(layer.experts for layer in module.layers),
            "layers have delta nets": any(
                isinstance(layer.mixer, DeltaSizes) for layer in module.layers
            ),
            "layers are small": not is_llm
            and not (
                module.kind == "encoder"
                and all(layer.rotary and not layer.batched for layer in module.layers)
            ),
        }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def reason_against_graphs(
        self, module: ModuleDescription, device: str, ranks: int, *, compiled: bool, recompute: Mode
    ) -> str:
        """Return why the layers of an encoder are not launched as CUDA graphs, or "" if they are.

        A graph has constant addresses, and one forward pass at a time, whose backward pass comes
        before the next forward pass. This is true for runs on one rank.

        Args:
            module: Sizes of the encoder.
            device: Type of the device that runs the module, "cuda" or "cpu".
            ranks: Ranks of the run.
            compiled: Whether torch.compile compiles the layers.
            recompute: Activation checkpointing of the module.
        """
        reasons = {
            "not enabled by compile.cuda_graphs": not self.cuda_graphs or module.kind != "encoder",
            f"device is {device}": device != "cuda",
            f"the step uses {ranks} ranks": ranks > 1,
            "image sizes vary": not all(layer.batched for layer in module.layers),
            "layers have rotary embeddings": any(layer.rotary for layer in module.layers),
            "layers use float8": any(layer.rounded for layer in module.layers),
            "layers are compiled": compiled,
            f'layers are recomputed ("{recompute}")': recompute != "none",
        }
        return next((reason for reason, applies in reasons.items() if applies), "")
