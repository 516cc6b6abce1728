"""Tests of dry-run lines about the length of the run."""

from test_run_length import data, read

from torchmm.balance.recipe_simulation.dry_run import describe_run

__all__ = ["data"]


def test_dry_run_warns_about_data_and_results(data, tmp_path):
    held_out = {"validation": [{"path": str(data / "images.jsonl")}]}
    recipe = read(data, tmp_path, training={"steps": 100_000}, data=held_out)
    recipe.checkpoint.__dict__["interval"] = 0
    text = " ".join(describe_run(recipe, 1).split())
    assert "100,000 steps; one epoch of the training data is about" in text
    assert "the run reads its training data" in text
    assert "e+" not in text  # 100,000 passes, not 1e+05
    assert "validation.interval = 0: [[data.validation]] is not evaluated" in text
    complete_recipe = read(
        data,
        tmp_path,
        training={"epochs": 2.0},
        data=held_out,
        validation={"interval": 500},
    )
    text = describe_run(complete_recipe, 1)
    assert "warning" not in text and "every 2 steps, at most 3 of" in text
