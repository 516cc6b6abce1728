"""The sections of training: optimizer, validation, checkpoints, metrics and compilation."""

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
UPDATE_CHUNK = 2**24
"""Parameters that are updated together where they or their states rest in fewer bytes."""
_BYTE_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "%": 0.01}


class ActivationCheckpointConfig(Section):
    """Activation checkpointing: which activations are recomputed in the backward pass.

    See docs/guides/memory.md.
    """

    mode: Mode = "none"
    """Activation checkpointing mode. "none" saves all activations. "full" saves only layer inputs.
    "selective" saves the outputs of matmuls and attention. On CUDA without torch.compile,
    "selective" is "full", which is then faster. "auto" chooses a mode for every layer and
    microbatch in each step, to recompute as little as `memory_limit` allows. Under schedule
    "optimus", encoders with "none" use "auto" if a step would exceed `memory_limit`. See
    docs/concepts/layer_tuning.md."""
    modules: dict[str, Mode] = Field(default={})
    """Mode by module name, instead of `mode`."""
    memory_limit: str = "85%"
    """Memory limit per rank of mode "auto" and of encoders under "optimus". It is a percentage of
    device memory ("85%") or an amount ("60 GiB", "512 MiB"). On a CPU, the percentage is of
    `simulation.device`. It includes weights, gradients, optimizer state, messages and activations.
    Reserve memory for temporary tensors and fragmentation. If an "auto" step exceeds the limit with
    full recomputation, the run fails."""
    offload: bool = True
    """Whether mode "auto" may keep inputs of recomputed layers in host memory if this saves time.
    Only on devices with separate memory."""

    def fixed_mode(self, module: str, *, is_eager_on_cuda: bool) -> FixedMode:
        """Return the mode of all tasks of a module, or "none" if plans select the modes.

        Args: See `mode_of`.
        """
        mode = self.mode_of(module, bounded=False, is_eager_on_cuda=is_eager_on_cuda)
        return "none" if mode == "auto" else mode

    def selects_layers_automatically(self, module: str) -> bool:
        """Return True if plans select the recomputed layers of the module."""
        return self.modules.get(module, self.mode) == "auto"

    def mode_of(self, module: str, *, bounded: bool, is_eager_on_cuda: bool) -> Mode:
        """Return the mode that a module is built for, or "auto" if plans select the modes.

        Args:
            module: Name of the module.
            bounded: Whether plans select the modes of modules with "none", see `mode`.
            is_eager_on_cuda: Whether the layers run on CUDA without torch.compile. Eager selective
                recomputation dispatches every operator in Python, which takes more host time than
                the GPU needs to recompute the layer. "selective" is then "full".
        """
        mode = self.modules.get(module, self.mode)
        if mode == "selective" and is_eager_on_cuda:
            return "full"
        return "auto" if bounded and mode == "none" else mode


