"""Trial runs of modules on two ranks: both tensor-parallel sizes, the same times on both."""

import tomli
import torch
import torch.distributed as dist
from launch import run_distributed
from trial_recipe import RECIPE

from torchmm.balance.disttrain.orchestration.trials import ModuleTrials
from torchmm.balance.measure.trials import make_trials
from torchmm.recipe.recipe import Recipe


def _measure() -> ModuleTrials:
    dist.init_process_group("gloo")
    table = tomli.loads(RECIPE)
    table["parallel"]["sequence_parallel"] = True
    return make_trials(Recipe.model_validate(table), torch.device("cpu"), rounds=1)


def test_two_ranks_run_modules_whole_and_in_halves() -> None:
    found, other = run_distributed(_measure, 2)
    assert found == other
    assert list(found.rows) == ["vision", "llm", "generator"]
    assert [list(rows) for rows in found.rows.values()] == [[1, 2]] * 3
    for rows in found.rows.values():
        for row in rows.values():
            assert all(s > 0 for s in (*row.forward_s, *row.backward_s))
