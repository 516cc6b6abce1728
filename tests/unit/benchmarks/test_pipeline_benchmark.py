"""The pipeline benchmark: documents, candidates, medians, and a tiny run of all cases."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a module of benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def import_module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return import_module


@pytest.mark.slow
def test_all_pipeline_cases_write_rows(tmp_path, train_server):
    file = tmp_path / "rows.json"
    script = BENCHMARKS / "pipeline_runtime.py"
    codes, output = train_server.run(["--tiny", "--json", file], tmp_path, script=script)
    assert codes == [0], output
    rows = {(row["case"].split(",")[0], row["metric"]): row for row in json.loads(file.read_text())}
    for case in ("2 ranks", "8 sleeping ranks"):
        for baseline in ("encoder in stage 0", "single pipeline"):
            assert rows[case, f"speedup, {baseline}"]["baseline"] == 1
            assert rows[case, f"step time, {baseline}"]["ours"] > 0
            assert 0 < rows[case, f"idle fraction, {baseline}"]["baseline"] < 1
    assert rows["8 sleeping ranks", "speedup, encoder in stage 0"]["goal"] == 1.3
    assert rows["2 ranks", "speedup, encoder in stage 0"]["goal"] == 1.15
    assert rows["2 ranks", "gradient difference"]["met"] is True
    assert rows["1 rank", "overhead per compute action"]["better"] == "lower"
    assert all(row["kind"] == "measured" for row in rows.values())


def test_documents_fill_microbatches_and_vary_in_images(load):
    documents = load("documents")
    loaded = documents.load_documents()
    assert len(loaded.pages) == 622 and sum(p.count(0) for p in loaded.pages) == 2434
    packs = documents.pack_documents(loaded, tokens=2048, image_tokens=64)
    used = [sum(sample.tokens for sample in pack) for pack in packs]
    images = [sum(sample.images for sample in pack) for pack in packs]
    assert max(used) <= 2048 and sum(used) > 0.98 * 2048 * len(packs)
    assert min(images) <= 2 and max(images) >= 20


@pytest.mark.parametrize(
    ("page", "sample"),
    [
        ([5, 0, 3], (1, 12)),
        ([5, 0, 9], (1, 14)),  # text is truncated
        ([5, 0, 3, 0], (1, 12)),  # an image is not truncated
        ([20], (0, 14)),
        ([0, 0, 0, 0], (3, 12)),
    ],
)
def test_pages_are_truncated_at_limit(load, page, sample):
    assert load("documents").truncate(page, 14, 4, 1) == sample


def test_text_length_shrinks_with_microbatch(load):
    assert load("documents").truncate([9, 0, 1], 100, 4, 4) == (1, 3 + 4 + 1)


def test_splits_are_all_balanced_splits(load):
    case = load("support.cases.pipeline_model_case")
    modules = [
        case.ModuleLayers("vision", "encoder", (1.0,) * 4, True),
        case.ModuleLayers("llm", "llm", (1.0,) * 4),
    ]
    splits = set(case.splits(modules, stages=2, slack=1.3))
    assert splits == {
        (2, 6),
        (3, 5),
        (4, 4),
        (5, 3),
    }  # split and complete encoders, within a slack of 1.3
    assert [split for split in sorted(splits) if case.in_front(modules, split)] == [(4, 4), (5, 3)]
    four = set(case.splits(modules, stages=4, slack=1.0))
    assert (4, 1, 1, 2) in four  # rank 0 must have five layers if it has the encoder
    assert (4, 1, 2, 1) not in four and (4, 1, 2, 1) in set(
        case.splits(modules, stages=4, slack=1.3)
    )
    for split in four:
        assert sum(split) == 8 and min(split) >= 1


def test_split_can_have_both_modules_in_one_stage(load):
    case = load("support.cases.pipeline_model_case")
    modules = [
        case.ModuleLayers("vision", "encoder", (1.0,) * 4, True),
        case.ModuleLayers("llm", "llm", (1.0,) * 4),
    ]
    layout = case.chain_layout(modules, (3, 2, 1, 2))
    actual = [(s.module, s.start, s.stop, s.ranks, s.virtual_stage) for s in layout.stages]
    assert actual == [
        ("vision", 0, 3, (0,), 0),
        ("vision", 3, 4, (1,), 1),
        ("llm", 0, 1, (1,), 1),
        ("llm", 1, 2, (0,), 2),
        ("llm", 2, 4, (1,), 3),
    ]


def test_ratios_are_medians_and_times_are_means(load):
    ranks = load("support.ranks")

    def times(*walls: float) -> list:
        return [ranks.StepTime(wall, wall, 0.0) for wall in walls]

    comparison = ranks.Comparison(
        {"ours": times(1.0, 2.0, 1.0, 40.0), "stock": times(2.0, 5.0, 2.0, 100.0)},
        steps=[0, 1, 0, 1],
        ranks=2,
        disturbed=0,
    )
    assert comparison.speed_ratio("ours", "stock") == 2.25
    assert comparison.wall_s("ours") == (1.0 + 21.0) / 2
    assert comparison.idle_share("ours") == 0.5


def fail_on_rank_1() -> str:
    import torch.distributed as dist  # noqa: PLC0415

    if dist.get_rank() == 1:
        raise ValueError("no")
    return "result"


def test_failing_rank_fails_benchmark(load):
    ranks = load("support.ranks")
    with pytest.raises(ranks.RankFailedError, match=r"(?s)rank 1.*ValueError: no"):
        ranks.run_ranks(fail_on_rank_1, 2)