def limit_bytes(limit: str, device_bytes: float) -> int:
    """Return a memory limit in bytes.

    Args:
        limit: Limit in the recipe, a fraction such as "90%" or an amount.
        device_bytes: Memory of the device, for limits that are a fraction of it.

    Raises:
        ValueError: The limit is neither a fraction nor an amount.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|%)\s*", limit)
    number = float(match[1]) if match else 0.0
    if match is None or number == 0 or (match[2] == "%" and number > 100):
        raise ValueError(
            'is not a memory limit; use a fraction of the device memory ("85%") or an amount '
            '("60 GiB", "512 MiB") above 0'
        )
    scale = _BYTE_UNITS[match[2]]
    return round(number * scale * (device_bytes if match[2] == "%" else 1))


OPTIMIZERS: Sequence[Entry] = (
    Entry("adamw", "torchmm.training.optimizers.adamw:LocalAdamW"),
    Entry("muon", "torchmm.training.optimizers.muon:LocalMuon"),
)
"""Optimizers of the core (`torchmm.training.optimizers.optimizer`)."""
LOW_PRECISION_PREFIX = "compact_"
"""Prefix of optimizers whose parameters or states are not stored in float32 on the device."""

if TYPE_CHECKING:
    OptimizerName = str
else:
    _entries = (*OPTIMIZERS, *find_entries("optimizers"))
    _names = [entry.name for entry in _entries if not entry.name.startswith(LOW_PRECISION_PREFIX)]
    OptimizerName = Literal[tuple(_names)]


class OptimizerConfig(Section):
    """The optimizer, the storage of its state, and the learning rate schedule.

    See docs/guides/memory.md.
    """

    name: OptimizerName = "adamw"
    """Optimizer. "muon" updates matrices of layers with orthogonalized momentum, scaled so that
    AdamW learning rates apply. Other parameters use AdamW."""
    lr: float = Field(default=3e-4, ge=0)
    """Peak learning rate."""
    module_lr: dict[str, float] = Field(default={})
    """Peak learning rate by module name ("llm", an encoder name, "generator", "NAME.connector"),
    instead of `lr`."""
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """AdamW betas."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Nesterov momentum of Muon."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Storage dtype of optimizer moments. Updates are computed in float32. "bfloat16" uses
    stochastic rounding. "int8" has a float32 scale per 64 values, and stores vectors in float32."""
    stochastic_rounding: bool = True
    """Whether to round updated bfloat16 parameters stochastically, so that small updates are not
    lost. Only with `training.parameter_dtype` = "bfloat16"."""
    offload: bool = False
    """Whether to store the optimizer state in host memory. It is copied to the GPU for the update
    in chunks, overlapped with the computation."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay. It is not applied to vectors (norms, biases) and embeddings."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum global gradient norm. Larger gradients are scaled down."""
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate schedule after the warmup. "wsd" is constant with a linear decay at the end."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of linear warmup steps."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Fraction of all steps in which "wsd" decays the learning rate."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate relative to the peak, for "cosine" and "wsd"."""


def optimizer_entry(config: OptimizerConfig, *, is_narrow: bool) -> Entry | None:
    """Return the entry of an optimizer. None if no installed extension has it.

    Args:
        config: Section of the recipe.
        is_narrow: Whether parameters are stored in bfloat16.
    """
    is_compact = is_narrow or config.offload or config.state_dtype != "float32"
    name = f"{LOW_PRECISION_PREFIX}{config.name}" if is_compact else config.name
    entries = (*OPTIMIZERS, *find_entries("optimizers"))
    return next((entry for entry in entries if entry.name == name), None)


class TrainingConfig(Section):
    """Duration, batch sizes and numerics of the run."""

    steps: int = Field(default=100, ge=1)
    """Number of optimizer steps. Set either `steps` or `epochs`. The key you set replaces the other
    one in a base recipe."""
    epochs: float | None = Field(default=None, gt=0)
    """Number of passes over the training data, instead of `steps`. Streaming sources and
    `data.mixture_schedule` are not supported. The number of steps is counted before training. Above
    1,000 steps, it is extrapolated from the first 1,000."""
    global_batch_size: int = Field(default=8, ge=1)
    """Number of packed sequences per optimizer step, over all ranks. It must be a multiple of the
    data-parallel size times `microbatch_size`."""
    microbatch_size: int = Field(default=1, ge=1)
    """Number of packed sequences per forward pass on one rank. The remaining sequences are
    accumulated."""
    sequence_length: int = Field(default=1024, ge=8)
    """Number of tokens of a packed sequence. Longer samples are truncated."""
    loss: Literal["cross_entropy", "preference"] = "cross_entropy"
    """Loss of the text. "preference" compares a chosen and a rejected answer (DPO), with the
    settings of `[preference]`. See docs/guides/preference_tuning.md."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Label smoothing of the text loss: the probability that each target divides among all tokens
    of the vocabulary. `loss` and `validation_loss` remain cross entropies, and `loss_smoothed` is
    the smoothed loss."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the z-loss, which keeps the logits small: the mean squared logsumexp of the
    logits is added to the training loss. PaLM uses 1e-4. The metric `loss_z` is the added term."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, sample order and dropout."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype. With bfloat16, gradients are reduced and accumulated in float32. Parameters
    and optimizer state stay in float32, unless `parameter_dtype` or `optimizer.state_dtype` are
    set."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of parameters, including frozen parameters. "bfloat16" requires `dtype` =
    "bfloat16". The optimizer then receives bfloat16 gradients."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average (EMA) of the trained weights, in float32. The average
    starts with the weights after the first step. It is saved in checkpoints and exported to
    `hf-ema/`. If None, there is no average."""
    deterministic: bool = False
    """Whether to use deterministic kernels only. Runs are then bitwise identical, and slower."""
    attention: Literal["default", "fa3", "fa4"] = "default"
    """Attention kernels on CUDA. "default" uses PyTorch. "fa3" and "fa4" use FlashAttention 3 or 4,
    whose packages must be installed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type. "auto" uses CUDA if available."""


