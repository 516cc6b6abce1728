"""From a layout to this rank's stages of a model: where plans and models meet."""

from __future__ import annotations

from torchmm.models.layered import LayeredModule, StageRange, stage_ranges
from torchmm.models.multimodal import MultimodalModel
from torchmm.pipelining.plan.graph import StageLayout


def cut_for_rank(
    model: MultimodalModel, layout: StageLayout, rank: int
) -> dict[int, LayeredModule]:
    """Reduces the whole model (on the meta device) to the stages of a rank, in place.

    Args:
        rank: within the plan.

    Returns:
        What runs, by stage index. Parameters keep their names in `model`; a module that is one
        stage on this rank is returned itself, of one with several each stage is a view.

    Raises:
        ValueError: the layout's stages are not those of the model.
    """
    sizes = {module.name: len(module.layer_sizes()) for module in model.modality_modules()}
    found = {stage.module for stage in layout.stages}
    if found != set(sizes):
        raise ValueError(
            f"the layout has modules {sorted(found)}, but the model has {sorted(sizes)}"
        )
    kept: dict[str, list[StageRange]] = {}
    indices: dict[str, list[int]] = {}
    for name, layers in sizes.items():
        stages = [stage for stage in layout.stages if stage.module == name]
        ranges = stage_ranges([(s.start, s.stop) for s in stages if not s.mirror])
        if ranges[-1].stop != layers:
            raise ValueError(f"{name}: the stages contain {ranges[-1].stop} of {layers} layers")
        own = [i for i, stage in enumerate(stages) if rank in stage.ranks]
        kept[name] = [ranges[i % len(ranges)] for i in own]  # mirrors follow each other
        indices[name] = [stages[i].index for i in own]
    model.cut(kept)
    return {
        index: stage
        for name, of_module in indices.items()
        for index, stage in zip(of_module, model.stages[name], strict=True)
    }
