"""Device profiles: assumed values by device name, or a profile file from scripts/calibrate.py.

A profile file is JSON or TOML:

    base = "h100"                     # default values; required unless all keys are set
    [device]                          # fields of `Device` that differ from the base
    memory_bytes = 94e9
    [efficiency]                      # by operator class: a number, or [[size, value], ...]
    matmul = 0.7
    [call_us]                         # overhead of a call on the device, by operator class
    [host_us]                         # host time of a call by compiled code, by operator class
    attention = 120.0
    network = [[1e6, 0.4], [1e8, 0.94]]  # of the network bandwidth, by bytes per device and call
    [factors.llm]                     # measured over predicted time, by module and action type
    F = 1.04

Assumed efficiencies of GPUs:

- Large matmuls: 0.68 of the data sheet on Hopper (0.66 to 0.70 measured on an H200,
  benchmarks/results/gpu_check_h200.md), and 0.85 on Ampere.
- FlashAttention-2, which is the varlen attention of torch: up to 0.73 forward and 0.63 backward on
  A100 (arXiv 2307.08691), and 0.35 to 0.40 on H100 (arXiv 2407.08608).
- Element-wise operators: 0.9 of the memory bandwidth.
- Collectives: 0.65 of NVLink for 100 MB (A100 system file of github.com/calculon-ai/calculon), and
  0.82 for 1 GB (370 of 450 GB/s on H100). All-reduces inside NVLink switches achieve 480 GB/s
  (github.com/NVIDIA/nccl-tests/issues/212).
- Network cards: 46 to 48 of 50 GB/s (github.com/NVIDIA/nccl-tests/issues/290).

Efficiencies of small calls and overheads are guesses. Calibrate the device before you rely on
predicted times.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

from torchmm.common.files import replace_atomically
from torchmm.costs.devices import DEVICES, Device
from torchmm.costs.operators import (
    FALLBACK_KINDS,
    HOST_KINDS,
    KINDS,
    NETWORK_KINDS,
    DeviceProfile,
    EfficiencyCurve,
    OperatorKind,
)

FORMAT = "torchmm device profile 1"
"""Format name and version of profile files."""
_KEYS = (
    "format",
    "base",
    "device",
    "efficiency",
    "call_us",
    "launch_us",
    "host_us",
    "factors",
    "measured_on",
    "network",
)
_ACTION_TYPES = ("F", "B", "I", "W")
NVLINK_SHARP_DEVICES = ("h100", "h200", "h100_grand_teton")
"""Devices whose NVLink switches compute reductions (NVLink SHARP)."""
NETWORK_CURVE = EfficiencyCurve((1e4, 1e6, 1e8), (0.05, 0.4, 47 / 50))
"""Assumed fraction of the network bandwidth. Small sizes have the efficiencies of NVLink."""
CPU_HOST_US: dict[OperatorKind, float] = {
    "tensor_linear": 300.0,
    "sequence_exchange": 300.0,
    "shard_unit": 800.0,
}
"""Host time of Python on CPUs in us, measured with torch 2.13.

