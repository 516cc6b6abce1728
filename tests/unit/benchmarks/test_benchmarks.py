"""Benchmarks: goals, paired runs, samples, shapes, and one benchmark run for its JSON file."""

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.costs.flops import microbatch_flops
from torchmm.models.build import build_model
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
COLUMNS = {
    "case": str, "metric": str, "unit": str, "ours": float, "baseline": float | None,
    "paper": float | None, "goal": float | None, "met": bool | None, "better": str, "kind": str,
}  # fmt: skip
PUBLISHED_SIZES = {
    # LLM parameters: Hugging Face counts for Qwen/Qwen3-1.7B (tied head) and Qwen/Qwen3-8B.
    "so400m_qwen3_1.7b": 1_720_574_976,
    "so400m_qwen3_8b_frozen_llm": 8_190_735_360,
}


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a module of benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def import_module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return import_module


@pytest.mark.slow
def test_single_device_writes_rows_of_schema(tmp_path, train_server):
    file = tmp_path / "rows.json"
    script = BENCHMARKS / "single_device.py"
    options = ["--quick", "--pairs", "1", "--shapes", "tiny", "--device", "cpu", "--json", file]
    codes, output = train_server.run(options, tmp_path, script=script)
    assert codes == [0], output
    rows = json.loads(file.read_text())
    cases = {"tiny, equal lengths, float32", "tiny, real lengths, float32"}
    if find_spec("trl"):
        cases.add("tiny, real lengths, float32, against TRL")
    assert {row["case"] for row in rows} == cases
    for row in rows:
        assert row.keys() == COLUMNS.keys()
        for name, kind in COLUMNS.items():
            assert isinstance(row[name], kind), (name, row[name])
        assert row["better"] in ("higher", "lower") and row["kind"] in ("measured", "simulated")
        assert (row["met"] is None) == (row["goal"] is None)
    metrics = {"throughput", "speedup", "CPU time ratio", "MFU", "padding"}
    assert {row["metric"] for row in rows} == metrics
    padding = {r["case"]: r["baseline"] for r in rows if r["metric"] == "padding"}
    assert padding["tiny, equal lengths, float32"] == 0 < padding["tiny, real lengths, float32"]


def test_planning_is_measured_at_stated_size(load):
    rows = load("pipeline_planning").measure("separated", repetitions=1)
    assert [row.metric for row in rows] == ["schedule", "lowering", "validation"]
    assert all(row.ours > 0 and row.better == "lower" for row in rows)
    actions = int(rows[0].case.split()[-2])
    assert 7000 <= actions <= 8000, rows[0].case


@pytest.mark.campaign
def test_background_planning_reduces_rank_time(load):
    *rows, processes = load("support.cases.planning_at_scale").rows(1)
    assert "1290 GPUs" in rows[0].case and processes.ours > 100
    for row in rows:
        assert row.better == "lower" and 0 < row.ours < row.baseline / 20, row.metric


def test_different_losses_stop_benchmark(load):
    benchmark = load("single_device")
    benchmark._check_losses("same", 2.0, 2.0 + 1e-6, 1e-5)
    for ours in (2.1, float("nan")):
        with pytest.raises(benchmark.LossMismatchError, match="other"):
            benchmark._check_losses("other", ours, 2.0, 1e-5)


@pytest.mark.parametrize(
    ("better", "ours", "met"),
    [("higher", 1.0, True), ("higher", 0.9, False), ("lower", 1.1, False), ("lower", 0.9, True)],
)
def test_goal_direction_follows_better(load, better, ours, met):
    row = load("support.harness").Row("case", "metric", "unit", ours, goal=1.0, better=better)
    assert row.met is met


def test_speed_ratio_is_median_of_pairs(load):
    # A minute in which all programs are ten times slower has no effect.
    harness = load("support.harness")
    ours, baseline = [(1.0, 1.0), (10.0, 1.0), (1.0, 2.0)], [(2.0, 3.0), (20.0, 3.0), (1.5, 2.0)]
    times = harness.PairedTimes(*([harness.Seconds(*t) for t in side] for side in (ours, baseline)))
    assert times.speed_ratio == 2.0
    assert times.cpu_ratio == 3.0


def test_synthetic_captions_depend_on_seed(load, tmp_path):
    first, second = (load("support.captions").load_captions(3, data=tmp_path) for _ in range(2))
    assert first.records == second.records
    lengths = {len(first.tokenizer(r["text"]).input_ids) for r in first.of_one_length().records}
    assert len(lengths) == 1


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_published_shapes_have_their_size_and_flops(load, name):
    shape = load("support.shapes").SHAPES[name]
    config = ModelConfig(config=shape.llava_config(image_token_id=5))
    model = build_model(config, FreezeConfig(modules=list(shape.frozen)))
    sizes = {module: total for module, (total, _) in model.parameter_counts().items()}
    assert sizes["llm"] == PUBLISHED_SIZES[name]
    image = ImageMeta(width_px=384, height_px=384, patches=729, tokens=729)
    samples = (SampleMeta("s", 0, tokens=740, images=(image,), encoder="vision"),) * 11
    meta = MicrobatchMeta(samples, tokens=8192)
    flops = microbatch_flops([m.describe() for m in model.modality_modules()], meta)
    # Two FLOPs per parameter and token in forward, and twice that in backward (once if frozen).
    # Attention adds FLOPs, and embedding tables have none.
    tokens = 11 * 740
    table = 0 if model.llm.config.get_text_config().tie_word_embeddings else 151936 * 4096
    dense = 2 * (sizes["llm"] - table) * tokens
    assert flops["llm"].forward == pytest.approx(dense, rel=0.06) and flops["llm"].forward > dense
    ratio = flops["llm"].backward / flops["llm"].forward
    assert ratio == pytest.approx(1 if shape.frozen else 2, rel=0.05)
