"""Tests of profiles: devices, JSON and TOML files, and messages about invalid files."""

import json
from pathlib import Path

import pytest

from torchmm.balance.costs.profiles import load_profile, parse_profile, save_profile
from torchmm.costs.devices import DEVICES
from torchmm.costs.operators import KINDS


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_an_assumed_profile(name: str) -> None:
    profile = load_profile(name)
    assert profile.device is DEVICES[name]
    assert set(profile.efficiency) == set(KINDS)
    assert not profile.measured_on


def test_saved_profile_loads_unchanged(tmp_path) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, load_profile("a100"))
    assert load_profile(path) == load_profile("a100")


def test_toml_profile_overrides_base(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "h100"\nlaunch_us = 3\n[device]\nname = "h100 pcie"\nmemory_bytes = 94e9\n'
        "[efficiency]\nmatmul = 0.6\nnorm = [[1e6, 0.2], [1e8, 0.7]]\n"
        "[call_us]\nnorm = 4.0\n[factors.llm]\nF = 1.1\n"
    )
    profile, base = load_profile(path), load_profile("h100")
    assert profile.device.memory_bytes == 94e9
    assert profile.device.peak_flops == base.device.peak_flops
    assert profile.efficiency["matmul"].at(1e9) == 0.6
    assert profile.efficiency["norm"].values == (0.2, 0.7)
    assert profile.efficiency["copy"] == base.efficiency["copy"]
    assert (profile.launch_us, profile.call_us["norm"]) == (3, 4.0)
    assert (profile.factor("llm", "F"), profile.factor("llm", "B")) == (1.1, 1.0)


def test_all_profile_mistakes_are_listed(tmp_path) -> None:
    path = tmp_path / "bad.json"
    content = {
        "base": "h100",
        "colour": 1,
        "device": {"memory_bytes": -1, "memory": 3, "peak_flops": {"bfloat16": 0}},
        "efficiency": {"matmul": 0, "mat": 1, "norm": [[2, 1], [1, 1]]},
        "call_us": {"norm": -2},
        "factors": {"llm": {"F": 0, "Q": 1}},
        "launch_us": "fast",
    }
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="colour") as caught:
        load_profile(path)
    for part in (
        "memory_bytes = -1", "device.memory:", "peak_flops", "efficiency.matmul",
        "efficiency.mat:", "efficiency.norm", "call_us.norm", "factors.llm.F", "factors.llm.Q",
        "launch_us",
    ):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("h1000", None, "unknown device or profile 'h1000'; use one of h100"),
        ("gone.json", None, "unknown device or profile"),
        ("broken.json", "{", "not readable as JSON"),
        ("broken.toml", "= 3", "not readable as TOML"),
        ("old.json", '{"format": "torchmm device profile 0", "base": "cpu"}', "this version reads"),
        ("empty.json", "{}", "device has no"),
    ],
)
def test_invalid_profiles_are_rejected(tmp_path, name, content, message) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_profile(path if "." in name else name)


def test_profile_host_times_are_optional() -> None:
    assumed = load_profile("h100")
    assert assumed.host_us == {}
    changed = parse_profile({"base": "h100", "host_us": {"attention": 120.0}}, "here")
    assert changed.launch_time_us("attention", compiled=True) == 120.0
    assert changed.launch_time_us("attention") == changed.launch_us == assumed.launch_us
    with pytest.raises(ValueError, match=r"host_us\.shard_unit"):
        parse_profile({"base": "h100", "host_us": {"shard_unit": 1.0}}, "here")
    measured = load_profile(Path(__file__).parents[4] / "benchmarks/results/profile_h200.json")
    assert measured.launch_time_us("copy", compiled=True) == measured.launch_us > 30
