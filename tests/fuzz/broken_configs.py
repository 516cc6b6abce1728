"""Wrong values in `[model]`, each of which must give a model or an error that names the key.

Draw `index` of a seed is a pure function of both numbers. Models are built on the meta device, so
that a draw takes milliseconds.
"""

from __future__ import annotations

import copy
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from generator_cases import PIXART, VAE
from model_cases import AUDIO, COMPOSITES, ENCODERS, LLMS
from pydantic import ValidationError
from transformers import CONFIG_MAPPING

from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.data.media.preprocessors import open_media
from torchmm.models.build import build_model
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

Table = dict[str, Any]
KeyPath = tuple[str | int, ...]

LIMIT_S = 20
LIMIT_BYTES = 4 * 2**30
INTEGERS = (0, -1, -64, 3, 7, 10**6, 10**12, 2**63, 1.5, "8", "nope", None, [4], {}, True)
FLOATS = (0.0, -1.0, 1.0, 2.5, float("nan"), float("inf"), 1e300, "0.1", "nope", None, [0.1], {})
STRINGS = ("nope", "", 7, None, [], {}, "gelu", "a" * 5000, True)
PROCESSOR = {
    "size": {"height": 16, "width": 16},
    "crop_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_resize": True,
    "do_convert_rgb": True,
    "rescale_factor": 0.1,
    "resample": 3,
    "patch_size": 8,
    "merge_size": 2,
    "min_pixels": 64,
    "max_pixels": 4096,
    "feature_size": 8,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 1,
}
BOOLS = ("nope", "false", 2, 0, None, [], {})
LISTS = ([], ["nope"], [None], [[]], [-1], [0, 0, 0], [10**12], "nope", {}, 3, None)
TABLES = ([], "nope", {}, None, 3, {"nope": 1}, {"rope_type": "nope"}, {"model_type": "nope"})


@dataclass(frozen=True)
class BrokenModel:
    """A section [model] with wrong values."""

    name: str
    model: Table
    changes: tuple[tuple[KeyPath, Any], ...]


def draw_broken_model(seed: int, index: int) -> BrokenModel:
    """Return draw `index` of a seed."""
    rng = Random(f"{seed}-{index}")
    kind = rng.choices(("llm", "encoder", "composite", "generator"), (5, 4, 4, 1))[0]
    base: Table = {"llm": {"config": LLMS["llama"]}}
    if kind == "llm":
        name = rng.choice(sorted(LLMS))
        base = {"llm": {"config": LLMS[name]}}
        config_path: KeyPath = ("llm", "config")
    elif kind == "encoder":
        name = rng.choice(sorted(ENCODERS))
        modality = "audio" if name in AUDIO else "image"
        base["encoders"] = {"eye": {"config": ENCODERS[name], "modality": modality}}
        config_path = ("encoders", "eye", "config")
    elif kind == "composite":
        name = rng.choice(sorted(COMPOSITES))
        base = {"config": COMPOSITES[name]}
        if "audio_config" in COMPOSITES[name]:
            towers = [n for n in ("vision", "audio") if f"{n}_config" in COMPOSITES[name]]
            base["modalities"] = towers
        config_path = ("config",)
    else:
        name = "generator"
        base["generator"] = {"config": PIXART}
        config_path = ("generator", "config")
        if rng.random() < 0.5:
            base["generator"] = {
                "config": {**PIXART, "sample_size": 8, "patch_size": 2},
                "vae": {"config": VAE},
            }
            config_path = rng.choice((config_path, ("generator", "vae", "config")))
    base = copy.deepcopy(base)
    changes = []
    original = copy.deepcopy(base)
    for _ in range(rng.choice((1, 1, 1, 2))):
        path, value = _draw_change(rng, _at(original, config_path), kind)
        _put(_at(base, config_path), path, value)
        changes.append((config_path + path, value))
    return BrokenModel(f"{seed}-{index} {name}", base, tuple(changes))


def _draw_change(rng: Random, config: Table, kind: str) -> tuple[KeyPath, Any]:
    """Return the position and the new value of one change in `config`."""
    if rng.random() < 0.02 and kind != "generator":
        return ("rope_parameters", "rope_type"), rng.choice(("nope", 3, None, "yarn", "longrope"))
    explicit = list(_leaves(config))
    defaults: list[tuple[KeyPath, Any]] = []
    if kind != "generator":
        defaults = [
            item
            for item in _leaves(_defaults(config))
            if str(item[0][-1]) != "transformers_version"
        ]
    path, value = rng.choice(explicit if rng.random() < 0.5 or not defaults else defaults)
    return path, copy.deepcopy(rng.choice(wrong_values(rng, value)))


def wrong_values(rng: Random, value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return BOOLS
    if isinstance(value, int):
        return INTEGERS
    if isinstance(value, float):
        return FLOATS
    if isinstance(value, str):
        return STRINGS
    if isinstance(value, list):
        shorter = value[: len(value) // 2]
        return (*LISTS, shorter, value * 2, value[::-1])
    if isinstance(value, dict):
        return TABLES
    return rng.choice((INTEGERS, FLOATS, STRINGS, LISTS, TABLES))


def _defaults(config: Table) -> Table:
    defaults = CONFIG_MAPPING[config["model_type"]]().to_dict() if "model_type" in config else {}
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            defaults[key] = _defaults(value)
    return defaults


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield all values below the root, including nested mappings and lists."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))


def _at(table: Any, path: KeyPath) -> Any:
    for key in path:
        table = table[key]
    return table


def _put(table: Table, path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(table.get(key), dict):
            table[key] = {}
        table = table[key]
    table[path[-1]] = value


class TooSlowError(BaseException):
    """A draw that exceeded its time limit."""


@contextmanager
def limits() -> Iterator[None]:
    """Limit the time and the address space of a draw."""

    def stop(*_: object) -> None:
        raise TooSlowError

    previous_handler = signal.signal(signal.SIGALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def judge_model(draw: BrokenModel) -> str:
    """Return "built", "rejected" or "unnamed"; raise all other errors of the build."""
    try:
        with limits():
            model = build_model(ModelConfig.model_validate(draw.model), FreezeConfig())
            model.parameter_counts()
            for module in model.modality_modules():
                module.describe()
            for encoder in model.encoder_modules():
                open_media(encoder.image_spec(), 10**6)
    except (ConfigError, CheckpointError, ValidationError) as error:
        keys = {str(path[-1]) for path, _ in _leaves(draw.model)} - {"config", "llm", "eye"} | {
            "processor"
        }
        keys |= {repr(value) for path, value in draw.changes if path[-1] == "model_type"}
        keys |= {
            repr(v["model_type"])
            for _, v in draw.changes
            if isinstance(v, dict) and "model_type" in v
        }
        keys.add("patches, not divisible")  # valid sizes that do not match each other
        return "rejected" if any(key in str(error) for key in keys) else "unnamed"
    return "built"
