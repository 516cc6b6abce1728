"""Tests of step simulation: plans of recipes, timed by the cost model; tables, files, errors."""

import json
import runpy
from math import inf
from pathlib import Path

import pytest
import tomli
from rich.console import Console

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.recipe_simulation.dry_run import _launch_lines, describe_run
from torchmm.balance.recipe_simulation.first_microbatches import first_microbatches
from torchmm.balance.recipe_simulation.report import (
    build_report_table,
    fastest_report,
    write_reports,
)
from torchmm.balance.recipe_simulation.step_simulator import SimulatedStepReport, StepSimulator
from torchmm.balance.search.plan_search import compare_schedules
from torchmm.balance.search.plan_space import describe_choices
from torchmm.common.errors import ConfigError
from torchmm.pipelining.view.records import read_records
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import SCHEDULES

ROOT = Path(__file__).parents[4]
SIMULATE = runpy.run_path(str(ROOT / "scripts/simulate.py"))["main"]
RECIPE = """
name = "tiny"
[model.llm.config]
model_type = "llama"
vocab_size = 512
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 8
num_attention_heads = 4
num_key_value_heads = 2
[model.encoders.vision]
modality = "image"
[model.encoders.vision.config]
model_type = "siglip_vision_model"
image_size = 64
patch_size = 16
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 4
num_attention_heads = 4
[parallel]
pipeline = 4
[training]
sequence_length = 512
global_batch_size = 16
microbatch_size = 1
steps = 10
dtype = "bfloat16"
[simulation]
device = "a100"
gpus = 8
[simulation.images.vision]
patches = 16
tokens = 16
[[simulation.sequences]]
images = [0, 12]
"""

ENCODER = "hidden_size = 1024\nintermediate_size = 4096\nnum_hidden_layers = 8"
"""Sizes of an encoder whose time is not dominated by kernel launches."""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:

    return Recipe.model_validate(tomli.loads(recipe_file.read_text()))


def test_mixed_image_sizes_require_native_resolution_encoder(recipe_file):
    text = recipe_file.read_text().replace("patches = 16\ntokens", "patches = [4, 16]\n# tokens")
    with pytest.raises(
        ConfigError, match=r"simulation.images.vision: .* resizes all images to one"
    ):
        StepSimulator(Recipe.model_validate(tomli.loads(text)), 8, load_profile("a100"))


def test_balanced_images_shorten_simulated_step(recipe_file, monkeypatch):
    text = recipe_file.read_text().replace("pipeline = 4", 'schedule = "1f1b"')
    for small, large in (
        ("image_size = 64", "image_size = 448"),
        ("patches = 16", "patches = 784"),
        ("hidden_size = 256\nintermediate_size = 512\nnum_hidden_layers = 4", ENCODER),
    ):
        text = text.replace(small, large)
    recipe = Recipe.model_validate(tomli.loads(text))

    def forecast(balance: str) -> tuple[StepSimulator, SimulatedStepReport]:
        data = recipe.data.model_copy(update={"balance": balance})
        changed = recipe.model_copy(update={"data": data})
        forecaster = StepSimulator(changed, 8, load_profile("a100"))
        return forecaster, forecaster.simulate_schedule()

    _, natural = forecast("none")
    forecaster, balanced = forecast("images")
    assert balanced.iteration_ms < natural.iteration_ms
    counts = [[meta.module_image_count("vision") for meta in share] for share in forecaster._shares]
    packs = forecaster.sample.packs
    assert sum(map(sum, counts)) == sum(pack.module_image_count("vision") for pack in packs)
    assert all(max(column) - min(column) <= 1 for column in zip(*counts, strict=True))
    monkeypatch.setattr(CostModel, "transfer_times_ms", lambda self, sent, links: [0.0] * len(sent))
    _, free = forecast("images")
    assert free.iteration_ms < balanced.iteration_ms


