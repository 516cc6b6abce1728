"""Trial runs of modules: what is run, what is kept of it, and that plans follow it."""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli
import torch
from trial_recipe import RECIPE

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.disttrain.orchestration.trials import (
    MeasuredRow,
    ModuleTrials,
    checked,
    load_trials,
    save_trials,
)
from torchmm.balance.measure.trials import interpolation_errors, make_trials
from torchmm.balance.search.disaggregated import orchestration_problem, sampled_packs
from torchmm.balance.search.search import search_plans
from torchmm.common.errors import ConfigError
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.placement_sizes import units_of
from torchmm.recipe.recipe import Recipe

PROFILE_MODULES = runpy.run_path(str(Path(__file__).parents[4] / "scripts/profile_modules.py"))[
    "main"
]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return Recipe.model_validate(tomli.loads(RECIPE))


@pytest.fixture(scope="module")
def trials(recipe) -> ModuleTrials:
    return make_trials(recipe, torch.device("cpu"), rounds=2)


def test_all_modules_run_at_sizes_of_the_data(trials):
    assert list(trials.rows) == ["vision", "llm", "generator"]
    assert [list(rows) for rows in trials.rows.values()] == [[1], [1], [1]]
    vision, llm = trials.rows["vision"][1], trials.rows["llm"][1]
    assert vision.units[0] == 16 and vision.units[-1] == 8 * 16
    assert llm.units == (256,)
    for rows in trials.rows.values():
        assert all(s > 0 for s in (*rows[1].forward_s, *rows[1].backward_s))
    errors = interpolation_errors(trials)
    assert errors["vision"][1][0] <= errors["vision"][1][1] and "llm" not in errors


def test_deep_modules_take_longer_than_what_is_run(recipe, trials):
    table = tomli.loads(RECIPE)
    table["model"]["llm"]["config"]["num_hidden_layers"] = 24
    deeper = Recipe.model_validate(table)
    found = make_trials(deeper, torch.device("cpu"), rounds=2).rows["llm"][1]
    assert sum(found.forward_s) > 1.5 * sum(trials.rows["llm"][1].forward_s)


def test_frozen_modules_have_no_backward(recipe):
    freeze = recipe.freeze.model_copy(update={"modules": ["vision", "vision.connector", "llm"]})
    frozen = recipe.model_copy(update={"freeze": freeze})
    rows = make_trials(frozen, torch.device("cpu"), rounds=1).rows
    assert set(rows["vision"][1].backward_s) == {0.0} == set(rows["llm"][1].backward_s)
    assert min(rows["generator"][1].backward_s) > 0


def test_times_are_linear_between_sizes():
    row = MeasuredRow((10.0, 20.0, 40.0), (1.0, 2.0, 6.0), (2.0, 4.0, 8.0))
    forward_N, backward_N = row.seconds(np.array([5.0, 15.0, 30.0, 80.0]))
    assert forward_N.tolist() == [1.0, 1.5, 4.0, 12.0]
    assert backward_N.tolist() == [2.0, 3.0, 6.0, 16.0]
    assert checked(row, [15.0], [9.0]).checked_error == pytest.approx([-0.5])
    both = ModuleTrials({}, "", {"llm": {1: row, 4: replace(row, forward_s=(0.5, 1.0, 2.0))}})
    between = both.seconds("llm", 2, np.array([20.0]))
    assert between is not None and between[0].tolist() == [1.5]
    assert both.seconds("llm", 8, np.array([20.0])) is None
    with pytest.raises(ValueError, match="rising input sizes"):
        MeasuredRow((2.0, 1.0), (1.0, 1.0), (1.0, 1.0))


def slower(trials: ModuleTrials, name: str, factor: float) -> ModuleTrials:
    rows = {
        size: replace(
            row,
            forward_s=tuple(factor * s for s in row.forward_s),
            backward_s=tuple(factor * s for s in row.backward_s),
        )
        for size, row in trials.rows[name].items()
    }
    return replace(trials, rows={**trials.rows, name: rows})


def with_trials(recipe: Recipe, path: Path) -> Recipe:
    simulation = recipe.simulation.model_copy(update={"trials": str(path)})
    return recipe.model_copy(update={"simulation": simulation})


def test_plans_follow_what_was_measured(recipe, trials, tmp_path):
    """A module that is measured to be slower gets more devices, tensor-parallel sizes that could
    not be measured included."""
    path, profile = tmp_path / "trials.json", load_profile("cpu")
    devices = []
    for factor in (1.0, 50.0):
        save_trials(path, slower(trials, "vision", factor))
        own = with_trials(recipe, path)
        vision = orchestration_problem(own, 8, profile).units[0]
        assert vision.seconds[1] == pytest.approx(
            factor * float(np.mean(_mean_seconds(trials, "vision", own))), rel=1e-6
        )
        modelled = orchestration_problem(recipe, 8, profile).units[0].seconds
        assert set(vision.seconds) == set(modelled)
        assert vision.has_backward
        best = search_plans(own, 8, profile, methods=("disaggregated",), effort=20_000).best
        devices.append(units_of(best.recipe, best.devices)["vision"].ranks)
    assert devices[1] > devices[0]


def _mean_seconds(trials: ModuleTrials, name: str, recipe: Recipe) -> np.ndarray:
    packs = sampled_packs(recipe, recipe_model(recipe))
    found = trials.seconds(name, 1, np.array([float(sum(p.patches(name))) for p in packs]))
    assert found is not None
    return found[0] + found[1]


def test_files_are_read_as_written_and_refused_for_another_recipe(recipe, trials, tmp_path):
    path = tmp_path / "trials.json"
    save_trials(path, trials)
    assert load_trials(path) == trials
    training = recipe.training.model_copy(update={"dtype": "bfloat16"})
    own = with_trials(recipe, path).model_copy(update={"training": training})
    with pytest.raises(ConfigError, match=r"another training\.dtype.*profile_modules"):
        orchestration_problem(own, 8, load_profile("cpu"))
    path.write_text('{"format": "something else"}')
    with pytest.raises(ConfigError, match=r"trials\.json: no trials of modules"):
        orchestration_problem(with_trials(recipe, path), 8, load_profile("cpu"))
    with pytest.raises(ConfigError, match=r"nothing\.json: no trials of modules"):
        orchestration_problem(
            with_trials(recipe, tmp_path / "nothing.json"), 8, load_profile("cpu")
        )


def test_the_script_measures_and_writes(tmp_path, capsys):
    config, out = tmp_path / "tiny.toml", tmp_path / "made" / "trials.json"
    config.write_text(RECIPE)
    given = ["--config", str(config), "--out", str(out), "--device", "cpu", "--rounds", "1"]
    assert PROFILE_MODULES(given) == 0
    assert set(load_trials(out).rows) == {"vision", "llm", "generator"}
    assert "interpolation off by" in capsys.readouterr().out
    assert PROFILE_MODULES([*given, "--layers", "1"]) == 2
    assert "use >= 1 and >= 2" in capsys.readouterr().err
