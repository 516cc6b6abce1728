"""The recipe's section about searching schedules: `[parallel.search]`.

Part of the schema in `torchmm.recipe.recipe`, from where everything is imported.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torchmm.recipe.model_section import Section


class SearchConfig(Section):
    """How `schedule = "searched"` looks for the order of each step."""

    strategy: Literal["annealing", "mcts", "random", "dfs", "natural"] = "annealing"
    """"annealing": simulated annealing from constructed orders; "mcts": Monte Carlo tree search;
    "random" and "dfs": for comparison; "natural": the order of microbatches, without a search."""
    stages: Literal["separated", "megatron", "balanced", "auto"] = "separated"
    """How modules are cut. "separated": each into segments over all ranks; "megatron": whole
    encoders in front of the LLM's first stage; "balanced": all layers in one chain of equally
    costly stages; "auto": what the cost model predicts the fastest first step for."""
    evaluations: int = Field(default=2000, ge=1)
    """Orders tried for a step at most."""
    seed: int = Field(default=0, ge=0)
    """Seed of the search."""
    workers: int = Field(default=1, ge=1)
    """Threads that search, of at most half of the machine's cores."""
    background: bool = True
    """Plan the next step in a process of its own while this one trains. If that process has not
    finished in time, the best order so far is used. False, and with `training.deterministic`: each
    step is planned before it begins, with all `evaluations`; runs then repeat to the bit."""
    time_share: float = Field(default=0.8, gt=0, le=1)
    """Share of a measured step in which the next one is to be planned."""
