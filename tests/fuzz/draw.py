"""Random recipes: draw `index` of a seed has a model, frozen modules, a batch, and two layouts.

    draw = draw_recipe(seed=7, index=12)

A draw is a pure function of both numbers. The run trains two steps in the first layout, saves, and
resumes in the second layout for one step. The judge adds paths.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from fuzz.composites import spare_tokens
from fuzz.layouts import Shape, draw_layout, perturbed
from fuzz.models import draw_model, find_experts, is_sharp, module_layers

Table = dict[str, Any]

STEPS = 2
"""Steps in the first layout. One step follows in the second layout."""
PERTURBED = 0.18
ADAPTED = 0.25
"""Fraction of recipes with adapters."""
AVERAGED = 0.25
"""Fraction of recipes with weight averages."""
REGULARIZED = 0.25
"""Fraction of recipes with label smoothing or z-loss."""
ENLARGED = 0.15
"""Fraction of recipes with new tokens."""
COUNTED = 0.15
"""Fraction of recipes that set `training.epochs`."""


@dataclass(frozen=True)
class Layout:
    """Sections of a recipe that determine a layout, and its number of ranks."""

    world: int
    sections: Table = field(default_factory=dict)


@dataclass(frozen=True)
class Draw:
    """A random recipe."""

    name: str
    """Seed and index, such as "7-12"."""
    source: str
    """Name in `data.SOURCES`."""
    sections: Table
    """Sections that are independent of the layout."""
    first: Layout
    then: tuple[Layout, ...] = ()
    """Layouts to resume in. The first supported layout is used."""

    def table(self, layout: Layout) -> Table:
        """Return the recipe of a layout."""
        return merged(self.sections, layout.sections)

    def as_table(self) -> Table:
        """Convert the draw to TOML values."""
        return asdict(self) | {"then": [asdict(layout) for layout in self.then]}

    @classmethod
    def from_table(cls, table: Table) -> Draw:
        """Create a draw from the result of `as_table`."""
        then = tuple(Layout(**layout) for layout in table["then"])
        return cls(**{**table, "first": Layout(**table["first"]), "then": then})


def merged(base: Table, over: Table) -> Table:
    """Merge two mappings recursively. Values of `over` have priority."""
    result = copy.deepcopy(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def draw_recipe(seed: int, index: int, worlds: tuple[int, ...] = (1, 2, 4)) -> Draw:
    """Return draw `index` of a seed."""
    rng = Random(f"{seed}-{index}")
    model, source = draw_model(rng)
    layers = module_layers(model)
    batch = rng.choice((4, 4, 8, 8, 6))
    sections: Table = {
        "model": model,
        "freeze": {"modules": _frozen(rng, layers)},
        "training": {
            "global_batch_size": batch,
            "sequence_length": rng.choice((64, 64, 96, 72)),
            "seed": rng.randrange(1000),
        },
    }
    if adapters := _adapters(Random(repr(sections)), layers):
        sections["adapters"] = adapters
        _quantization(Random(f"{seed}-{index}-quantization"), sections)
    sections["training"]["sequence_length"] += spare_tokens(model)
    if rng.random() < 0.08 and not is_sharp(model):
        sections["training"]["dtype"] = "bfloat16"
    if rng.random() < 0.04:
        sections["training"]["deterministic"] = True
    if rng.random() < 0.3:
        sections["optimizer"] = {"max_grad_norm": 0.05}
    _optimizer(Random(f"{seed}-{index}-optimizer"), sections, is_sharp(model))
    _float8(Random(f"{seed}-{index}-float8"), sections, layers)
    _compile(Random(f"{seed}-{index}-compile"), sections, layers)
    if (averages := Random(f"{seed}-{index}-averages")).random() < AVERAGED:
        sections["training"]["ema_decay"] = averages.choice((0.5, 0.9))
    _loss_terms(Random(f"{seed}-{index}-loss"), sections)
    _new_tokens(Random(f"{seed}-{index}-tokens"), model)
    if Random(f"{seed}-{index}-epochs").random() < COUNTED:
        sections["training"]["epochs"] = 1.0  # `fuzz.server` sets the passes of its steps
    weights = [{1: 1, 2: 5, 4: 7}.get(world, 2) for world in worlds]
    world = rng.choices(worlds, weights)[0]
    experts = find_experts(model)
    shape = Shape(layers, batch, world, experts)
    first = draw_layout(rng, shape)
    if rng.random() < PERTURBED:
        first = perturbed(rng, first, shape)
    then = []
    for _ in range(3):
        world_then = rng.choice((1, 1, 2, 2, 2, 4))
        sections_then = draw_layout(rng, Shape(layers, batch, world_then, experts))
        then.append(Layout(world_then, sections_then))
    if Random(f"{seed}-{index}-packing").random() < 0.3:
        sections["data"] = {"packing": "balanced"}
    return Draw(f"{seed}-{index}", source, sections, Layout(world, first), tuple(then))


def _quantization(rng: Random, sections: Table) -> None:
    """Quantize the weights of half of the LLMs with an adapter.

    Only inputs of `down_proj` are complete blocks. The reference has the decoded weights.
    """
    adapter = sections["adapters"]["low"]
    config = sections["model"].get("llm", {}).get("config") or {}
    is_dense = config.get("model_type") in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3")
    if rng.random() < 0.5 and is_dense and "llm" in adapter["modules"]:
        config["intermediate_size"] = rng.choice((64, 128, 256))
        sections["quantization"] = {"quant_type": "nf4"}
        if adapter.get("method") == "dora":
            adapter["method"] = "rslora"


def _loss_terms(rng: Random, sections: Table) -> None:
    """Draw label smoothing, z-loss, or both, with coefficients that change the gradients."""
    if rng.random() < REGULARIZED:
        names = rng.choice((("label_smoothing",), ("z_loss",), ("label_smoothing", "z_loss")))
        values = {"label_smoothing": rng.choice((0.1, 0.3)), "z_loss": 1e-2}
        sections["training"] |= {name: values[name] for name in names}


def _new_tokens(rng: Random, model: Table) -> None:
    """Draw new tokens. The data contain the word, which the tokenizer has, but no added token."""
    if rng.random() < ENLARGED:
        model["new_tokens"] = rng.sample(("<loc_0>", "<loc_1>", "<loc_2>", "w5"), 3)


def _optimizer(rng: Random, sections: Table, sharp: bool) -> None:
    """Draw the optimizer and its state dtypes.

    Most draws use float32, which shows the effects of layouts best.

    Args:
        rng: Separate generator, so that other values are independent of this function.
    """
    if rng.random() > 0.2 or sharp:
        return
    table = sections.setdefault("optimizer", {})
    if rng.random() < 0.6:
        table["state_dtype"] = rng.choice(("bfloat16", "int8"))
    if rng.random() < 0.4:
        table["offload"] = True
    if rng.random() < 0.3:
        sections["training"] |= {"dtype": "bfloat16", "parameter_dtype": "bfloat16"}
        if rng.random() < 0.3:
            table["stochastic_rounding"] = False
        if Random(repr(sections)).random() < 0.3:
            table["name"] = "muon"
    elif "dtype" not in sections["training"] and rng.random() < 0.5:
        table |= {"name": "muon", "momentum": rng.choice((0.95, 0.9))}


def _compile(rng: Random, sections: Table, layers: dict[str, int]) -> None:
    """Compile layers in one of ten recipes, without Inductor, whose code takes minutes."""
    if rng.random() > 0.1 or "tp_comm_fraction" in sections.get("parallel", {}):
        return
    sections["compile"] = {"enabled": True, "backend": rng.choice(("eager", "aot_eager"))}
    if rng.random() < 0.3:
        sections["compile"]["modules"] = [rng.choice([*layers])]
    if rng.random() < 0.5:  # has no effect on CPU
        sections["compile"]["cuda_graphs"] = True


def _float8(rng: Random, sections: Table, layers: dict[str, int]) -> None:
    """Draw float8 settings for a small fraction of the recipes.

    Tolerances are wide then: a rounding error in the middle between two float8 values selects one
    or the other. Tensorwise scales only occur in rejected combinations, because they depend on the
    microbatch, which differs in the reference.
    """
    if rng.random() > 0.1:
        return
    table: Table = {"scaling": rng.choice(("rowwise", "rowwise", "rowwise", "tensorwise"))}
    table |= {"first_layers": rng.choice((0, 0, 1)), "last_layers": 0}
    table["emulate"] = table["scaling"] == "rowwise" and rng.random() < 0.9
    if rng.random() < 0.3:
        table["modules"] = sorted(rng.sample([*layers], rng.randint(1, len(layers))))
    if rng.random() < 0.3:
        table["exclude"] = [rng.choice(("mlp.*", "self_attn.k_proj", "*down_proj"))]
    sections["float8"] = table
    if rng.random() < 0.7:  # float8 and adapters are not supported together
        sections.pop("adapters", None)
        float8_modules = table.get("modules", ["llm"])
        frozen = sections["freeze"]
        frozen["modules"] = [n for n in frozen["modules"] if n not in float8_modules]


def _adapters(rng: Random, layers: dict[str, int]) -> Table:
    """Draw adapters of one or more modules."""
    if rng.random() < 1 - ADAPTED:
        return {}
    modules = [name for name in layers if name != "generator"]
    adapter: Table = {"modules": sorted(rng.sample(modules, rng.randint(1, len(modules))))}
    adapter |= {"rank": rng.choice((1, 2, 3)), "alpha": rng.choice((1.0, 4.0))}
    if rng.random() < 0.5:
        adapter["method"] = rng.choice(("rslora", "dora"))
    if rng.random() < 0.2:
        adapter["targets"] = rng.choice((["q_proj", "v_proj"], ["k_proj"], ["o_proj", "fc2"]))
    return {"low": adapter}


def _frozen(rng: Random, layers: dict[str, int]) -> list[str]:
    if rng.random() < 0.5:
        return []
    parts = ["llm"]
    for name in layers:
        if name != "llm":
            parts += [name, f"{name}.connector"]
    count = rng.randint(1, max(1, len(parts) - 1))
    return sorted(rng.sample(parts, count)) if len(parts) > 1 or rng.random() < 0.05 else []
