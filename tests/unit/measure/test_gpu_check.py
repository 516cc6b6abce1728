"""What `scripts/gpu_check.py` starts finds what its user's own programs find."""

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


def test_programs_keep_the_users_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpu_check", gpu_check)
    _SPEC.loader.exec_module(gpu_check)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = tmp_path / "shown.py"
    script.write_text("import os; print(os.environ['PYTHONPATH'])")
    machine = gpu_check.Machine(gpus=1, ends_at=time.monotonic() + 60, folder=tmp_path)
    paths = machine.run(str(script), []).strip().split(os.pathsep)
    assert paths == [str(ROOT), str(ROOT / "benchmarks"), str(tmp_path)]
