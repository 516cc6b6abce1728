"""One rank of a run under test, and the process that computes what it has to give.

Both are forked by the judge and write what they found into files of its directory.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fuzz import reference
from torchmm.data.build import build_loader
from torchmm.extensions.low_precision.float8 import find_float8_linears
from torchmm.extensions.low_precision.section import Float8Config
from torchmm.models.hf.export import hf_name, hf_prefixes
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.health.peers import peer_errors
from torchmm.parallel.mesh import select_device, start_process_group
from torchmm.planning.resolved import Resolved
from torchmm.recipe.recipe import Recipe
from torchmm.training.build import build_run
from torchmm.training.model_build import ModelStages
from torchmm.training.shutdown import StopSignal
from torchmm.training.trainer import Trainer


def run_rank(
    run: Resolved,
    model: MultimodalModel,
    tokenizer: Any,
    cut: ModelStages,
    found: Path,
    spoil: str = "",
) -> None:
    """Trains as `torchmm.training.run.train` does and saves what this rank has seen.

    Args:
        model: on the meta device; this process may cut it.
        found: file to be written: the first step's gradients as the optimizer gets them, losses and
            norms of all steps, weights and their averages at the end.
        spoil: "gradient", "rows" or "averages" makes something wrong on purpose, to test the judge.
    """
    recipe = run.recipe
    run_dir = Path(recipe.output_dir) / recipe.name
    run_dir.mkdir(parents=True, exist_ok=True)
    seen: dict[str, Any] = {"losses": [], "norms": []}
    with StopSignal() as stop:
        device = select_device(recipe.training.device)
        with peer_errors(int(os.environ["RANK"])):
            start_process_group(recipe.parallel, device)
            parts = build_run(run, run_dir, device, model, tokenizer, cut)
        if spoil == "rows":
            _turn_rows(next(p for p in parts.model.parameters() if p.ndim > 1))
        trainer = Trainer(parts, stop)
        step = trainer.run_step

        def observed(batches: Any) -> Any:
            done = step(batches)
            seen["losses"].append(done.record["loss"])
            seen["norms"].append(done.record["grad_norm"])
            return done

        def before_update(*_: Any) -> None:
            if spoil == "averages" and parts.average is not None:
                for average in parts.average.averages.values():
                    _turn_rows(average)
            if spoil == "gradient":
                next(p.grad for p in parts.model.parameters() if p.grad is not None).mul_(1.001)
            if "gradients" not in seen:
                named = parts.model.named_parameters()
                whole = _whole({n: p.grad for n, p in named if p.grad is not None})
                scale = parts.optimizer.grad_scale  # Clipping is part of the update.
                seen["gradients"] = {name: grad / scale for name, grad in whole.items()}

        trainer.run_step = observed  # type: ignore[method-assign]
        parts.optimizer.register_step_pre_hook(before_update)
        trainer.run()
    seen["weights"] = _whole(dict(parts.model.named_parameters()))
    if (average := parts.average) is not None:
        named = parts.model.named_parameters()
        seen["averages"] = _whole({n: average.averages[p] for n, p in named if p.requires_grad})
    seen["copies"] = parts.model.tied_replicas()
    torch.save(seen, found)


@torch.no_grad()
def _turn_rows(parameter: Tensor) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    local.copy_(local.roll(1, 0))


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of unsharded values; collective over each tensor's mesh."""
    found = {}
    for name, value in tensors.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = whole.detach().clone()
    return found


def run_reference(
    recipe: Recipe, model: MultimodalModel, tokenizer: Any, steps: int, found: Path
) -> None:
    """The same steps by `fuzz.reference`, on the batches of a loader of one rank."""
    materialize(model, "cpu")
    init_weights(model, recipe.training.seed, skip=load_weights(model))
    initial = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    batches = reference_batches(recipe, model, tokenizer, steps)
    section = recipe.model.model_dump(exclude_none=True)
    optimizer = recipe.optimizer.model_dump() | {"computed_in": recipe.training.dtype}
    frozen, names = [*recipe.freeze.modules, *recipe.adapted_modules], composite_names(model)
    of_layers = {id(parameter) for parameter in model.layer_matrices()}
    matrices = {n for n, p in model.named_parameters() if id(p) in of_layers}
    adapters = [adapter.model_dump() for adapter in recipe.adapters.values()]
    rounded = linears_in_float8(recipe, model)
    trained = reference.train(
        section, frozen, optimizer, initial, batches, names, matrices, adapters, rounded,
        recipe.training.ema_decay, buffers,
    )  # fmt: skip
    torch.save({"initial": initial, "steps": [asdict(step) for step in trained]}, found)


def linears_in_float8(recipe: Recipe, model: MultimodalModel) -> dict[str, str]:
    """How they are scaled, by the names of their weights."""
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
    """Return names in the Hugging Face model by the names in checkpoints; only for composites."""
    if model.composite is None:
        return {}
    prefixes, found = hf_prefixes(model), {}
    for prefix, module in model.named_modality_modules():
        for name in module.state_dict():
            if ".lora." in name:  # no part of Hugging Face's model
                continue
            theirs = hf_name(prefixes, module.name, name)
            assert theirs is not None, name
            found[f"{prefix}.{name}"] = theirs
    return found


def reference_batches(
    recipe: Recipe, model: MultimodalModel, tokenizer: Any, steps: int
) -> list[list[Any]]:
    """The packed sequences of each global batch, in natural order."""
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
