"""The benchmark of model families: equal losses, rows, and an error if losses differ."""

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchmm.parallel.mesh import start_process_group
from torchmm.recipe.parallel_section import ParallelConfig

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("families")


@pytest.fixture
def samples(benchmark, tmp_path):
    return benchmark.renumbered(benchmark.load_captions(3, data=tmp_path), 4)


def test_all_supported_families_are_compared(benchmark):
    cases = benchmark.families(benchmark.QUICK, 64)
    composites = {case.config["model_type"] for case in cases if case.composite}
    texts = {case.config["model_type"] for case in cases if not case.composite}
    llms = importlib.import_module("torchmm.models.families.llms.registry").LLM_FAMILIES
    assert composites == set(benchmark.COMPOSITES)
    assert texts == set(llms)


QUICK = ("lfm2", "qwen3_vl", "qwen2_audio")
OTHERS = (
    *("gemma3", "gemma4", "mistral3", "glm4v_moe"),
    *("qwen3_omni_moe_thinker", "llava_onevision", "voxtral"),
)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.campaign) for name in OTHERS)]
)
def test_packed_step_is_compared_with_padded_step(benchmark, samples, name):
    actual, vocabulary = samples
    assert max(max(sample.ids) for sample in actual) < vocabulary
    (case,) = [
        case for case in benchmark.families(benchmark.QUICK, vocabulary) if case.name == name
    ]
    rows = benchmark.compare(case, actual, pairs=1)
    assert [row.metric for row in rows] == ["speedup", "CPU time ratio", "padding"]
    assert rows[0].ours > 0 and 0 < rows[2].baseline < 1


def test_different_losses_stop_family_benchmark(benchmark, samples, monkeypatch):
    actual, vocabulary = samples
    case = benchmark.families(benchmark.QUICK, vocabulary)[0]
    batches = benchmark.batches
    end = importlib.import_module("support.cases.family_cases").END

    def drop_last_label(*args):
        packed, padded = batches(*args)
        ended = padded["input_ids"] == end
        padded["labels"] = padded["labels"].masked_fill(ended, -100)
        return packed, padded

    monkeypatch.setattr(benchmark, "batches", drop_last_label)
    with pytest.raises(benchmark.LossMismatchError, match="llama"):
        benchmark.compare(case, actual, pairs=1)


def test_patch_embeddings_are_compared_in_both_dtypes(benchmark):
    rows = benchmark.patch_rows(patches=1, pairs=1)
    assert [row.metric for row in rows] == ["forward and backward", "speedup"] * 2
    assert [row.case.split()[-1] for row in rows] == ["fp32", "fp32", "bf16", "bf16"]
    assert all(row.ours > 0 and row.case.startswith(benchmark.PATCH_EMBEDDING) for row in rows)


@pytest.fixture
def process_group(monkeypatch):
    """Start a process group of this process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    start_process_group(ParallelConfig(), torch.device("cpu"))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_wrong_device_results_differ_from_rounding(
    benchmark, samples, process_group, monkeypatch, factor
):
    models = importlib.import_module("support.cases.family_models")
    device, original = torch.device("cpu", 0), models._gradients

    def scaled_gradients(model, batch, where, dtype):
        gradients = original(model, batch, where, dtype)
        return {name: g * factor if where is device else g for name, g in gradients.items()}

    monkeypatch.setattr(models, "_gradients", scaled_gradients)
    texts, vocabulary = samples
    llama = next(f for f in benchmark.families(benchmark.QUICK, vocabulary) if f.name == "llama")
    differences = dict(models.device_differences(llama, texts, device))
    assert set(differences) == {"float32", "bfloat16"}
    assert all(
        (difference.share <= difference.most) == (factor == 1.0)
        for difference in differences.values()
    )