def test_every_schedule_is_simulated(recipe):
    forecaster = StepSimulator(recipe, 8, load_profile("a100"))
    forecasts = [forecaster.simulate_schedule(name) for name in SCHEDULES]
    assert [f.schedule for f in forecasts] == list(SCHEDULES)
    for forecast in forecasts:
        step = forecast.step
        assert step is not None, forecast.problem
        assert step.fits and 0 < forecast.mfu < 1
        assert 0 < forecast.update_ms < step.makespan_ms
        seconds = forecast.iteration_ms / 1e3
        assert forecast.tokens_per_s == pytest.approx(16 * 512 / seconds)
        share = forecaster.workload.mean_flops_fraction
        assert forecast.mfu == pytest.approx(step.model_flops * share / seconds / (4 * 312e12))
    times = {f.schedule: f.iteration_ms for f in forecasts}
    assert times["separated"] < times["gpipe"]
    assert fastest_report(forecasts).iteration_ms == min(times.values())


def test_compared_schedules_keep_recipe_sizes(recipe):
    """Check that the search changes only open choices, and that no schedule becomes slower."""
    sizes = {"vision": {"sub_microbatch_images": 2}, "llm": {"segments": 2}}
    content = {**recipe.parallel.model_dump(exclude_unset=True), **sizes, "schedule": "separated"}
    recipe = recipe.model_copy(update={"parallel": ParallelConfig.model_validate(content)})
    forecaster = StepSimulator(recipe, 8, load_profile("a100"))
    plans = compare_schedules(
        forecaster.recipe, 8, forecaster.profile, forecaster.sample, budget_s=2.0
    )
    assert set(plans) == set(SCHEDULES) - {"megatron_balanced"}
    for name, plan in plans.items():
        assert not isinstance(plan, str), f"{name}: {plan}"
        parallel = plan.recipe.parallel
        assert (parallel.schedule, parallel.pipeline, parallel.tensor) == (name, 4, 1)
        assert plan.recipe.training.microbatch_size == 1
        assert plan.recipe.activation_checkpoint == recipe.activation_checkpoint
        if name in ("separated", "searched"):
            assert parallel.modules["llm"].segments == 2
            assert parallel.modules["vision"].sub_microbatch_images == 2
    expected_ms = forecaster.simulate_schedule("separated").iteration_ms
    assert plans["separated"].step_ms <= expected_ms
    assert "vision tensor" not in describe_choices(plans["separated"].plan, recipe)


def test_most_loaded_pipeline_is_simulated(recipe):
    one, two = (StepSimulator(recipe, n, load_profile("a100")).workload for n in (4, 8))
    assert len(one.microbatches) == 16 and len(two.microbatches) == 8
    assert one.mean_flops_fraction == 1 and two.mean_flops_fraction < 1
    halves = [one.microbatches[:8], one.microbatches[8:]]
    images = [sum(meta.image_count for meta in half) for half in halves]
    assert sum(meta.image_count for meta in two.microbatches) == max(images)


def test_device_and_recomputation_change_simulated_time(recipe):
    slow = StepSimulator(recipe, 8, load_profile("a100")).simulate_schedule().step.makespan_ms
    fast = StepSimulator(recipe, 8, load_profile("h100")).simulate_schedule().step.makespan_ms
    recomputed = recipe.model_copy(deep=True, update={
        "activation_checkpoint": recipe.activation_checkpoint.model_copy(update={"mode": "full"})
    })  # fmt: skip
    again = StepSimulator(recomputed, 8, load_profile("a100")).simulate_schedule().step
    assert fast < slow < again.makespan_ms


def test_auto_checkpointing_uses_available_memory(recipe):
    def forecast(mode: str, limit: str = "100%") -> SimulatedStepReport:
        changed = recipe.activation_checkpoint.model_copy(
            update={"mode": mode, "memory_limit": limit}
        )
        tuned = recipe.model_copy(update={"activation_checkpoint": changed})
        return StepSimulator(tuned, 8, load_profile("a100")).simulate_schedule()

    full, none = forecast("full").step, forecast("none").step
    minimum, maximum = max(full.peak_bytes), max(none.peak_bytes)
    limit = minimum + (maximum - minimum) // 2
    tuned = forecast("auto", f"{limit / 2**20:.3f} MiB").step
    assert minimum < max(tuned.peak_bytes) <= limit + 2**11
    assert none.makespan_ms < tuned.makespan_ms < full.makespan_ms
    assert forecast("auto").step.makespan_ms == none.makespan_ms
    rejected = forecast("auto", "1 MiB")
    assert rejected.step is None and "requires" in rejected.problem and "rank 0" in rejected.problem


