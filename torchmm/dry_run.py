"""What a run would be, without starting it: modules, layout, batch and memory per rank.

Built from the recipe alone on the meta device, so it costs seconds and no memory for models and
clusters that are not at hand. Also the content of the table a run shows at its start.
"""

from __future__ import annotations

from torchmm.balance.memory import MemoryEstimate, estimate_memory
from torchmm.config import Recipe
from torchmm.models.multimodal import MultimodalModel
from torchmm.models.registry import build_model
from torchmm.recipe import resolve_layout


def run_memory(recipe: Recipe, model: MultimodalModel, world_size: int) -> MemoryEstimate:
    """Estimated bytes per rank; every token of a microbatch is assumed to be an image's."""
    layout = resolve_layout(recipe.parallel, world_size)
    training = recipe.training
    llm_tokens = training.microbatch_size * training.sequence_length
    modules = [m.describe() for m in model.modality_modules()]
    checkpointing = recipe.activation_checkpoint
    ranks = layout.data_parallel * training.microbatch_size
    return estimate_memory(
        modules,
        {m.name: llm_tokens * (1 if m.kind == "llm" else m.merge**2) for m in modules},
        shard=layout.shard,
        tensor=layout.tensor,
        compute_bytes=2 if training.dtype == "bfloat16" else 4,
        microbatches=max(1, training.global_batch_size // ranks),
        recompute={m.name: checkpointing.modules.get(m.name, checkpointing.mode) for m in modules},
        pipeline=layout.pipeline,
    )


def run_summary(recipe: Recipe, model: MultimodalModel, world_size: int) -> dict[str, str]:
    """Label and value of each line of the start table."""
    layout = resolve_layout(recipe.parallel, world_size)
    training = recipe.training
    memory = run_memory(recipe, model, world_size)
    lines = {}
    for name, (total, trainable) in model.parameter_counts().items():
        state = "frozen" if trainable == 0 else "trained"
        lines[name] = f"{total / 1e6:,.1f} M parameters, {state}"
    pipeline = f"pipeline {layout.pipeline} x " if layout.pipeline > 1 else ""
    lines["ranks"] = (
        f"{world_size} = {pipeline}replicate {layout.replicate} x shard {layout.shard} "
        f"x tensor {layout.tensor}"
    )
    lines["batch"] = (
        f"{training.global_batch_size} sequences of {training.sequence_length} tokens, "
        f"{training.microbatch_size} per microbatch"
    )
    gib = 1 / 2**30
    lines["memory per rank"] = (
        f"about {memory.total_bytes * gib:.2f} GiB: weights {memory.weight_bytes * gib:.2f}, "
        f"gradients {memory.gradient_bytes * gib:.2f}, optimizer "
        f"{memory.optimizer_bytes * gib:.2f}, activations {memory.activation_bytes * gib:.2f}"
    )
    return lines


def describe_run(recipe: Recipe, world_size: int) -> str:
    """The start table of `recipe` on `world_size` ranks, as text.

    Raises:
        ConfigError: the model cannot be built as the recipe says.
    """
    model = build_model(recipe.model, recipe.freeze)
    lines = run_summary(recipe, model, world_size)
    width = max(len(k) for k in lines)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in lines.items())
