"""Memory limits that plans can satisfy only with recomputation."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from support.memory_needs import memory_needs

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.online_calibration import ActionKind
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning
from torchmm.balance.pipeweaver.planners import plan_pipeline_step
from torchmm.common.batch import MicrobatchMeta
from torchmm.costs.execution import Execution
from torchmm.training.pipeline import Pipeline


def half_way(
    pipeline: Pipeline,
    metas: Sequence[MicrobatchMeta],
    factors: Mapping[ActionKind, float] | None = None,
    kinds: Collection[str] = ("encoder", "llm", "generator"),
) -> LayerTuning:
    """Return a limit half-way between the lowest and highest memory use of the plan on any rank.

    Args:
        kinds: Kinds of modules that may recompute.
    """
    modules = pipeline.descriptions
    names = frozenset(module.name for module in modules if module.kind in kinds)
    executions = {module.name: Execution() for module in modules}
    costs = CostModel(load_profile("cpu"), "float32", executions)
    tuning = LayerTuning(costs, names, 0, pipeline.sharding == "layer")
    needs = memory_needs(
        plan_pipeline_step(pipeline, metas, factors=factors), modules, metas, tuning
    )
    min_bytes, max_bytes = (max(each) for each in zip(*needs, strict=True))
    return replace(tuning, memory_limit_bytes=(min_bytes + max_bytes) // 2)
