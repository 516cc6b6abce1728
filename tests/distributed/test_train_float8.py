"""Emulated float8 matmuls: every supported layout trains like one process."""

import functools
from collections.abc import Callable

import pytest
from tiny_recipe import arguments, records

pytestmark = pytest.mark.slow
FLOAT8 = {
    "training__steps": 4,
    "training__global_batch_size": 4,
    "float8__emulate": "true",
    "float8__first_layers": 0,
}
LAYOUTS = {
    "sharded": (2, {"float8__scaling": "rowwise"}),
    "one_scale": (2, {"float8__scaling": "tensorwise"}),
    "pipeline": (2, {"float8__scaling": "rowwise", "parallel__pipeline": 2}),
    "context": (2, {"float8__scaling": "rowwise", "parallel__llm__context": 2}),
    "tensor": (2, {"float8__scaling": "rowwise", "parallel__tensor": 2}),
    "slices": (
        2,
        {
            "float8__scaling": "rowwise",
            "parallel__tensor": 2,
            "parallel__sequence_parallel": "true",
        },
    ),
    "recomputed": (1, {"float8__scaling": "rowwise", "activation_checkpoint__mode": "selective"}),
    "compiled": (
        1,
        {
            "float8__scaling": "rowwise",
            "compile__enabled": "true",
            "compile__backend": "aot_eager",
            "compile__modules": '["llm"]',
        },
    ),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory, real_data, train_server):
    """Return a function that runs a recipe and returns its records."""
    directory = tmp_path_factory.mktemp("float8")

    def run(name: str, ranks: int = 1, **changes: object) -> list[dict]:
        command = arguments(directory / name, real_data, **{**FLOAT8, **changes})
        codes, output = train_server.run(command, directory / f"{name}-log", ranks)
        assert codes == [0] * ranks, output
        return records(directory / name)

    return run


@pytest.fixture(scope="module")
def alone(train) -> Callable[[str], list[dict]]:
    """Return a cached function that trains one process with a float8 recipe."""
    return functools.cache(lambda recipe: train(recipe, float8__scaling=recipe))


def test_float8_changes_losses_within_tolerance(alone):
    plain = [r["loss"] for r in alone("none")]
    for recipe in ("rowwise", "tensorwise"):
        rounded = [r["loss"] for r in alone(recipe)]
        assert rounded == pytest.approx(plain, rel=1e-3)
        assert abs(rounded[0] / plain[0] - 1) > 1e-6
        assert rounded[-1] < rounded[0] - 0.1
    assert alone("rowwise")[0]["loss"] != alone("tensorwise")[0]["loss"]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_float8_layouts_equal_one_process(layout, train, alone):
    ranks, changes = LAYOUTS[layout]
    actual = train(layout, ranks, **changes)
    expected = alone(changes["float8__scaling"])
    for key in ("loss", "grad_norm"):
        assert actual[0][key] == pytest.approx(expected[0][key], rel=1e-5), key
    assert actual[0]["grad_norm"] != pytest.approx(alone("none")[0]["grad_norm"], rel=2e-5)
    losses = [r["loss"] for r in actual]
    assert losses == pytest.approx([r["loss"] for r in expected], rel=1e-3)