def test_simulation_without_plan_keeps_its_problem():
    simulated = SimulatedStepReport("1f1b", problem="no plan fits")
    assert simulated.as_dict() == {"schedule": "1f1b", "problem": "no plan fits"}
    assert simulated.iteration_ms == inf


def test_simulation_files_match_table(recipe, tmp_path):
    forecaster = StepSimulator(recipe, 8, load_profile("a100"))
    simulated = [forecaster.simulate_schedule(name) for name in ("megatron", "separated")]
    files = write_reports(tmp_path / "out", forecaster, simulated)
    content = json.loads(files[0].read_text())
    assert content["layout"] == {"pipeline": 4, "replicate": 1, "shard": 2, "tensor": 1}
    for forecast, row in zip(simulated, content["schedules"], strict=True):
        records, _ = read_records(tmp_path / "out" / f"{forecast.schedule}.json")
        assert row["step_ms"] == max(r.end_ms for r in records)
        assert row["iteration_ms"] == row["step_ms"] + row["update_ms"]
        assert row["fits"] and row["peak_memory_bytes"] == list(forecast.step.peak_bytes)
        assert (tmp_path / "out" / f"{forecast.schedule}.svg").read_text().startswith("<svg")
        assert json.loads((tmp_path / "out" / f"{forecast.schedule}.trace.json").read_text())
    console = Console(width=200, record=True)
    console.print(build_report_table(forecaster, simulated))
    text = console.export_text()
    assert f"{simulated[0].iteration_ms:,.1f}" in text and f"{simulated[0].update_ms:,.1f}" in text
    assert (
        f"{fastest_report(simulated).schedule} *" in text
        and "vision" in text
        and "8 x a100" in text
    )


def test_unsplittable_model_reports_layers(recipe):
    recipe.parallel.__dict__["virtual_stages"] = 3
    simulated = StepSimulator(recipe, 8, load_profile("a100")).simulate_schedule("separated")
    assert simulated.step is None and "layers" in simulated.problem


def test_dry_run_plots_plan_and_checks_memory(recipe, tmp_path):
    plot = tmp_path / "run" / "plan.svg"
    text = describe_run(recipe, 8, plot)
    assert "ms on a100 (simulation.device), simulated" in text and plot.read_text().startswith(
        "<svg"
    )
    small = tmp_path / "small.toml"
    small.write_text('base = "a100"\n[device]\nmemory_bytes = 1e6\n')
    recipe.simulation.__dict__["device"] = str(small)
    with pytest.raises(ConfigError, match=r"would require .* GiB"):
        describe_run(recipe, 8)
    recipe.simulation.__dict__["device"] = "abacus"
    with pytest.raises(ConfigError, match="abacus"):
        describe_run(recipe, 8)


def test_dry_run_recommends_hsdp_if_faster(recipe, tmp_path):
    """Use a slow network, over which shards on 2 nodes all-gather all parameters in every layer."""
    slow = tmp_path / "slow.toml"
    slow.write_text('base = "a100"\n[device]\nnetwork_bytes_per_s = 1e8\n')
    recipe.simulation.__dict__["device"] = str(slow)
    parallel = recipe.parallel.model_copy(update={"pipeline": 1})
    unpipelined = recipe.model_copy(update={"parallel": parallel})
    advice = "parallel.replicate = 2 and parallel.shard = 8 (HSDP)"
    assert advice in describe_run(unpipelined, 16)
    assert "(HSDP)" not in describe_run(unpipelined, 8), "one node"
    assert "(HSDP)" not in describe_run(recipe, 16), "a pipeline"
    nodes = parallel.model_copy(update={"replicate": 2, "shard": 8})
    assert "(HSDP)" not in describe_run(recipe.model_copy(update={"parallel": nodes}), 16)


