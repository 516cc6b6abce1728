"""A rank of a run under test, and the process that computes the reference.

The judge forks both. They write their results into files of its directory.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from nf4_reference import round_to_nf4
from torch import Tensor
from torch.distributed.tensor import DTensor

from fuzz import reference
from fuzz.losses import TextLoss
from torchmm.data.build import build_loader
from torchmm.extensions.low_precision.float8 import find_float8_linears
from torchmm.extensions.low_precision.section import Float8Config
from torchmm.models.hf.export import hf_name, hf_prefixes
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.health.peers import peer_errors
from torchmm.parallel.mesh import select_device, start_process_group
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.build import build_run
from torchmm.training.model_build import ModelStages
from torchmm.training.shutdown import StopSignal
from torchmm.training.trainer import Trainer


def run_rank(
    run: ResolvedRecipe,
    model: MultimodalModel,
    tokenizer: Any,
    cut: ModelStages,
    output: Path,
    defect: str = "",
) -> None:
    """Train like `torchmm.training.run.train` and save the results of this rank.

    Args:
        model: Model on the meta device, which this process may split.
        output: Output file. It has the gradients of the first step before clipping, losses and
            norms of all steps, and the final weights and averages.
        defect: "gradient", "rows" or "averages" injects a defect, to test the judge.
    """
    recipe = run.recipe
    run_dir = Path(recipe.output_dir) / recipe.name
    run_dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"losses": [], "norms": []}
    with StopSignal() as stop:
        device = select_device(recipe.training.device)
        with peer_errors(int(os.environ["RANK"])):
            start_process_group(recipe.parallel, device)
            parts = build_run(run, run_dir, device, model, tokenizer, cut)
        if defect == "rows":
            _roll_rows(next(p for p in parts.model.parameters() if p.ndim > 1))
        trainer = Trainer(parts, stop)
        step = trainer.run_step

        def observed(batches: Any) -> Any:
            finished = step(batches)
            results["losses"].append(finished.record["loss"])
            results["norms"].append(finished.record["grad_norm"])
            return finished

        def before_update(*_: Any) -> None:
            if defect == "averages" and parts.average is not None:
                for average in parts.average.averages.values():
                    _roll_rows(average)
            if defect == "gradient":
                next(p.grad for p in parts.model.parameters() if p.grad is not None).mul_(1.001)
            if "gradients" not in results:
                named = parts.model.named_parameters()
                gradients = _gather({n: p.grad for n, p in named if p.grad is not None})
                scale = parts.optimizer.grad_scale  # Clipping is part of the update.
                results["gradients"] = {name: grad / scale for name, grad in gradients.items()}

        trainer.run_step = observed  # type: ignore[method-assign]
        parts.optimizer.register_step_pre_hook(before_update)
        trainer.run()
    weights = _gather(dict(parts.model.named_parameters()))
    results["weights"] = weights | _decoded(parts.model, weights)
    if (average := parts.average) is not None:
        named = parts.model.named_parameters()
        results["averages"] = _gather({n: average.averages[p] for n, p in named if p.requires_grad})
    results["copies"] = parts.model.tied_replicas()
    torch.save(results, output)


@torch.no_grad()
def _roll_rows(parameter: Tensor) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    local.copy_(local.roll(1, 0))


def _decoded(model: MultimodalModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of quantized weights."""
    forms = {
        f"{prefix}.{linear}.weight": form
        for prefix, module in model.named_modality_modules()
        for linear, form in module.weight_formats.items()
    }
    return {name: form.decode(weights[name]) for name, form in forms.items() if name in weights}


def _gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather copies of unsharded values. Collective over the mesh of each tensor."""
    gathered = {}
    for name, value in tensors.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        gathered[name] = full.detach().clone()
    return gathered


def run_reference(
    recipe: Recipe, model: MultimodalModel, tokenizer: Any, steps: int, output: Path
) -> None:
    """Run the same steps with `fuzz.reference`, on the batches of a single-rank loader."""
    materialize(model, "cpu")
    init_weights(model, recipe.training.seed, skip=load_weights(model))
    for module in model.modality_modules():
        for linear in module.weight_formats:
            weight = module.get_parameter(f"{linear}.weight").data
            weight.copy_(round_to_nf4(weight))
    initial = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    batches = reference_batches(recipe, model, tokenizer, steps)
    section = recipe.model.model_dump(exclude_none=True)
    text_config = section["llm"]["config"] if "llm" in section else section["config"]["text_config"]
    text_config["vocab_size"] = model.llm.text_config.vocab_size  # with new tokens
    weights = (f"llm.{name}" for name in model.llm.token_weights)
    token_rows = {name: model.llm.trained_token_ids for name in weights if name in initial}
    optimizer = recipe.optimizer.model_dump() | {"computed_in": recipe.training.dtype}
    frozen, names = [*recipe.freeze.modules, *recipe.adapted_modules], composite_names(model)
    layer_matrices = {id(parameter) for parameter in model.layer_matrices()}
    matrices = {n for n, p in model.named_parameters() if id(p) in layer_matrices}
    adapters = [adapter.model_dump() for adapter in recipe.adapters.values()]
    rounded = linears_in_float8(recipe, model)
    trained = reference.train(
        section, frozen, optimizer, initial, batches, names, matrices, adapters, rounded,
        recipe.training.ema_decay, buffers,
        TextLoss(recipe.training.label_smoothing, recipe.training.z_loss), token_rows,
    )  # fmt: skip
    torch.save({"initial": initial, "steps": [asdict(step) for step in trained]}, output)


def linears_in_float8(recipe: Recipe, model: MultimodalModel) -> dict[str, str]:
    """Return the scaling of float8 linear layers by the names of their weights."""
    config = Float8Config.from_parent(recipe)
    chosen = {
        id(linear)
        for module in model.modality_modules()
        if config.applies_to(module.name)
        for linear in find_float8_linears(module, config)
    }
    named = model.named_modules()
    return {f"{n}.weight": config.scaling for n, part in named if id(part) in chosen}


def composite_names(model: MultimodalModel) -> dict[str, str]:
    """Return Hugging Face names by checkpoint names, for multimodal models only."""
    if model.composite is None:
        return {}
    prefixes, names = hf_prefixes(model), {}
    for prefix, module in model.named_modality_modules():
        for name in module.state_dict():
            if ".lora." in name:  # not in the Hugging Face model
                continue
            hugging_face_name = hf_name(prefixes, module.name, name)
            assert hugging_face_name is not None, name
            names[f"{prefix}.{name}"] = hugging_face_name
    return names


def reference_batches(
    recipe: Recipe, model: MultimodalModel, tokenizer: Any, steps: int
) -> list[list[Any]]:
    """Return the packed sequences of each global batch, in the original order."""
    loader = build_loader(
        recipe.data,
        recipe.training.model_copy(update={"microbatch_size": 1}),
        text_spec=model.text_spec(tokenizer),
        image_specs=model.image_specs(),
        tokenizer=tokenizer,
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
        generator_spec=model.generator_spec(),
    )
    batches = iter(loader)
    return [next(batches).microbatches for _ in range(steps)]
