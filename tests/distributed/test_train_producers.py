"""Training on samples that other processes prepare: the same run, bit for bit."""

import json
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
NOWHERE = {
    "data__sources": '[{path="/nowhere/tuxpaint_stamps/train"}]',
    "data__validation": '[{path="/nowhere/tuxpaint_stamps/validation"}]',
}


def _train(recipes: list[Recipe], ports: list[int]) -> None:
    for recipe, port in zip(recipes, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)  # the last run's store may still be up
        train(recipe)


def test_two_ranks_train_on_what_producers_prepare_and_plan(tmp_path, real_data):
    """Also where ranks have neither the data nor their index, of which samples are held out too."""
    changes = {
        "training__steps": 3,
        "checkpoint__interval": 3,
        "parallel__shard": 2,
        "validation__interval": 3,
        "validation__samples": 2,
    }
    planned = {"data__producers__plan": "true", "data__producers__addresses": '["127.0.0.1:1"]'}
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
        [*program, *arguments(tmp_path / "served", real_data, **planned)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        address = f'["127.0.0.1:{serving.stdout.readline().split()[-1]}"]'
        recipes = [
            tiny_recipe(tmp_path / "plain", real_data, 2, **changes),
            tiny_recipe(
                tmp_path / "served", real_data, 2, **changes, data__producers__addresses=address
            ),
            tiny_recipe(
                tmp_path / "planned",
                real_data,
                2,
                **changes | planned | NOWHERE | {"data__producers__addresses": address},
            ),
        ]
        run_distributed(_train, 2, recipes, [free_port() for _ in recipes])
    finally:
        serving.send_signal(signal.SIGTERM)
    assert serving.wait(30) == 0
    plain, *others = (outcome(tmp_path / name) for name in ("plain", "served", "planned"))
    assert len(plain[0]) == 3 and plain[1] and (tmp_path / "planned" / "captions.png").exists()
    for losses, samples, state in others:
        assert (losses, samples) == plain[:2]
        assert all((state[name] == value).all() for name, value in plain[2].items())


def outcome(run_dir):
    """Losses, held-out losses and texts, weights and states."""
    found = [{k: r.get(k) for k in ("loss", "validation_loss")} for r in records(run_dir)]
    return found, json.loads((run_dir / "samples.json").read_text()), weights(run_dir)
