"""Optional features of recipes, each with train.py on real data."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_recipe import QUICKSTART, arguments, records, weights

from torchmm.recipe.read import load_recipe
from torchmm.training.metrics import METRICS

pytestmark = pytest.mark.slow
STEPS = 4
COMMON = {"training__steps": STEPS, "training__global_batch_size": 4}


@pytest.fixture
def train(tmp_path, real_data, train_server):
    """Return a function that runs a recipe and returns its run directory."""

    def run(name: str, ranks: int = 1, env: dict | None = None, **changes: object) -> Path:
        command = arguments(tmp_path / name, real_data, **{**COMMON, **changes})
        codes, output = train_server.run(command, tmp_path / f"{name}-log", ranks, **env or {})
        assert codes == [0] * ranks, output
        assert "Traceback" not in output
        return tmp_path / name

    return run


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, real_data, train_server) -> Path:
    """Run a recipe with all records, images and trackers enabled."""
    run_dir = tmp_path_factory.mktemp("everything") / "run"
    changes = {
        "validation__interval": 2,
        "validation__batches": 1,
        "validation__num_samples": 2,
        "validation__max_new_tokens": 3,
        "checkpoint__interval": 2,
        "metrics__profile_step": 3,
        "metrics__memory_snapshot_step": 3,
        "metrics__tensorboard": "true",
        "metrics__wandb": "offline",
    }
    command = arguments(run_dir, real_data, **COMMON, **changes)
    codes, output = train_server.run(command, run_dir.parent / "log")
    assert codes == [0], output
    return run_dir


@pytest.fixture(scope="module")
def losses(full_run) -> list[float]:
    """Return the losses of the float32 run on one process, which no feature may change."""
    return [r["loss"] for r in records(full_run)]


def losses_of(run_dir: Path) -> list[float]:
    return [r["loss"] for r in records(run_dir)]


def test_metrics_have_all_fields_in_range(full_run):
    steps = records(full_run)
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    for record in steps:
        assert set(record) == set(METRICS)
        for key in ("loss", "grad_norm", "lr", "tokens_per_s", "samples_per_s", "media_per_s"):
            assert record[key] > 0, key
        assert 0 < record["mfu"] < 1
        parts_ms = [record[k] for k in ("data_wait_ms", "encoder_ms", "llm_ms")]
        assert min(parts_ms) > 0 and sum(parts_ms) < record["step_ms"]
        assert 1e8 < record["peak_memory_bytes"] < 1e11
        assert record["slowest_rank"] == record["skipped_samples"] == 0
        assert 0 < record["epoch"] < 1 and record["filtered_samples"] is None
        assert record["bubble_fraction"] is None
    memory = json.loads((full_run / "memory.json").read_text())
    (rank,) = memory["ranks"]
    # On CPU, the measurement includes the process and its libraries.
    assert 1e6 < rank["predicted_bytes"] < rank["measured_bytes"] < 1e11
    assert rank["measured_bytes"] == steps[memory["step"] - 1]["peak_memory_bytes"]
    assert [r["validation_loss"] is None for r in steps] == [True, False, True, False]
    assert steps[-1]["validation_loss"] < steps[1]["validation_loss"]


def test_samples_have_prompt_truth_and_text(full_run):
    samples = json.loads((full_run / "samples.json").read_text())
    assert [s["step"] for s in samples] == [2, 2, 4, 4]
    for sample in samples:
        assert sample["truth"] and isinstance(sample["generated"], str)
        assert "<image>" not in sample["prompt"] + sample["truth"]
    assert [s["truth"] for s in samples[:2]] == [s["truth"] for s in samples[2:]]


def test_profiler_trace_names_step_and_phases(full_run):
    assert [p.name for p in (full_run / "profile").iterdir()] == ["step-3-rank-0.json"]
    trace = json.loads((full_run / "profile/step-3-rank-0.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"step 3", "data", "0F0", "0B0", "aten::mm"} <= names


def test_trackers_write_files(full_run):
    events = EventAccumulator(str(full_run / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    assert list((full_run / "wandb").glob("offline-run-*/run-*.wandb"))


def test_saved_recipe_reproduces_settings(full_run):
    recipe = load_recipe(full_run / "recipe.toml", world_size=1).recipe
    assert recipe.training.steps == STEPS and recipe.metrics.wandb == "offline"


def test_unreachable_wandb_does_not_stop_training(train, losses):
    env = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    run_dir = train("online", metrics__wandb="online", env=env)
    assert losses_of(run_dir) == losses
    assert "is unreachable" in (run_dir / "logs/rank-0.log").read_text()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_keeps_losses(mode, train, losses):
    assert losses_of(train(mode, activation_checkpoint__mode=mode)) == losses


def test_auto_recomputation_keeps_losses_within_limit(
    train, losses, tmp_path, real_data, train_server
):
    """A limit below the minimum is rejected. A sufficient limit does not change losses."""
    limit = {"activation_checkpoint__mode": "auto", "activation_checkpoint__memory_limit": "1 MiB"}
    command = arguments(tmp_path / "rejected", real_data, **{**COMMON, **limit})
    codes, output = train_server.run(command, tmp_path / "rejected-log", 1)
    assert codes == [2] and "Traceback" not in output, output
    needed = re.search(r"\((\d+) bytes\) even with full recomputation", " ".join(output.split()))
    assert needed and "activation_checkpoint.memory_limit" in output
    limit["activation_checkpoint__memory_limit"] = f"{1.2 * int(needed[1]) / 2**20:.3f} MiB"
    assert losses_of(train("tuned", **limit)) == losses


def test_bfloat16_is_close_to_float32(train, losses):
    """bfloat16 has 8 significant bits: 2**-8 relative per operation, less in means."""
    alone = losses_of(train("one", training__dtype="bfloat16"))
    sharded = losses_of(train("two", ranks=2, training__dtype="bfloat16"))
    assert alone != losses
    assert alone == pytest.approx(losses, rel=1e-3)
    assert sharded == pytest.approx(losses, rel=1e-3)
    assert sharded == pytest.approx(alone, rel=1e-4)


def test_deterministic_runs_give_the_same_bits(train, losses):
    first, second = (
        weights(train(name, ranks=2, training__deterministic="true", checkpoint__interval=4))
        for name in ("a", "b")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def changed_modules(run_dir: Path) -> tuple[set[str], set[str]]:
    """Return modules that change between steps 1 and 4, and those with optimizer state."""
    early, late = (
        {
            name: value
            for file in (run_dir / f"checkpoints/step-{step}").glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        for step in (1, 4)
    )
    changed, stateful = set(), set()
    for name, value in late.items():
        module = next((m for m in ("connector", "vision", "llm") if m in name), "")
        if "exp_avg" in name:
            stateful.add(module)
        elif name.startswith("model.") and not torch.equal(value, early[name]):
            changed.add(module)
    return changed, stateful


@pytest.mark.parametrize(
    ("frozen", "trained"),
    [(["llm"], {"vision", "connector"}), (["llm", "vision"], {"connector"})],
    ids=["llm", "llm and tower"],
)
def test_frozen_modules_keep_their_weights(frozen, trained, train):
    keep = {"checkpoint__interval": 1, "checkpoint__keep_latest": 9}
    run_dir = train("frozen", ranks=2, freeze__modules=json.dumps(frozen), **keep)
    assert changed_modules(run_dir) == (trained, trained)


def test_learning_rate_by_module(train):
    keep = {"checkpoint__interval": 1, "checkpoint__keep_latest": 9}
    run_dir = train("rates", **keep, **{"optimizer__module_lr__vision.connector": 0.0})
    assert changed_modules(run_dir)[0] == {"vision", "llm"}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1]),
        ("wsd", [0.5, 1, 0.55, 0.1]),
        ("cosine", [0.5, 1, 0.55, 0.1]),
    ],
)
def test_learning_rate_schedules(schedule, expected, train):
    changes = {"optimizer__lr_schedule": schedule, "optimizer__decay_fraction": 0.5}
    changes["optimizer__min_lr_ratio"] = 0.1
    run_dir = train(schedule, training__global_batch_size=1, optimizer__lr=1e-3, **changes)
    rates = [r["lr"] for r in records(run_dir)]
    assert rates == pytest.approx([1e-3 * factor for factor in expected])


def test_compiled_layers_have_two_graphs_each(train, losses):
    """Packing gives every microbatch different segments and image counts.

    Layers are only traced, because compilation takes a minute.
    """
    run_dir = train(
        "traced",
        compile__enabled="true",
        compile__backend="eager",
        activation_checkpoint__mode="selective",
        validation__interval=2,
        validation__num_samples=2,
        validation__max_new_tokens=3,
    )
    assert losses_of(run_dir) == pytest.approx(losses, rel=1e-5)
    steps = records(run_dir)
    assert 2 <= sum(r["compiled_graphs"] for r in steps) <= 4, (
        "two modules: several images, a single one"
    )
    assert [r["compile_ms"] is None for r in steps] == [r["compiled_graphs"] == 0 for r in steps]
    assert not (run_dir / "logs/rank-0.log").exists(), "no warning"


@pytest.mark.campaign
def test_compiled_code_is_cached_with_same_loss(tmp_path, real_data, train_server, train):
    """Run one step with one microbatch, because compiling a graph takes seconds."""
    short = {**COMMON, "training__steps": 1, "training__global_batch_size": 1}
    short["optimizer__warmup_steps"] = 0
    eager = records(train("eager", **short))[0]
    changes = {**short, "compile__enabled": "true", "compile__modules": '["llm"]'}
    run_dir, cache = tmp_path / "compiled", tmp_path / "cache"
    command = arguments(run_dir, real_data, **changes)
    for cached in (0, 1):  # the second run uses the cache of the first
        env = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        codes, output = train_server.run(command, tmp_path / f"log-{cached}", 1, **env)
        assert codes == [0], output
        assert "compile_cache" not in {path.name for path in run_dir.iterdir()}
        assert re.search(rf"step 1: 1 graphs of layers compiled in .* s, {cached} of them", output)
        compiled = records(tmp_path / "compiled")[0]
        assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-5)
        assert compiled["grad_norm"] == pytest.approx(eager["grad_norm"], rel=1e-5)
    assert list(cache.rglob("*.so"))
    assert any(is_pickle(path) for path in cache.rglob("*")), "control"
    assert not [path for path in run_dir.rglob("*") if is_pickle(path)]


def is_pickle(path: Path) -> bool:
    """Return True if a file starts like a pickle of protocol 2 or later."""
    return path.is_file() and re.match(rb"\x80[\x02-\x05]", path.read_bytes()[:2]) is not None


def test_print_config_and_dry_run(tmp_path, train_server):
    options = ["--config", QUICKSTART, "--optimizer.lr", "0.5", "--training.steps=70"]
    codes, output = train_server.run([*options, "--print-config"], tmp_path)
    assert codes == [0]
    (tmp_path / "printed.toml").write_text(output)
    printed = load_recipe(tmp_path / "printed.toml").recipe
    assert (printed.optimizer.lr, printed.training.steps) == (0.5, 70)

    sizes = ["--training.global_batch_size=128", "--parallel.tensor=2", "--name=never"]
    dry = [*options, *sizes, "--output_dir", tmp_path, "--dry-run", "--world-size", 64]
    codes, output = train_server.run(dry, tmp_path)
    assert codes == [0], output
    assert (
        "64 = pipeline 2 x replicate 1 x shard 16 x tensor 2" in output
        and "memory per rank" in output
    )
    assert "simulated (optimizer" in output and "MFU" in output
    assert [f.name for f in (tmp_path / "never").rglob("*") if f.is_file()] == ["plan.svg"]
