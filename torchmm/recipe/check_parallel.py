"""Check the parallelism of a recipe: schedule, stages, tensor parallelism, and their conflicts.

As in `check`, these checks require neither torch nor downloads. Layer counts are available if the
recipe itself has the model config. Otherwise they are checked when the model is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchmm.common.extensions import find_entries
from torchmm.common.module_names import GENERATOR, LLM, VISION
from torchmm.recipe.explain import Problem, Problems, suggest
from torchmm.recipe.model_section import component_configs
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import (
    check_encoder_layers,
    check_unit_layers,
    too_few_layers,
    unit_sizes,
)
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import CSV_PREFIX, SCHEDULES, find_schedule

SCHEDULE_KEY = "parallel.schedule"
PIPELINE_KEY = "parallel.pipeline"
VIRTUAL_STAGES_KEY = "parallel.virtual_stages"
CONTEXT_KEY = "parallel.llm.context"
DYNAMIC_CONTEXT_KEY = "parallel.llm.dynamic_context"


def check_pipeline(recipe: Recipe) -> Problems:
    """Yield problems of the pipeline settings in `[parallel]`."""
    yield from _check_schedule(recipe)
    yield from _check_modules(recipe)
    yield from _check_layers(recipe)
    yield from _check_experts(recipe)
    yield from _check_dynamic_context(recipe)
    yield from _check_context(recipe)


def _check_schedule(recipe: Recipe) -> Problems:
    parallel = recipe.parallel
    name, pipeline = parallel.schedule, unit_sizes(parallel, "llm")["pipeline"]
    order, order_key = name, SCHEDULE_KEY
    if parallel.placement == "colocated":
        order = parallel.llm_schedule
        order_key = "parallel.llm_schedule"
    if name.startswith(CSV_PREFIX):
        if not Path(name.removeprefix(CSV_PREFIX)).expanduser().is_file():
            yield Problem(
                SCHEDULE_KEY, name, "no such file; use csv:PATH with the path of a schedule file"
            )
    elif name not in SCHEDULES:
        text = f"must be one of {', '.join(SCHEDULES)}, or csv:PATH{suggest(name, SCHEDULES)}"
        yield Problem(SCHEDULE_KEY, name, text)
    schedule = find_schedule(order)
    if parallel.virtual_stages > 1 and pipeline == 1:
        text = "has no effect without a pipeline; set parallel.pipeline > 1 or remove the key"
        yield Problem(VIRTUAL_STAGES_KEY, parallel.virtual_stages, text, (PIPELINE_KEY,))
    elif parallel.virtual_stages > 1 and schedule and not schedule.virtual_stages:
        text = (
            f'the schedule "{order}" supports one stage per rank; use 1, or schedule = '
            '"interleaved_1f1b"'
        )
        yield Problem(VIRTUAL_STAGES_KEY, parallel.virtual_stages, text, (order_key,))
    if parallel.reshard_after_forward == "always" and pipeline > 1:
        text = 'would all-gather all parameters for every microbatch of a pipeline; use "default"'
        yield Problem("parallel.reshard_after_forward", "always", text, (PIPELINE_KEY,))
    if parallel.gradient_reduction == "microbatch":
        yield from _check_reduction(recipe)
    if parallel.splits_backward and recipe.compile.enabled is True:
        text = (
            "splits each backward pass in two, which compiled layers do not support; set "
            "compile.enabled = false"
        )
        yield Problem(order_key, order, text, ("compile.enabled", PIPELINE_KEY))


def _check_modules(recipe: Recipe) -> Problems:
    parallel = recipe.parallel
    known = list(_layer_counts(recipe))
    for name in known:
        if name in type(parallel).model_fields:
            text = "conflicts with a key of [parallel]; rename the encoder"
            yield Problem("model.encoders", name, text, ("model",))
    for name, module in parallel.modules.items():
        key = f"parallel.{name}"
        if name not in known:
            text = f"unknown module{suggest(name, known)}; use one of: {', '.join(known)}"
            yield Problem("parallel", name, text, ("model",))
            continue
        if parallel.placement == "interleaved":
            for size, value in parallel.explicit_sizes(name).items():
                text = (
                    "interleaved modules share the parallelism degrees of [parallel]; remove "
                    "the key or set another parallel.placement"
                )
                yield Problem(f"{key}.{size}", value, text, ("parallel.placement",))
        colocated = parallel.placement == "colocated" and name not in ("llm", GENERATOR)
        if module.segments is not None and not (parallel.has_module_segments or colocated):
            text = (
                f'the schedule "{parallel.schedule}" has no separate segments; use '
                '"separated" or remove the key'
            )
            yield Problem(f"{key}.segments", module.segments, text, (SCHEDULE_KEY,))
        elif module.segments is not None and module.segments > 1 and _pipeline(parallel, name) == 1:
            text = "has no effect without a pipeline; set parallel.pipeline > 1 or remove the key"
            yield Problem(f"{key}.segments", module.segments, text, (PIPELINE_KEY,))
        if module.sub_microbatch_images is not None and name == "llm":
            text = (
                "is not supported for the LLM; set it for an encoder, or lower "
                "training.microbatch_size"
            )
            yield Problem(f"{key}.sub_microbatch_images", module.sub_microbatch_images, text)


def _check_reduction(recipe: Recipe) -> Problems:
    """Yield problems of `gradient_reduction = "microbatch"`.

    FSDP2 can reduce gradients in every backward pass only if all ranks run the same backward
    passes.
    """
    parallel = recipe.parallel
    key = "parallel.gradient_reduction"
    if parallel.placement != "interleaved":
        text = 'requires that every rank runs all modules; use "step" or placement = "interleaved"'
        yield Problem(key, "microbatch", text, ("parallel.placement",))
    elif parallel.pipeline > 1:
        text = 'is not supported with pipeline parallelism; use "step"'
        yield Problem(key, "microbatch", text, (PIPELINE_KEY,))
    if parallel.reshard_after_forward == "never":
        text = (
            'all-gathers and reduces once per step; use "default", or gradient_reduction = "step"'
        )
        yield Problem("parallel.reshard_after_forward", "never", text, (key,))
    if recipe.training.parameter_dtype != "float32":
        text = 'would accumulate gradients in bfloat16; use "step"'
        yield Problem(key, "microbatch", text, ("training.parameter_dtype",))


def _check_experts(recipe: Recipe) -> Problems:
    """Yield problems of expert parallelism.

    Ranks that exchange tokens must run the same tasks of the LLM in the same order.
    """
    parallel = recipe.parallel
    expert = parallel.expert
    if expert == 1:
        return
    schedule = find_schedule(parallel.schedule)
    if parallel.placement != "interleaved":
        text = f'is not supported with "{parallel.placement}" modules; use 1 or "interleaved"'
        yield Problem("parallel.expert", expert, text, ("parallel.placement",))
    elif parallel.pipeline > 1 and (schedule is None or schedule.cut == "separated"):
        text = (
            "requires the same task order on all ranks, but separated modules use a "
            'different order per replica; use 1, or schedule = "1f1b"'
        )
        yield Problem("parallel.expert", expert, text, (SCHEDULE_KEY, PIPELINE_KEY))
    if parallel.tensor > 1:
        text = "is not supported with tensor parallelism, which already splits experts; use 1"
        yield Problem("parallel.expert", expert, text, ("parallel.tensor",))
    if recipe.compile.requires_compilation(LLM):
        text = (
            "exchanges tokens inside the layers, which cannot be compiled; remove the LLM "
            "from compile"
        )
        yield Problem("parallel.expert", expert, text, ("compile.enabled", "compile.modules"))
    if recipe.activation_checkpoint.selects_layers_automatically(LLM):
        text = "requires the same recomputation on all ranks; use another mode for the LLM"
        yield Problem("parallel.expert", expert, text, ("activation_checkpoint.mode",))


def _check_dynamic_context(recipe: Recipe) -> Problems:
    """Yield problems of groups of context-parallel ranks that follow the sample lengths."""
    parallel = recipe.parallel
    for name, module in parallel.modules.items():
        if name != LLM and module.dynamic_context is not None:
            text = f"is supported only for the LLM; remove it or set {DYNAMIC_CONTEXT_KEY}"
            yield Problem(f"parallel.{name}.dynamic_context", module.dynamic_context, text)
    if not parallel.dynamic_context:
        return
    context = parallel.context
    if context == 1 or context & (context - 1):
        text = f"requires a power of two above 1 for {CONTEXT_KEY} (found {context})"
        yield Problem(DYNAMIC_CONTEXT_KEY, True, text, (CONTEXT_KEY,))
    size = recipe.training.microbatch_size
    if size > 1:
        text = f"requires training.microbatch_size = 1 (found {size}); use longer sequences"
        yield Problem(DYNAMIC_CONTEXT_KEY, True, text, ("training.microbatch_size",))


def _check_context(recipe: Recipe) -> Problems:
    """Yield problems of context parallelism.

    Ranks that share packed sequences of the LLM are one rank of the plan.
    """
    parallel = recipe.parallel
    for name, module in parallel.modules.items():
        if name != LLM and module.context is not None:
            text = f"is supported only for the LLM; remove it or set {CONTEXT_KEY}"
            yield Problem(f"parallel.{name}.context", module.context, text)
    context = parallel.context
    if context == 1:
        return
    if parallel.placement == "disaggregated":
        text = 'is not supported with "disaggregated" modules; use 1 or another placement'
        yield Problem(CONTEXT_KEY, context, text, ("parallel.placement",))
    if parallel.mirrors > 1:
        text = (
            "is not supported if encoders have a smaller tensor-parallel degree than the "
            "LLM; use 1, or the same tensor for all modules"
        )
        tensors = tuple(f"parallel.{name}.tensor" for name in recipe.model.encoder_names)
        yield Problem(
            CONTEXT_KEY, context, text, ("parallel.placement", "parallel.tensor", *tensors)
        )
    if parallel.auto_sizes:
        text = (
            "is not supported by the search for parallelism degrees; use 1, or "
            "parallel.auto_sizes = false"
        )
        yield Problem(CONTEXT_KEY, context, text, ("parallel.auto_sizes",))
    if recipe.model.generator is not None:
        text = "is not supported with a generator, which requires the tokens of all ranks; use 1"
        yield Problem(CONTEXT_KEY, context, text, ("model.generator",))
    if recipe.compile.requires_compilation(LLM):
        text = (
            "exchanges attention heads inside the layers, which cannot be compiled; "
            "remove the LLM from compile"
        )
        yield Problem(CONTEXT_KEY, context, text, ("compile.enabled", "compile.modules"))
    if recipe.activation_checkpoint.selects_layers_automatically(LLM):
        text = "requires the same recomputation on all ranks; use another mode for the LLM"
        yield Problem(CONTEXT_KEY, context, text, ("activation_checkpoint.mode",))


def _pipeline(parallel: ParallelConfig, module: str) -> int:
    """Return the number of pipeline ranks of a module."""
    is_disaggregated = parallel.placement == "disaggregated"
    return unit_sizes(parallel, module)["pipeline"] if is_disaggregated else parallel.pipeline


def _check_layers(recipe: Recipe) -> Problems:
    """Yield a problem for each module with fewer layers than stages."""
    parallel = recipe.parallel
    counts = _layer_counts(recipe)
    if parallel.placement == "disaggregated":
        yield from check_unit_layers(parallel, counts)
        return
    if parallel.pipeline == 1:
        return
    if parallel.has_module_segments:
        stages = {name: parallel.segments(name) for name in counts}
    elif parallel.placement == "colocated":
        encoders = {n: count for n, count in counts.items() if n not in ("llm", GENERATOR)}
        yield from check_encoder_layers(parallel, encoders)
        stages = {"llm": parallel.virtual_stages}
    elif (schedule := find_schedule(parallel.schedule)) and schedule.cut == "megatron":
        stages = {"llm": parallel.virtual_stages}
    else:
        known = [count for count in counts.values() if count is not None]
        counts = {"all modules": sum(known) if len(known) == len(counts) else None}
        stages = {"all modules": parallel.virtual_stages}
    for name, per_rank in stages.items():
        layers = counts.get(name)
        needed = parallel.pipeline * per_rank
        if layers is not None and layers < needed:
            has = f"{name} has" if name in _layer_counts(recipe) else f"{name} together have"
            text = too_few_layers(has, layers, parallel.pipeline, per_rank)
            also = (VIRTUAL_STAGES_KEY, SCHEDULE_KEY, f"parallel.{name}", "model")
            yield Problem(PIPELINE_KEY, parallel.pipeline, text, also)


def _layer_counts(recipe: Recipe) -> dict[str, int | None]:
    """Return the number of layers by module name. None if no inline config has the number."""
    model = recipe.model
    if model.is_composite:
        config = model.config or {}
        parts = component_configs(config)
        layer_counts = {
            name: _layers(parts[name][1]) if name in parts else None
            for name in (*model.encoder_names, LLM)
        }
        layer = config.get("vision_feature_layer")
        layers = layer_counts.get(VISION)
        if config.get("model_type") == "llava":
            reaches = isinstance(layer, int) and layer < 0 and layers is not None
            layer_counts[VISION] = layers + 1 + layer if reaches else None  # type: ignore[operator]
        return layer_counts | _generator_layers(recipe)
    counts: dict[str, int | None] = {}
    for name, encoder in model.encoders.items():
        layers = _layers(encoder.config)
        counts[name] = None if layers is None else layers + 1 + encoder.feature_layer
    counts[LLM] = _layers(model.llm.config) if model.llm else None
    return counts | _generator_layers(recipe)


def _generator_layers(recipe: Recipe) -> dict[str, int | None]:
    section = recipe.model.generator
    if section is None:
        return {}
    layers = (section.config or {}).get("num_layers")
    return {GENERATOR: layers if isinstance(layers, int) else None}


def _layers(config: Any) -> int | None:
    """Return the number of layers in an inline Hugging Face config.

    The key is `depth` in vision towers of Qwen and `encoder_layers` in audio towers.
    """
    if not isinstance(config, dict):
        return None
    keys = ("num_hidden_layers", "depth", "encoder_layers")
    layers = next((config[key] for key in keys if key in config), None)
    return layers if isinstance(layers, int) else None


_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "encoder_attention_heads")


def check_tensor(recipe: Recipe) -> Problems:
    """Yield problems of tensor parallelism: its overlap, and heads of inline configs."""
    model = recipe.model
    parallel = recipe.parallel
    entries = find_entries("parallel_styles")
    if parallel.async_tensor_parallel and not any(entry.is_used(parallel) for entry in entries):
        text = 'the extension "async_tp" is not installed'
        yield Problem("parallel.async_tensor_parallel", True, text)

    configs: dict[str, tuple[Any, str]] = {"model.config": (model.config, "llm")}
    configs["model.llm.config"] = (model.llm and model.llm.config, "llm")
    for name, encoder in model.encoders.items():
        configs[f"model.encoders.{name}.config"] = (encoder.config, name)
    for module, (key, part) in component_configs(model.config or {}).items():
        configs[key] = (part, module)
    if model.generator is not None:
        configs[f"model.{GENERATOR}.config"] = (model.generator.config, GENERATOR)
    for key, (config, module) in configs.items():
        size, tensor = tensor_size(parallel, module)
        for name in _HEADS:
            heads = (config or {}).get(name)
            if not isinstance(heads, int) or not heads % tensor:
                continue
            if name != "num_key_value_heads" or tensor % heads:  # ranks may share a key-value head
                text = f"cannot be split over {size} = {tensor} ranks; lower {size}"
                yield Problem(f"{key}.{name}", heads, text, (size,))


def tensor_size(parallel: ParallelConfig, module: str) -> tuple[str, int]:
    """Return the key of the tensor-parallel size of a module, and the size."""
    explicit = parallel.explicit_sizes(module) if parallel.placement == "colocated" else {}
    is_disaggregated = parallel.placement == "disaggregated" and module != LLM
    key = (
        f"parallel.{module}.tensor"
        if is_disaggregated or "tensor" in explicit
        else "parallel.tensor"
    )
    return key, {**unit_sizes(parallel, module if is_disaggregated else LLM), **explicit}["tensor"]