@with_extensions
class ValidationConfig(Section):
    """Evaluation on held-out samples during training. See docs/guides/evaluation.md."""

    interval: int = Field(default=0, ge=0)
    """Number of steps between validations. Validation also runs after the last step. 0 disables
    it."""
    ema: bool = False
    """Whether to validate the averaged weights (`training.ema_decay`). `hf-best/` then also has
    these weights."""
    early_stopping_patience: int = Field(default=0, ge=0)
    """Number of consecutive validations without improvement after which the run is complete. The
    metric is that of `checkpoint.keep_best`, or else "validation_loss". 0 disables early
    stopping."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """Amount by which the metric must be better than all earlier values to count as an
    improvement."""
    batches: int = Field(default=4, ge=1)
    """Number of held-out global batches per validation. They are the same each time."""
    num_samples: int = Field(default=0, ge=0)
    """Number of held-out samples for which the model generates text. The text is saved in
    `samples.json` and evaluated with `data.validation[].metrics`. For sources without metrics, only
    samples with media are used."""
    max_new_tokens: int = Field(default=32, ge=1)
    """Maximum number of generated tokens per sample."""
    generated_images: int = Field(default=0, ge=0)
    """Number of held-out prompts for which the generator generates images. They are saved in
    `generated_images/`."""
    denoising_steps: int = Field(default=25, ge=1)
    """Number of denoising steps per image. Each step is a forward pass of the complete model."""


BestMetric = Literal[
    "validation_loss",
    "validation_loss_text",
    "validation_loss_image",
    "word_error_rate",
    "loss",
]


class BestConfig(Section):
    """Selection of the best checkpoints. See docs/guides/checkpoints.md."""

    metric: str = "validation_loss"
    """Metric of `metrics.jsonl` at the step of the checkpoint: "validation_loss",
    "validation_loss_text", "validation_loss_image", "word_error_rate", "loss", or a metric of a
    held-out source, such as "NAME/vqa_accuracy"."""
    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value is the best."""
    count: int = Field(default=1, ge=1)
    """Number of best checkpoints to keep."""

    def sort_key(self, value: float) -> float:
        """Return a value that is lower for better metrics."""
        return value if self.mode == "min" else -value


