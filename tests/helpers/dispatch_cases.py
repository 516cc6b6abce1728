"""Steps of an encoder and an LLM on a pipeline, with costs that are the same on all ranks."""

from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.layouts import ModuleLayers, separated_layout


def pipeline(ranks: int, counts: list[int], segments: int = 1, **encoder) -> StageGraph:
    """Return the graph of an encoder of one segment and an LLM, both on all ranks.

    Args:
        counts: Sub-microbatches of the encoder by microbatch.
        segments: Segments of the LLM.
        encoder: Further arguments of the `ModuleLayers` of the encoder.
    """
    modules = [
        ModuleLayers("vision", "encoder", (1.0,) * ranks, sub_microbatched=True, **encoder),
        ModuleLayers("llm", "llm", (1.0,) * ranks * segments),
    ]
    layout = separated_layout(modules, ranks, {"llm": segments})
    return StageGraph(layout, len(counts), {"vision": tuple(counts)})


def even_costs(graph: StageGraph, encoder_ms=1.0, llm_ms=2.0, **others) -> PlanCosts:
    """Return costs with a backward that takes as long as two forwards."""
    compute = {}
    for task in graph.tasks():
        module = graph.layout.stages[task.stage].module
        forward_ms = encoder_ms if module == "vision" else llm_ms
        compute[Action(ActionType.F, *task)] = forward_ms
        compute[Action(ActionType.B, *task)] = 2 * forward_ms
    return PlanCosts(compute, **others)
