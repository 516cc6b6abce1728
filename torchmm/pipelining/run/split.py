"""Split a model into the pipeline stages of a rank."""

from __future__ import annotations

from torchmm.models.layered import LayeredModule, StageRange, stage_ranges
from torchmm.models.multimodal import MultimodalModel
from torchmm.pipelining.plan.graph import StageLayout


def split_model_for_rank(
    model: MultimodalModel, layout: StageLayout, rank: int
) -> dict[int, LayeredModule]:
    """Reduce a full model on the meta device to the stages of a rank, in place.

    Args:
        model: Full model. Its parameters keep their names.
        layout: Stages of the run.
        rank: Rank within the plan.

    Returns:
        Stage modules by stage index. If a module has several stages on this rank, each stage is a
        view of the module. Otherwise the stage is the module itself.

    Raises:
        ValueError: The stages of the layout do not match the model.
    """
    sizes = {module.name: len(module.layer_sizes()) for module in model.modality_modules()}
    names = {stage.module for stage in layout.stages}
    if names != set(sizes):
        raise ValueError(
            f"the layout has modules {sorted(names)}, but the model has {sorted(sizes)}"
        )
    local_ranges: dict[str, list[StageRange]] = {}
    stage_indices: dict[str, list[int]] = {}
    for name, layers in sizes.items():
        stages = [stage for stage in layout.stages if stage.module == name]
        ranges = stage_ranges([(s.start, s.stop) for s in stages if not s.mirror])
        if ranges[-1].stop != layers:
            raise ValueError(f"{name}: the stages contain {ranges[-1].stop} of {layers} layers")
        local_positions = [i for i, stage in enumerate(stages) if rank in stage.ranks]
        local_ranges[name] = [
            ranges[i % len(ranges)] for i in local_positions
        ]  # mirrors are consecutive
        stage_indices[name] = [stages[i].index for i in local_positions]
    model.reduce_to_stages(local_ranges)
    return {
        index: stage
        for name, module_indices in stage_indices.items()
        for index, stage in zip(module_indices, model.stages[name], strict=True)
    }