Assumed GPU profiles have no such time, because the systems of the papers do not use DTensor. The
speed of a host requires calibration."""


def load_profile(name: str | Path) -> DeviceProfile:
    """Load the profile of a known device, or a profile file.

    Args:
        name: Key of `DEVICES`, or path of a .json or .toml file.

    Raises:
        ValueError: The device or file does not exist, or the file is invalid. The error message
            lists all problems of the file.
    """
    if str(name) in DEVICES:
        return assumed_profile(DEVICES[str(name)])
    path = Path(name)
    if path.suffix not in (".json", ".toml") or not path.is_file():
        raise ValueError(
            f"unknown device or profile {str(name)!r}; use one of {', '.join(DEVICES)}, or a "
            ".json or .toml file that scripts/calibrate.py writes"
        )
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not readable as {path.suffix[1:].upper()}: {error}") from error
    return parse_profile(content, str(path))


def save_profile(path: Path, profile: DeviceProfile) -> None:
    """Write a profile as JSON. An existing file is replaced atomically."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "device": asdict(profile.device),
        "efficiency": {
            kind: [list(point) for point in zip(curve.sizes, curve.values, strict=True)]
            for kind, curve in profile.efficiency.items()
        },
        "call_us": dict(profile.call_us),
        "launch_us": profile.launch_us,
        "host_us": dict(profile.host_us),
        "factors": {name: dict(of_module) for name, of_module in profile.factors.items()},
        "measured_on": profile.measured_on,
    }
    if profile.network is not None:
        points = zip(profile.network.sizes, profile.network.values, strict=True)
        content["network"] = [list(point) for point in points]
    replace_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def assumed_profile(device: Device) -> DeviceProfile:
    """Return the assumed profile of a device without measurements, see the module docstring."""
    hopper = device.name.startswith("h")
    ceiling = {"matmul": 0.68, "attention": 0.37, "attention_backward": 0.32}
    if not hopper:
        ceiling = {"matmul": 0.85, "attention": 0.65, "attention_backward": 0.55}
    if not device.asynchronous:
        ceiling = {"matmul": 0.8, "attention": 0.4, "attention_backward": 0.35}
    # A matmul of 1 GFLOP has too few tiles for a GPU. A CPU core is busy with fewer FLOPs.
    small, large = (1e8, 3e10) if device.asynchronous else (1e5, 1e7)
    curves: dict[OperatorKind, EfficiencyCurve] = {}
    for kind in KINDS:
        if kind in ceiling:
            value = ceiling[kind]
            curves[kind] = EfficiencyCurve(
                (small, large / 10, large, large * 10),
                (
                    0.05 * value,
                    0.6 * value,
                    0.9 * value,
                    value,
                ),
            )
        elif kind in NETWORK_KINDS:
            in_switch = kind == "all_reduce" and device.name in NVLINK_SHARP_DEVICES
            reached = (0.85, 480 / 450) if in_switch else (0.65, 370 / 450)
            curves[kind] = EfficiencyCurve((1e4, 1e6, 1e8, 1e9), (0.05, 0.4, *reached))
        else:
            # Eager norms achieve 0.64 of 4.8 TB/s on an H200, see gpu_check_h200.md.
            limited = kind == "norm" and hopper
            top = min(0.9, 0.64 * 4800e9 / device.memory_bytes_per_s) if limited else 0.9
            curves[kind] = EfficiencyCurve((1e5, 1e7, 1e8), (0.3, min(top, 0.75), top))
    overhead = 2.0 if device.asynchronous else 3.0
    network = 15.0 if device.asynchronous else 100.0
    calls: dict[OperatorKind, float] = {
        k: network if k in NETWORK_KINDS else overhead for k in KINDS
    }
    calls |= {} if device.asynchronous else CPU_HOST_US
    launch_us = 5.0 if device.asynchronous else 0.0
    return DeviceProfile(device, curves, calls, launch_us, network=NETWORK_CURVE)


def parse_profile(content: Mapping[str, Any], where: str) -> DeviceProfile:
    """Parse the content of a profile file.

    Args:
        content: Content of the file.
        where: Path of the file, for error messages.

    Raises:
        ValueError: The content is invalid. The error message lists all problems.
    """
    problems = [
        f"unknown key {key!r}; use one of: {', '.join(_KEYS)}"
        for key in content
        if key not in _KEYS
    ]
    if content.get("format", FORMAT) != FORMAT:
        problems.append(
            f"format {content['format']!r} is not supported; this version reads {FORMAT!r}"
        )
    base = load_profile(content["base"]) if "base" in content else None
    device = _read_device(content.get("device", {}), base.device if base else None, problems)
    curves: dict[OperatorKind, EfficiencyCurve] = dict(base.efficiency) if base else {}
    _read_curves(content.get("efficiency", {}), curves, problems)
    for kind, other in FALLBACK_KINDS.items():
        if kind not in curves and other in curves:
            curves[kind] = curves[other]
    if lacking := [kind for kind in KINDS if kind not in curves]:
        problems.append(f"no efficiency of {', '.join(lacking)}; set them or a base")
    calls: dict[OperatorKind, float] = dict(base.call_us) if base else {}
    host_us: dict[OperatorKind, float] = dict(base.host_us) if base else {}
    for section, known, values in (
        ("call_us", (*KINDS, *HOST_KINDS), calls),
        ("host_us", KINDS, host_us),
    ):
        for key, value in content.get(section, {}).items():
            if key not in known or not _is_number(value) or value < 0:
                problems.append(
                    f"{section}.{key} = {value!r}: must be a number >= 0 for an operator class"
                )
            else:
                values[key] = float(value)
    network = _read_network_curve(content, base, problems)
    factors = _read_factors(content.get("factors", {}), problems)
    launch_us = content.get("launch_us", base.launch_us if base else 0.0)
    if not _is_number(launch_us) or launch_us < 0:
        problems.append(f"launch_us = {launch_us!r}: must be a number >= 0")
    if problems or device is None:
        raise ValueError("\n".join(f"{where}: {problem}" for problem in problems))
    return DeviceProfile(
        device,
        curves,
        calls,
        float(launch_us),
        {**(base.factors if base else {}), **factors},
        str(content.get("measured_on", base.measured_on if base else "")),
        host_us,
        network,
    )


