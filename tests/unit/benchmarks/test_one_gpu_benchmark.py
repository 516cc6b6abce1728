"""`benchmarks/one_gpu.py`: rows, limits and switches, and all parts with tiny sizes."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.one_gpu import cases, ceilings, ours
from support.one_gpu.rows import LimitError, Recorder, Row
from support.one_gpu.steps import Kernel, merged_ns
from support.one_gpu.trace import class_of, find_gaps

import torchmm.parallel.apply
from torchmm.models.layers import attention
from torchmm.recipe.read import check_recipe

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "one_gpu.py"
CPU = torch.device("cpu")
CASES = [cases.SMALL_VLM, cases.FLOAT8, cases.VL_KEPT, *cases.large_cases(CPU)]
MS = 1_000_000


@pytest.fixture
def recorder(tmp_path) -> Iterator[Recorder]:
    row_recorder = Recorder(tmp_path, "NVIDIA H100", 100.0)
    yield row_recorder
    row_recorder.close()


@pytest.mark.parametrize(
    ("value", "lower", "verdict"),
    [(9, False, "below"), (10, False, "must"), (12, False, "aim"), (9, True, "must"),
     (11, True, "below"), (None, False, "")],
)  # fmt: skip
def test_row_verdict_follows_goal(value, lower, verdict):
    row = Row("part", "case", "side", "metric", value, must=10, aim=12 if not lower else 8,
              lower_is_better=lower)  # fmt: skip
    assert row.verdict == verdict


def test_recorder_writes_errors_as_rows(recorder, tmp_path):
    with recorder.attempt("part", "case", "side", 10):
        recorder.add("part", "case", "side", "step", 3.0, "ms")
        raise ValueError("broken")
    with recorder.attempt("part", "case", "large", 10):
        raise torch.OutOfMemoryError("too large")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["metric"] for row in rows] == ["step", "error", "out of memory"]
    assert recorder.errors == 1
    assert "broken" in (tmp_path / "errors.log").read_text()


def test_recorder_ends_inner_attempt_at_limit(recorder):
    begin = time.monotonic()
    with recorder.attempt("part", "case", "outer", 60):
        with recorder.attempt("part", "case", "inner", 0.05):
            time.sleep(30)
        recorder.add("part", "case", "outer", "step", 1.0)
    assert time.monotonic() - begin < 20
    assert [row.side for row in recorder.rows] == ["inner", "outer"]
    assert "limit" in recorder.rows[0].note


def test_recorder_limit_passes_broad_handlers(recorder):
    """Check this because torch.compile wraps every `Exception` of called code."""
    assert not issubclass(LimitError, Exception)
    with recorder.attempt("part", "case", "side", 0.05):
        try:
            time.sleep(30)
        except Exception as error:
            raise AssertionError from error
    assert recorder.errors == 0


def test_recorder_stops_after_many_errors(recorder, monkeypatch):
    monkeypatch.setattr("support.one_gpu.rows.MAX_ERRORS", 1)
    with recorder.attempt("part", "case", "side", 10):
        raise ValueError
    with (
        pytest.raises(RuntimeError, match="more than 1 errors"),
        recorder.attempt("part", "case", "side", 10),
    ):
        raise ValueError


def test_markdown_lists_goals_losses_and_sides(recorder):
    recorder.add("small", "case", "torchmm", "tokens/s", 15_000.0, "", 12_000, 14_000)
    recorder.add("trace", "case", "GPU", "loss idle GPU", 12.0, "ms", note="3 gaps")
    recorder.skip("large", "case", "torchmm", "no time left")
    text = recorder.write_markdown().read_text()
    assert recorder.write_markdown().name == "one_gpu_h100.md"
    assert "| case | torchmm | tokens/s | 15,000 | 12000 | 14000 | target met |" in text
    assert "1. idle GPU: 12 ms; 3 gaps" in text
    assert "[rows.jsonl](rows.jsonl)" in text and "no time left" not in text


def _attention_rows(case: str, **changes: float) -> list[Row]:
    """Return rows of a case in which cuDNN is twice as fast as flash."""
    values = {
        ("sdpa flash", "forward"): 300.0,
        ("sdpa flash", "backward"): 300.0,
        ("sdpa cuDNN", "forward"): 600.0,
        ("sdpa cuDNN", "backward"): 600.0,
        ("sdpa cuDNN", "first call with a new shape"): 60.0,
        ("sdpa cuDNN", "difference"): 3e-3,
    }
    values |= {("sdpa cuDNN", metric.replace("_", " ")): v for metric, v in changes.items()}
    return [Row("attention", case, *key, value) for key, value in values.items()]


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "cudnn"),
        ({"forward": 301.0, "backward": 301.0}, "flash"),
        ({"first_call_with_a_new_shape": 1e4}, "flash"),
        ({"difference": 0.5}, "flash"),
    ],
)
def test_image_kernel_follows_times(changes, kernel):
    first, *remaining = [name for name, heads in ceilings.HEADS.items() if heads.width == 72]
    rows = _attention_rows(first, **changes) + [r for o in remaining for r in _attention_rows(o)]
    assert ceilings.choose_image_kernels(rows) == {"72": kernel}
    without_cudnn = [row for row in rows if row.side == "sdpa flash"]
    assert ceilings.choose_image_kernels(without_cudnn) == {}


def test_image_kernels_are_read_as_saved(tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    path.write_text("{}")
    ceilings.save_image_kernels("NVIDIA H100", {"72": "flash"}, path)
    ceilings.save_image_kernels("NVIDIA H200", {"64": "flash", "72": "cudnn"}, path)
    monkeypatch.setattr(attention, "KERNELS_FILE", path)
    read = attention.image_kernels.__wrapped__
    assert read("NVIDIA H200") == {"64": "flash", "72": "cudnn"}
    assert read("NVIDIA H100") == {"72": "flash"} and read("other") == {}


def test_gaps_name_host_work():
    kernels = [Kernel("gemm", (0, MS)), Kernel("copy", (MS, 2 * MS)), Kernel("x", (3 * MS, 4 * MS))]
    host = [((0, 4 * MS), "step"), ((2 * MS, 3 * MS), "aten::item")]
    assert [(gap.span, gap.host) for gap in find_gaps(kernels, host)] == [
        ((2 * MS, 3 * MS), "aten::item in step")
    ]
    assert merged_ns(kernel.span for kernel in kernels) == 3 * MS


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("nvjet_hsh_128x256", "matmul"),
        ("flash_fwd_kernel", "attention"),
        ("triton_poi_fused_mul", "compiled"),
        ("at::native::vectorized_elementwise_kernel", "element-wise"),
        ("multi_tensor_apply_kernel<FusedAdam>", "update"),
    ],
)
def test_kernel_class_follows_name(kernel, name):
    assert class_of(kernel) == name


def test_switch_replaces_imported_functions(monkeypatch):
    def decide() -> bool:
        return True

    for module in (torchmm.parallel.fsdp, torchmm.parallel.apply):
        monkeypatch.setattr(module, "decide", decide, raising=False)
    switch = ours.Switch("torchmm.parallel.fsdp", "decide", False)
    monkeypatch.setattr(ours, "SWITCHES", {"off": switch})
    with ours.switched_off("off"):
        assert not torchmm.parallel.fsdp.decide()
        assert not torchmm.parallel.apply.decide()
    assert torchmm.parallel.apply.decide()


def test_missing_switch_is_reported(monkeypatch):
    monkeypatch.setattr(ours, "SWITCHES", {"off": ours.Switch("torchmm.parallel.fsdp", "absent")})
    with pytest.raises(ours.MissingSwitchError, match="absent"), ours.switched_off("off"):
        pass


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_recipes_are_valid(case, tmp_path):
    for variant in (case, case.small()):
        problems = check_recipe(variant.recipe(tmp_path, CPU, {}), 1)
        synthetic = ("data.sources", "model.tokenizer")  # batches are synthetic
        assert not [p for p in problems if not p.startswith(synthetic)]


def test_targets_are_next_text_tokens(tmp_path):
    case = cases.SMALL_VLM.small()
    model = ours.recipe_model(case.recipe(tmp_path, CPU, {}))
    microbatch = case.batches(model, CPU)[0].microbatches[0]
    positions_L = microbatch.target_positions_L
    assert torch.equal(microbatch.targets_T[positions_L], microbatch.input_ids_T[positions_L + 1])
    image = cases.image_token_of(model)
    assert not (microbatch.targets_T == image).any()
    positions = microbatch.encoders["vision"].positions_K
    assert (microbatch.input_ids_T[positions] == image).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ("start", "ceilings", "attention", "stages"),
        pytest.param(("small", "trace", "large", "layers"), marks=pytest.mark.campaign),
        pytest.param(("switches",), marks=pytest.mark.campaign),
        pytest.param(("second",), marks=pytest.mark.campaign),
    ],
    ids=lambda parts: parts[-1],
)  # fmt: skip
def test_small_parts_run_without_errors(parts, tmp_path, train_server):
    options = ["--small", "--device", "cpu", "--out", tmp_path / "out", "--parts", *parts]
    codes, output = train_server.run(options, tmp_path, script=SCRIPT)
    assert codes == [0], output
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").open()]
    assert not [row for row in rows if row["metric"] in ("error", "out of memory")]
    assert not [row for row in rows if row["note"].startswith(("WRONG", "time limit"))]
    assert {row["part"] for row in rows if row["value"] is not None} >= set(parts)
    assert (tmp_path / "out" / "one_gpu_cpu.md").exists()
