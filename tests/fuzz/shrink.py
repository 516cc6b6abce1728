"""Shrink a failing recipe to a recipe with only the parts that are needed for the failure.

Greedy: the first simpler variant that fails in the same way replaces the draw, until none does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fuzz.draw import Draw, Layout
from fuzz.judge import Verdict
from fuzz.models import LLM_FAMILIES, source_of
from fuzz.wording import generalized

Table = dict[str, Any]


def same_failure(first: Verdict, second: Verdict) -> bool:
    """Return True if two verdicts have the same kind of failure and the same message."""
    if (first.kind, first.how) != (second.kind, second.how):
        return False
    return _last_line(first) == _last_line(second)


def _last_line(verdict: Verdict) -> str:
    """Return the last line of the error. Differences are not compared in detail."""
    if verdict.how.startswith("different"):
        return ""
    text = verdict.problems[-1] if verdict.problems else ""
    return generalized(text.strip().rpartition("\n")[2])[:120]


def shrink(
    draw: Draw,
    verdict: Verdict,
    judge: Callable[[Draw], Verdict],
    tries: int = 150,
) -> tuple[Draw, Verdict]:
    """Return the simplest failing variant and its verdict.

    Args:
        verdict: Verdict of the draw, a failure.
        tries: Maximum number of variants.
    """
    remaining = tries
    smaller = True
    while smaller and remaining > 0:
        smaller = False
        for variant in variants(draw):
            if remaining == 0:
                break
            remaining -= 1
            variant_verdict = judge(variant)
            if same_failure(verdict, variant_verdict):
                draw, verdict, smaller = variant, variant_verdict, True
                break
    return draw, verdict


def variants(draw: Draw) -> Iterator[Draw]:
    """Yield simpler draws, with the largest omissions first."""
    if draw.then:
        yield replace(draw, then=())
        for layout in draw.then if len(draw.then) > 1 else ():
            yield replace(draw, then=(layout,))
        if len(draw.then) == 1:
            micro = {"training": {"microbatch_size": 1}}
            if draw.first != (plain := Layout(1, micro)):
                yield replace(draw, first=plain)
    for name in (*draw.sections["model"].get("encoders", {}), "generator"):
        yield from _without_module(draw, name)
    for sections in _models(draw):
        yield replace(draw, sections=sections)
    yield from _smaller_worlds(draw)
    for layout in _without_one(draw.first.sections):
        yield replace(draw, first=Layout(draw.first.world, layout))
    for number, then in enumerate(draw.then):
        for sections in _without_one(then.sections):
            changed = list(draw.then)
            changed[number] = Layout(then.world, sections)
            yield replace(draw, then=tuple(changed))


def _smaller_worlds(draw: Draw) -> Iterator[Draw]:
    for world in (1, 2, 4):
        if world >= draw.first.world:
            return
        yield replace(draw, first=Layout(world, draw.first.sections))
        for key in ("pipeline", "replicate", "shard", "tensor"):
            sections = copy.deepcopy(draw.first.sections)
            parallel = sections.get("parallel", {})
            if parallel.get(key, 1) > 1:
                parallel[key] = max(1, parallel[key] * world // draw.first.world)
                yield replace(draw, first=Layout(world, sections))


def _without_one(table: Table) -> Iterator[Table]:
    """Yield the mapping without one of its keys, complete sub-mappings first."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield {k: v for k, v in table.items() if k != key}
    for key, value in table.items():
        if isinstance(value, dict):
            for inner in _without_one(value):
                yield {**table, key: inner}
        else:
            yield {k: v for k, v in table.items() if k != key}


