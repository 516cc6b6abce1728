"""Tests of `scripts/calibrate.py`: measurement, learning from timelines, invalid arguments."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile, save_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.costs.operators import KINDS, NETWORK_KINDS
from torchmm.models.build import build_model
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.records import StepContent, write_records
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig

ROOT = Path(__file__).parents[4]
LLM = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "calibrate.py"
    spec = importlib.util.spec_from_file_location("calibrate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_calibrate_measures_this_device(script, tmp_path, capsys) -> None:
    out = tmp_path / "profile.json"
    assert script.main(["--out", str(out), "--device", "cpu", "--quick", "--seconds", "0.2"]) == 0
    profile, assumed = load_profile(out), load_profile("cpu")
    assert "torch" in profile.measured_on
    for kind in KINDS:
        same = profile.efficiency[kind] == assumed.efficiency[kind]
        assert same == (kind in NETWORK_KINDS), kind  # one rank has no network
    assert profile.device.peak_flops["float32"] != assumed.device.peak_flops["float32"]
    assert 0.1 < profile.call_us["matmul"] < 1e4
    assert "GFLOP/s" in capsys.readouterr().out


def recorded(directory: Path, content: bool) -> Path:
    """Write a timeline in which every action took twice as long as assumed."""
    model = build_model(ModelConfig(llm=LlmConfig(config=LLM)), FreezeConfig())
    modules = [m.describe() for m in model.modality_modules()]
    metas = (MicrobatchMeta((SampleMeta("s", 0, 20),), 24),)
    graph = StageGraph(StageLayout((StageSpec(0, "llm", 0, 2, (0,)),), ()), 1)
    costs = compute_plan_costs(graph, modules, metas, CostModel(load_profile("cpu"), "float32"))
    records = [ActionRecord(0, a, 0.0, 2 * ms) for a, ms in costs.compute_ms.items()]
    path = directory / "step-3.json"
    write_records(path, records, graph, StepContent(metas, (20,)) if content else None)
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    text = f"config = {json.dumps(LLM).replace(': ', ' = ')}"
    path.write_text(f'name = "tiny"\n[model.llm]\n{text}\n[training]\ndtype = "float32"\n')
    return path


def test_calibrate_learns_from_timelines(script, tmp_path, recipe, capsys) -> None:
    step, base, out = recorded(tmp_path, True), tmp_path / "base.json", tmp_path / "out.json"
    save_profile(base, load_profile("cpu"))
    arguments = ["--out", out, "--profile", base, "--config", recipe, "--fit-from-timeline", step]
    assert script.main([str(a) for a in arguments]) == 0
    assert load_profile(out).factors["llm"] == {
        "F": pytest.approx(2.0),
        "B": pytest.approx(2.0),
    }
    assert "llm: measured / predicted: F 2.000, B 2.000" in capsys.readouterr().out


def test_calibrate_reports_missing_inputs(script, tmp_path, recipe, capsys) -> None:
    base, out = tmp_path / "base.json", str(tmp_path / "out.json")
    save_profile(base, load_profile("cpu"))
    step = str(recorded(tmp_path, False))
    assert script.main(["--out", out, "--fit-from-timeline", step]) == 2
    assert "--fit-from-timeline requires --profile" in capsys.readouterr().err
    arguments = [
        "--out",
        out,
        "--profile",
        str(base),
        "--config",
        str(recipe),
        "--fit-from-timeline",
        step,
    ]
    assert script.main(arguments) == 2
    assert "does not describe its microbatches" in capsys.readouterr().err
    assert script.main([*arguments[:3], str(tmp_path / "gone.json"), *arguments[4:]]) == 2
    assert "unknown device or profile" in capsys.readouterr().err
    assert not Path(out).exists()
