"""Tests of host memory in dry runs: a lower bound from optimizer states and prefetched batches."""

from itertools import islice

import pytest
from test_run_length import data, read  # noqa: F401 - a fixture

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.recipe_simulation.dry_run import describe_run
from torchmm.balance.recipe_simulation.host_memory import host_memory_bytes
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.data.build import build_loader
from torchmm.data.tokenizer import load_tokenizer
from torchmm.recipe.parallel_section import ParallelConfig


def terms_of(recipe, ranks: int = 1, device: str = "h100") -> dict[str, float]:
    forecaster = StepSimulator(recipe, ranks, load_profile(device))
    step = forecaster.simulate_schedule().step
    assert step is not None
    return host_memory_bytes(forecaster, forecaster.run, step)


@pytest.mark.parametrize(
    "parallel", [{}, {"pipeline": 2, "shard": 1}, {"replicate": 2, "shard": 1}]
)
def test_offloaded_states_use_8_bytes_per_parameter(data, tmp_path, parallel):  # noqa: F811
    ranks = 2 if parallel else 1
    update = {"parallel": ParallelConfig.model_validate(parallel)}
    plain = read(data, tmp_path).model_copy(update=update)
    offload = plain.optimizer.model_copy(update={"offload": True})
    recipe = plain.model_copy(update={"optimizer": offload})
    model = StepSimulator(recipe, ranks, load_profile("h100")).model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    copies = parallel.get("replicate", 1)
    assert terms_of(recipe, ranks)["optimizer states"] == 8 * trained * copies
    assert "optimizer states" not in terms_of(plain, ranks)


def test_batch_memory_is_a_lower_bound(data, tmp_path):  # noqa: F811
    recipe = read(data, tmp_path)
    forecaster = StepSimulator(recipe, 1, load_profile("cpu"))
    loader = build_loader(
        recipe.data.model_copy(update={"workers": 0}),
        recipe.training,
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
        **forecaster.model.sample_specs(load_tokenizer(recipe.model)),
    )
    (batch,) = islice(loader, 1)
    loaded = sum(microbatch.nbytes for microbatch in batch.microbatches)
    counted = terms_of(recipe, device="cpu")["batch of the current step"]
    assert loaded / 8 < counted <= loaded


def test_dry_run_shows_prefetched_batches_and_states(data, tmp_path):  # noqa: F811
    changes = {"workers": 3, "prefetch": 4}
    recipe = read(data, tmp_path, optimizer={"offload": True}, data=changes)
    line = next(x for x in describe_run(recipe, 1).splitlines() if x.startswith("host memory"))
    assert "at least" in line and "on a node of 1 ranks" in line
    assert "12 steps per rank" in line and "optimizer states" in line
