"""Predicted speedup of async tensor parallelism on GPUs that were not measured.

The cases are those of figure 22 of DistTrain: layers of the LLM backbone on one tensor-parallel
group, forward and backward, with sequence parallelism. The cost model overlaps all blocks of a
transfer except the first with matrix products, as long as these last. This is a simulation with
published peaks of the device table and assumed efficiencies, not a measurement.
"""

from __future__ import annotations

from pathlib import Path

from support.harness import Row
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.layers import ModuleDescription
from torchmm.costs.execution import Execution
from torchmm.costs.sizes import llm_sizes
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.read import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes" / "papers"
PAPER = {4: (1.10, 1.17), 8: (1.15, 1.17)}
"""Lowest and highest speedup by tensor-parallel size (DistTrain, figure 22)."""
BACKBONES = {"7B": "disttrain_mllm_9b", "13B": "disttrain_mllm_15b", "70B": "disttrain_mllm_72b"}


def prediction_rows(device: str = "a800_disttrain") -> list[Row]:
    """Return speedups of forward and backward of the layers of a backbone."""
    rows = []
    for size, recipe in BACKBONES.items():
        loaded = load_recipe(RECIPES / f"{recipe}.toml").recipe
        modules = recipe_model(loaded).modality_modules()
        llm = next(d for d in (module.describe() for module in modules) if d.kind == "llm")
        for tensor, (lowest, highest) in PAPER.items():
            plain, hidden = (
                layers_ms(llm, device, tensor, overlap, loaded.training.sequence_length)
                for overlap in (False, True)
            )
            case = f"{size} layers, TP {tensor}, {device}: {lowest}-{highest} published"
            rows.append(
                Row(case, "speedup", "x", plain[0] / hidden[0], 1, highest, kind="simulated")
            )
            exposed = (hidden[1] / (len(llm.layers) - 2), plain[1] / (len(llm.layers) - 2))
            metric = "exposed communication per layer"
            rows.append(Row(case, metric, "ms", *exposed, better="lower", kind="simulated"))
    return rows


def layers_ms(
    llm: ModuleDescription, device: str, tensor: int, overlap: bool, tokens: int
) -> tuple[float, float]:
    """Forward and backward of inner layers: total time, exposed communication."""
    execution = Execution(tensor=tensor, sequence_parallel=True, async_tensor=overlap)
    model = CostModel(load_profile(device), "bfloat16", {llm.name: execution})
    meta = MicrobatchMeta((SampleMeta("text", 0, tokens),), tokens)
    sizes = llm_sizes([meta], [tokens], padding=True)
    costs = model.stage_costs(llm, 1, len(llm.layers) - 1, sizes, needs_input_grad=True)
    passes = (costs.forward, costs.backward)
    return sum(float(p.total_ms[0]) for p in passes), sum(float(p.tp_comm_ms[0]) for p in passes)