def _read_device(
    section: Mapping[str, Any], base: Device | None, problems: list[str]
) -> Device | None:
    known = {f.name for f in fields(Device)}
    problems += (
        f"device.{key}: unknown field; use one of: {', '.join(sorted(known))}"
        for key in section
        if key not in known
    )
    for key in (
        "memory_bytes_per_s",
        "memory_bytes",
        "node_bytes_per_s",
        "network_bytes_per_s",
        "devices_per_node",
    ):
        if key in section and not (_is_number(section[key]) and section[key] > 0):
            problems.append(f"device.{key} = {section[key]!r}: must be a number > 0")
    peaks = section.get("peak_flops", {})
    if not isinstance(peaks, Mapping) or not all(_is_number(v) and v > 0 for v in peaks.values()):
        problems.append(f"device.peak_flops = {peaks!r}: must map dtypes to FLOP/s > 0")
    for key in ("host_bytes_per_s", "host_memory_bytes"):
        if key in section and not (_is_number(section[key]) and section[key] >= 0):
            problems.append(f"device.{key} = {section[key]!r}: must be a number >= 0")
    needed = {f.name for f in fields(Device) if f.default is MISSING}
    if base is None and (missing := needed - set(section)):
        problems.append(f"device has no {', '.join(sorted(missing))}; set them or a base")
    if problems:
        return None
    return replace(base, **section) if base else Device(**section)


def _read_curves(
    section: Mapping[str, Any],
    curves: dict[Any, EfficiencyCurve],
    problems: list[str],
    known: Sequence[str] = KINDS,
) -> None:
    for key, value in section.items():
        if key not in known:
            problems.append(
                f"efficiency.{key}: unknown operator class; use one of: {', '.join(known)}"
            )
            continue
        points = [[1.0, value]] if _is_number(value) else value
        try:
            sizes, values = zip(*((float(a), float(b)) for a, b in points), strict=True)
            curves[key] = EfficiencyCurve(sizes, values)
        except (TypeError, ValueError) as error:
            name = key if key == "network" else f"efficiency.{key}"
            problems.append(f"{name} = {value!r}: {error}")


def _read_network_curve(
    content: Mapping[str, Any], base: DeviceProfile | None, problems: list[str]
) -> EfficiencyCurve | None:
    """Return the network efficiency of a file, or of its base."""
    curves: dict[str, EfficiencyCurve] = {}
    if "network" in content:
        _read_curves({"network": content["network"]}, curves, problems, ("network",))
    return curves.get("network", base.network if base else None)


def _read_factors(section: Mapping[str, Any], problems: list[str]) -> dict[str, dict[str, float]]:
    factors: dict[str, dict[str, float]] = {}
    for module, of_module in section.items():
        for kind, value in (
            of_module.items() if isinstance(of_module, Mapping) else [("", of_module)]
        ):
            if kind not in _ACTION_TYPES or not _is_number(value) or not value > 0:
                problems.append(
                    f"factors.{module}.{kind} = {value!r}: must map F, B, I or W to a number > 0"
                )
            else:
                factors.setdefault(module, {})[kind] = float(value)
    return factors


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
