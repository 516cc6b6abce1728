"""Training on samples that other processes prepare: the same run, bit for bit."""

import os
import signal
import subprocess
import sys

import pytest
from launch import run_distributed
from ports import free_port
from tiny_recipe import arguments, records, tiny_recipe, weights

from torchmm.recipe.recipe import Recipe
from torchmm.training.run import train

pytestmark = pytest.mark.slow


def _train(recipes: list[Recipe], ports: list[int]) -> None:
    for recipe, port in zip(recipes, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)  # the last run's store may still be up
        train(recipe)


def test_two_ranks_train_on_what_producers_prepare(tmp_path, real_data):
    changes = {"training__steps": 3, "checkpoint__interval": 3, "parallel__shard": 2}
    program = [
        sys.executable,
        "-m",
        "torchmm.data.serve",
        "--bind",
        "127.0.0.1:0",
        "--workers",
        "1",
    ]
    serving = subprocess.Popen(
        [*program, *arguments(tmp_path / "served", real_data)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        address = f'["127.0.0.1:{serving.stdout.readline().split()[-1]}"]'
        recipes = [
            tiny_recipe(tmp_path / "plain", real_data, 2, **changes),
            tiny_recipe(
                tmp_path / "served", real_data, 2, **changes, data__producers__addresses=address
            ),
        ]
        run_distributed(_train, 2, recipes, [free_port(), free_port()])
    finally:
        serving.send_signal(signal.SIGTERM)
    assert serving.wait(30) == 0
    losses = [[r["loss"] for r in records(tmp_path / name)] for name in ("plain", "served")]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    plain, served = weights(tmp_path / "plain"), weights(tmp_path / "served")
    assert all((served[name] == value).all() for name, value in plain.items())