class CheckpointConfig(Section):
    """Saving, retaining, uploading and resuming checkpoints. See docs/guides/checkpoints.md."""

    interval: int = Field(default=0, ge=0)
    """Number of steps between checkpoints. A checkpoint is also saved after the last step. 0
    disables checkpoints."""
    keep_latest: int = Field(default=2, ge=1)
    """Number of latest valid checkpoints to keep, locally and in `remote_dir`. Older checkpoints
    are deleted."""
    keep_best: BestConfig | None = None
    """Selection of older checkpoints to keep, such as { metric = "validation_loss", count = 2 }.
    Whenever the metric improves, the model is also exported to `hf-best/`."""
    async_save: bool = True
    """Whether to write checkpoints in the background while training continues."""
    remote_dir: str | None = None
    """URL (`s3://bucket/runs`, `gs://` or any writable fsspec URL) or directory to which complete
    checkpoints are uploaded in the background. They are stored in a folder with the run name. If
    uploads are slower than `interval`, intermediate checkpoints are skipped. `resume` = "auto" also
    uses the uploads, so nodes do not need a shared disk. Failed uploads are logged and counted, and
    training continues."""
    staging_dir: str | None = None
    """Directory in which checkpoints are written before the upload, instead of the run directory.
    It can be on the local disk of each node. Each node uploads the files of its ranks. Requires
    `remote_dir`."""
    resume: str = "auto"
    """Checkpoint to resume from. "auto" uses the latest valid checkpoint of the run directory (or
    `staging_dir`) and of `remote_dir`, if any. "none" starts from scratch. Otherwise, set the
    directory or URL of a checkpoint (`s3://bucket/runs/NAME/step-N-DIGITS`)."""
    allow_data_change: bool = False
    """Whether to resume although samples or their order have changed. Indexed sources continue at
    the same number of samples. Changed streaming sources restart. Samples of the current epoch may
    be repeated or skipped. If false, the run stops with exit code 4."""
    export_interval: int = Field(default=0, ge=0)
    """Number of steps between exports to `hf-N/`, which are never deleted. 0 disables these
    exports."""
    export_hf: bool = True
    """Whether to export a Hugging Face model to `hf/` after the last step. Adapters are merged into
    the weights, and also saved in `adapters/`."""


Artifact = Literal["checkpoints", "exports"]


@with_extensions
class MetricsConfig(Section):
    """Metrics, trackers and profiles.

    `metrics.jsonl` is always written. See docs/reference/metrics.md.
    """

    log_interval: int = Field(default=1, ge=1)
    """Number of steps between log lines and tracker records."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode. If the service is not available, training continues without it."""
    wandb_project: str = "torchmm"
    """Project name in Weights & Biases and Trackio."""
    artifacts: list[Artifact] = Field(default=[])
    """Files that are uploaded to Weights & Biases as artifacts: "checkpoints", and "exports" (`hf/`
    and other exports, adapters). At its end, the run waits at most one hour for these uploads."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak TFLOP/s of one device, for the MFU. If None, the data sheet value of a known GPU is
    used, or a short matmul measurement on CPU."""
    profile_step: int = Field(default=0, ge=0)
    """Step that the PyTorch profiler records as a trace in `profile/`. 0 disables it."""


class CompileConfig(Section):
    """torch.compile and CUDA graphs.

    Compiled code is cached in `~/.cache/torchmm/compile/`, or in the directory of the environment
    variable TORCHINDUCTOR_CACHE_DIR. See docs/guides/speed.md.
    """

    enabled: Literal["auto", True, False] = "auto"
    """Whether to compile layers. "auto" compiles, on CUDA, LLM layers without experts or delta
    nets, and layers of encoders that pack images and use rotary embeddings (Qwen-VL, Pixtral). If
    compilation fails under "auto", the layers run uncompiled and the log shows the reason. With
    true, the run fails."""
    modules: list[str] = Field(default=[])
    """Names of the modules to compile. If empty, all modules that `enabled` selects."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile. "aot_eager" and "eager" are for debugging."""
    cuda_graphs: bool = False
    """Whether to run encoders with a fixed image size (SigLIP, CLIP) as CUDA graphs, on one GPU.
    The number of images is rounded up to 1, 2, 3, 4, 6, 8, 12 and so on. Graphs are not used on
    several ranks, nor for compiled or recomputed layers. If CUDA cannot capture a graph, the log
    shows the reason."""

    def requires_compilation(self, module: str) -> bool:
        """Return True if the recipe requires compiled layers for this module."""
        return self.enabled is True and module in (self.modules or [module])

    def applies_to(self, module: ModuleDescription, device: str, parallel: ParallelConfig) -> bool:
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

        Args: See `applies_to`.
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

        A graph has constant addresses and supports one forward pass at a time. Its backward pass
        must precede the next forward pass. This is true for runs on one rank.

        Args:
            module: Sizes of the encoder.
            device: Type of the device that runs the module, "cuda" or "cpu".
            ranks: Number of ranks of the run.
            compiled: Whether torch.compile compiles the layers.
            recompute: Activation checkpointing mode of the module.
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
