"""Tests of `scripts/gpu_check.py`: environment, time limits and the choice of model families."""

import json
import os
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from tiny_recipe import ROOT

_SPEC = spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
assert _SPEC is not None and _SPEC.loader is not None
gpu_check = module_from_spec(_SPEC)
LINE = {"found": "", "expected": "", "check": "families"}


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpu_check", gpu_check)
    _SPEC.loader.exec_module(gpu_check)


def machine(folder: Path, seconds: float):
    return gpu_check.CheckMachine(gpus=1, ends_at=time.monotonic() + seconds, folder=folder)


def test_programs_inherit_python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = tmp_path / "shown.py"
    script.write_text("import os; print(os.environ['PYTHONPATH'])")
    paths = machine(tmp_path, 60).run(str(script), []).strip().split(os.pathsep)
    assert paths == [str(ROOT), str(ROOT / "benchmarks"), str(tmp_path)]


def test_lines_arrive_before_time_limit(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time; print('first', flush=True); time.sleep(60)")
    timed_lines = []
    with pytest.raises(gpu_check.OutOfTimeError):
        timed_lines.extend(
            (line, time.monotonic()) for line in machine(tmp_path, 5).lines(script, [])
        )
    assert [line for line, _ in timed_lines] == ["first\n"]
    assert time.monotonic() - timed_lines[0][1] < 45


def test_failing_program_shows_last_lines(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no such thing')")
    with pytest.raises(gpu_check.FailedError, match="no such thing"):
        machine(tmp_path, 60).run(str(script), [])


@pytest.mark.parametrize("same_code", [True, False])
def test_unchanged_families_depend_on_code_and_verdict(tmp_path: Path, same_code: bool) -> None:
    file = tmp_path / "earlier.jsonl"
    digest = gpu_check.family_digest() if same_code else "other"
    records = [
        {"machine": "", "families": digest},
        *({**LINE, "case": f"llama, {d}", "verdict": "ok"} for d in ("float32", "bfloat16")),
        {**LINE, "case": "gemma2, float32", "verdict": "ok"},
        {**LINE, "case": "gemma2, bfloat16", "verdict": "WRONG"},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert gpu_check.unchanged_families(file) == ({"llama"} if same_code else set())
    assert gpu_check.unchanged_families(None) == set()
