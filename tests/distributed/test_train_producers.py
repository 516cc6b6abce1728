"""Training on samples that producers prepare is bitwise equal to training without producers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from launch import run_distributed
from ports import free_port
from pyarrow import flight
from tiny_recipe import ROOT, arguments, records, tiny_recipe, weights

from torchmm.extensions.remote.producers.wire_format import (
    SCHEMA,
    TEXT_PART,
    decode_message,
    encode_message,
)
from torchmm.recipe.recipe import Recipe
from torchmm.training.run import train

pytestmark = pytest.mark.slow
NOWHERE = {
    "data__sources": '[{path="/nowhere/tuxpaint_stamps/train"}]',
    "data__validation": '[{path="/nowhere/tuxpaint_stamps/validation"}]',
}


def _train(recipes: list[Recipe], ports: list[int]) -> None:
    for recipe, port in zip(recipes, ports, strict=True):
        os.environ["MASTER_PORT"] = str(
            port
        )  # the store of the previous run can still use its port
        train(recipe)


@contextmanager
def _serving(recipe: list[str]) -> Iterator[str]:
    """Start a producer with one worker; yield its address."""
    program = [sys.executable, "-m", "torchmm.data.serve", "--bind", "127.0.0.1:0"]
    serving = subprocess.Popen(
        [*program, "--workers", "1", *recipe], stdout=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        yield f"127.0.0.1:{serving.stdout.readline().split()[-1]}"
    finally:
        serving.send_signal(signal.SIGTERM)
    assert serving.wait(30) == 0


class WrongProducer(flight.FlightServerBase):
    """Forwards requests to a correct producer and changes the token ids of its response."""

    def __init__(self, correct: str) -> None:
        super().__init__("grpc+tcp://127.0.0.1:0")
        self._client = flight.FlightClient(f"grpc+tcp://{correct}")
        self.requests = 0

    def do_get(self, context, ticket):
        self.requests += 1
        return flight.GeneratorStream(SCHEMA, self._changed(self._client.do_get(ticket)))

    def _changed(self, stream):
        for chunk in stream:
            values = json.loads(chunk.app_metadata.to_pybytes())
            message = decode_message(chunk)
            if message.values["part"] == TEXT_PART:
                message.tensors["input_ids_T"] += 10**6
            yield encode_message(message, values["microbatch"])


def _run(arguments: list[str]) -> tuple[int, str]:
    """Return exit code and output of train.py."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    run = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return run.returncode, run.stdout


def test_wrong_producer_does_not_change_losses(tmp_path, real_data):
    steps = {"training__steps": 3, "data__workers": 1}
    code, output = _run(arguments(tmp_path / "plain", real_data, **steps))
    assert code == 0, output
    with _serving(arguments(tmp_path / "served", real_data, **steps)) as correct:
        wrong = WrongProducer(correct)
        address = f"127.0.0.1:{wrong.port}"
        both = steps | {"data__producers__addresses": f'["{address}", "{correct}"]'}
        code, output = _run(arguments(tmp_path / "both", real_data, **both))
        assert code == 0 and f"producer {address} sent a wrong response" in output, output
        assert "input_ids_T" in output and wrong.requests == 1
        only = steps | {"data__producers__addresses": f'["{address}"]'}
        code, output = _run(arguments(tmp_path / "only", real_data, **only))
        assert code == 3 and f"{address}: malformed response" in output, output
        wrong.shutdown()
    plain, both = (
        [record["loss"] for record in records(tmp_path / name)] for name in ("plain", "both")
    )
    assert plain == both and len(plain) == 3


def test_two_ranks_train_with_producers(tmp_path, real_data):
    """In one run, the ranks have neither the data nor the index, including for validation."""
    changes = {
        "training__steps": 3,
        "checkpoint__interval": 3,
        "parallel__shard": 2,
        "validation__interval": 3,
        "validation__num_samples": 2,
    }
    planned = {"data__producers__plan": "true", "data__producers__addresses": '["127.0.0.1:1"]'}
    with _serving(arguments(tmp_path / "served", real_data, **planned)) as served:
        address = f'["{served}"]'
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
    plain, *others = (outcome(tmp_path / name) for name in ("plain", "served", "planned"))
    assert len(plain[0]) == 3 and plain[1] and (tmp_path / "planned" / "captions.png").exists()
    for losses, samples, state in others:
        assert (losses, samples) == plain[:2]
        assert all((state[name] == value).all() for name, value in plain[2].items())


def outcome(run_dir):
    """Return losses, validation losses, generated texts, weights and states."""
    losses = [{k: r.get(k) for k in ("loss", "validation_loss")} for r in records(run_dir)]
    return losses, json.loads((run_dir / "samples.json").read_text()), weights(run_dir)