def _without_module(draw: Draw, name: str) -> Iterator[Draw]:
    """Yield the draw without an encoder or the generator, and without its references."""
    sections = copy.deepcopy(draw.sections)
    model = sections["model"]
    owner = model if name == "generator" else model["encoders"]
    if owner.pop(name, None) is None:
        return
    if not model.get("encoders", True):
        del model["encoders"]
    frozen = sections["freeze"]["modules"]
    sections["freeze"]["modules"] = [n for n in frozen if n.split(".")[0] != name]
    for adapter in sections.get("adapters", {}).values():
        adapter["modules"] = [n for n in adapter["modules"] if n != name] or ["llm"]
    first, *then = (_layout_without(layout, name) for layout in (draw.first, *draw.then))
    yield replace(draw, sections=sections, source=source_of(model), first=first, then=tuple(then))


def _layout_without(layout: Layout, name: str) -> Layout:
    sections = copy.deepcopy(layout.sections)
    sections.get("parallel", {}).pop(name, None)
    sections.get("activation_checkpoint", {}).get("modules", {}).pop(name, None)
    return Layout(layout.world, sections)


def _models(draw: Draw) -> Iterator[Table]:
    """Yield sections with simpler modules, batches or frozen modules."""
    for path, value in _simpler_values(draw.sections):
        sections = copy.deepcopy(draw.sections)
        table = sections
        for key in path[:-1]:
            table = table[key]
        if value is None:
            del table[path[-1]]
        else:
            table[path[-1]] = value
        yield sections
    if "adapters" in draw.sections:
        yield {key: table for key, table in draw.sections.items() if key != "adapters"}
    for name in draw.sections["freeze"]["modules"]:
        sections = copy.deepcopy(draw.sections)
        sections["freeze"]["modules"].remove(name)
        yield sections


def _simpler_values(sections: Table) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield key paths and simpler values. None removes the key."""
    if "config" in sections["model"]:
        yield from _simpler_composite(sections["model"]["config"])
    else:
        yield from _simpler_llm(sections["model"]["llm"]["config"])
    for name, encoder in sections["model"].get("encoders", {}).items():
        key_path = ("model", "encoders", name)
        if "feature_layer" in encoder:
            yield (*key_path, "feature_layer"), None
        if encoder["connector"] != "mlp":
            yield (*key_path, "connector"), "mlp"
        layers = "encoder_layers" if "encoder_layers" in encoder["config"] else "num_hidden_layers"
        if encoder["config"][layers] > 2:
            yield (*key_path, "config", layers), 2
    training = sections["training"]
    for key, value in {"global_batch_size": 4, "sequence_length": 64, "seed": 0}.items():
        if training[key] != value:
            yield ("training", key), value
    dtypes = [key for key in ("parameter_dtype", "dtype") if key in training]
    for key in [*dtypes[:1], *({"epochs"} & training.keys())]:
        yield ("training", key), None
    if "optimizer" in sections:
        yield ("optimizer",), None


def _simpler_llm(config: Table) -> Iterator[tuple[tuple[str, ...], Any]]:
    key_path = ("model", "llm", "config")
    family_keys = LLM_FAMILIES[config["model_type"]]
    if config["model_type"] != "llama":
        yield (
            key_path,
            {k: v for k, v in config.items() if k not in family_keys} | {"model_type": "llama"},
        )
    simple = {"tie_word_embeddings": False, "vocab_size": 96, "num_key_value_heads": 4}
    for key, value in {**simple, "num_hidden_layers": 2}.items():
        if config.get(key) != value:
            yield (*key_path, key), value


def _simpler_composite(config: Table) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield configs with fewer layers per component of a multimodal model."""
    key_path = ("model", "config")
    if config["tie_word_embeddings"]:
        yield (*key_path, "tie_word_embeddings"), False
    for part in ("text_config", "vision_config", "audio_config"):
        for key in ("num_hidden_layers", "depth", "encoder_layers"):
            if (section := config.get(part, {})).get(key, 2) > 2:
                fewer = {**section, key: 2}
                if "layer_types" in section:
                    fewer["layer_types"] = section["layer_types"][:2]
                yield (*key_path, part), fewer