def test_dry_run_prints_launch_commands(recipe):
    few = describe_run(recipe, 8, arguments=["--config", "my recipe.toml"])
    assert "torchrun --nproc-per-node 8 train.py --config 'my recipe.toml'" in few
    assert "sbatch" not in few and "--nnodes" not in few
    many = describe_run(recipe, 16, arguments=["--config", "r.toml"])
    assert "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d" in many
    assert "sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 scripts/launch/slurm.sh" in many
    assert "start with" not in describe_run(recipe, 8)
    uneven = _launch_lines(["--config", "r.toml"], 62, 8)
    assert "--nnodes 8 --nproc-per-node 8" in uneven["start with"]
    assert "on one of them with --nproc-per-node 6" in uneven["start with"]
    assert "--nodes 8 --ntasks 62 --ntasks-per-node 8" in uneven["or, with Slurm"]


def test_simulate_script_prints_table_and_errors(recipe_file, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--config", str(recipe_file), "--schedule", "all", "--out", str(out)]
    assert SIMULATE(options) == 0
    printed = capsys.readouterr().out
    names = set(SCHEDULES) - {"megatron_balanced"}
    assert all(name in printed for name in names) and str(out / "simulation.json") in printed
    assert "* fastest schedule that fits into memory" in printed
    assert SIMULATE(["--config", str(recipe_file), "--device", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
    assert SIMULATE(["--config", str(recipe_file), "--schedule", "magic"]) == 2
    assert "magic" in capsys.readouterr().err
    assert SIMULATE(["--config", str(recipe_file), "--gpus", "6"]) == 2
    assert "6 ranks" in capsys.readouterr().err


def test_reordering_shortens_simulated_step(recipe):
    profile = load_profile("cpu")
    parallel = recipe.parallel.model_copy(update={"pipeline": 2, "schedule": "1f1b"})
    natural = recipe.model_copy(update={"parallel": parallel})
    data = natural.data.model_copy(update={"reorder": "both"})
    plain, better = (
        StepSimulator(r, 8, profile) for r in (natural, natural.model_copy(update={"data": data}))
    )
    assert better.workload.mean_flops_fraction > plain.workload.mean_flops_fraction
    assert better.simulate_schedule().step.makespan_ms < plain.simulate_schedule().step.makespan_ms
    assert len(better.workload.microbatches) == len(plain.workload.microbatches)


def test_dry_run_plans_with_recipe_data(real_data, tmp_path):
    """Check that data sources override the simulated samples of a base recipe."""
    text = RECIPE.replace("vocab_size = 512", "vocab_size = 1024").replace(
        'name = "tiny"',
        f'name = "tiny"\n[model]\ntokenizer = "{real_data / "tokenizer"}"\nimage_token = "<image>"',
    )
    source = f'\n[[data.sources]]\npath = "{real_data / "tuxpaint_stamps/train"}"\n'
    index = f'[data]\nindex_cache_dir = "{tmp_path}"\n'
    with_sources, assumed = (
        Recipe.model_validate(tomli.loads(text + section)) for section in (index + source, index)
    )
    lines = describe_run(with_sources, 8)
    assert "first step of [[data.sources]]" in lines
    assert "described in [simulation]" in describe_run(assumed, 8)
    microbatches = first_microbatches(with_sources, recipe_model(with_sources), 2)
    sources = {s.source for share in microbatches for meta in share for s in meta.samples}
    assert sources == {"tuxpaint_stamps/train"}


def test_inline_model_with_data_requires_tokenizer(tmp_path, real_data):
    source = f'\n[[data.sources]]\npath = "{real_data / "tuxpaint_stamps/train"}"\n'
    (tmp_path / "recipe.toml").write_text(RECIPE + source)
    with pytest.raises(ConfigError, match=r"model\.tokenizer: is required"):
        load_recipe(tmp_path / "recipe.toml", [], 8)
    load_recipe(tmp_path / "recipe.toml", ["--data.sources", "[]"], 8)
