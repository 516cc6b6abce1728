"""Supported combinations of features, and the page that lists them.

    python tests/fuzz/run.py --combinations    # writes docs/reference/supported_combinations.md

`PIPELINES` and `FEATURES` map the name of a feature to the keys of a recipe that enable it.
`problems` merges two features with a small random recipe and returns the errors of the checks that
`train.py` runs before it creates process groups. A cell of the page is "yes" if there are none.
`test_combinations.py` draws further recipes for every cell.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from functools import cache
from io import StringIO
from math import prod
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import tomli_w
import torch

from fuzz.data import make_tokenizer
from fuzz.draw import merged
from torchmm.common.errors import ConfigError
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training import model_build

Table = dict[str, Any]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "supported_combinations.md"
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def _pipeline(schedule: str, **more: object) -> Table:
    return {"parallel": {"pipeline": 2, "schedule": schedule, **more}}


PIPELINES: dict[str, Table] = {
    "no pipeline": {},
    "gpipe": _pipeline("gpipe"),
    "1f1b": _pipeline("1f1b"),
    "interleaved_1f1b": _pipeline("interleaved_1f1b", virtual_stages=2),
    "zero_bubble": _pipeline("zero_bubble"),
    "megatron": _pipeline("megatron"),
    "megatron_balanced": _pipeline("megatron_balanced"),
    "separated": _pipeline("separated"),
    "searched": _pipeline("searched"),
    "colocated (optimus)": _pipeline("optimus", placement="colocated"),
    "disaggregated": _pipeline("separated", placement="disaggregated"),
}
"""Schedules and placements. They exclude each other."""
_SEQUENCE: Table = {"tensor": 2, "sequence_parallel": True}
_LORA: Table = {"adapters": {"low": {"modules": ["llm"]}}}
FEATURES: dict[str, Table] = {
    "HSDP": {"parallel": {"replicate": 2}},
    "TP": {"parallel": {"tensor": 2}},
    "SP": {"parallel": _SEQUENCE},
    "async TP": {"parallel": {**_SEQUENCE, "async_tensor_parallel": True}},
    "CP": {"parallel": {"llm": {"context": 2}}},
    "EP": {"parallel": {"expert": 2}, "model": {"llm": {"config": EXPERTS}}},
    "reduce": {"parallel": {"gradient_reduction": "microbatch"}},
    "compile": {"compile": {"enabled": True}},
    "float8": {
        "float8": {"scaling": "rowwise", "emulate": True},
        "training": {"dtype": "bfloat16"},
    },
    "LoRA": _LORA,
    "QLoRA": {**_LORA, "quantization": {"quant_type": "nf4"}},
    "AC full": {"activation_checkpoint": {"mode": "full"}},
    "AC auto": {"activation_checkpoint": {"mode": "auto"}},
    "bf16": {"training": {"dtype": "bfloat16", "parameter_dtype": "bfloat16"}},
    "int8": {"optimizer": {"state_dtype": "int8"}},
    "offload": {"optimizer": {"offload": True}},
    "packing": {"data": {"packing": "balanced"}},
    "reorder": {"data": {"reorder": "both"}},
    "balance": {"data": {"balance": "images"}},
    "workers": {"data": {"producers": {"addresses": ["127.0.0.1:7411"]}}},
    "generator": {
        "model": {
            "generator": {
                "config": {
                    "_class_name": "PixArtTransformer2DModel",
                    "sample_size": 4,
                    "patch_size": 2,
                    "num_layers": 4,
                    "num_attention_heads": 4,
                    "attention_head_dim": 8,
                    "in_channels": 3,
                    "cross_attention_dim": 32,
                },
            }
        }
    },
}
Cells = dict[tuple[str, str], bool]
"""Whether two features are supported together, by row and column."""
_LLMS = ("llama", "qwen2", "qwen3", "mistral")
_ENCODERS = ("clip_vision_model", "siglip_vision_model")


def recipe_table(names: tuple[str, ...], rng: Random) -> Table:
    """Return a random recipe with these features; paths are added by `problems`."""
    sizes = Random(rng.choice((1, 2)))  # two models, which are built once each
    llm = {
        "model_type": sizes.choice(_LLMS),
        "vocab_size": 128,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": sizes.choice((8, 12)),
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    encoder = {
        "model_type": sizes.choice(_ENCODERS),
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": sizes.choice((8, 10)),
        "num_attention_heads": 8,
        "image_size": 32,
        "patch_size": 8,
    }
    table: Table = {
        "model": {
            "llm": {"config": llm},
            "encoders": {"vision": {"modality": "image", "connector": "mlp", "config": encoder}},
        },
        "parallel": {"shard": 2},
        "training": {
            "steps": 1,
            "device": "cpu",
            "global_batch_size": 16,
            "microbatch_size": rng.choice((1, 2)),
            "sequence_length": rng.choice((64, 128)),
        },
        "data": {"reorder": "none", "balance": "none"},
        "freeze": {"modules": []},
        "metrics": {"peak_tflops": 1.0},
    }
    for name in names:
        table = merged(table, PIPELINES.get(name) or FEATURES.get(name, {}))
    return table


def problems(names: tuple[str, ...], seed: int = 0) -> list[str]:
    """Return the errors of a random recipe with these features, without a process group."""
    table = recipe_table(names, Random(f"{seed} {names}"))
    parallel = table["parallel"]
    world = prod(parallel.get(key, 1) for key in ("pipeline", "replicate", "shard", "tensor"))
    world += parallel.get("placement") == "disaggregated"  # one rank for the encoder
    world += world > 1 and "generator" in table["model"] and "disaggregated" in names
    directory = _directory()
    entry: Table = {"path": str(directory / "empty.jsonl")}
    if "generator" in table["model"]:
        entry["target_image_column"] = "image"
    table = merged(
        table,
        {
            "name": "run",
            "output_dir": str(directory),
            "model": {"tokenizer": str(directory / "tokenizer")},
            "data": {"sources": [entry], "index_cache_dir": str(directory)},
        },
    )
    file = directory / "recipe.toml"
    file.write_text(tomli_w.dumps(table))
    try:
        recipe = load_recipe(file, [], world).recipe
        _check_model(recipe, world)
    except ConfigError as error:
        return error.problems
    return []


def _check_model(recipe: Recipe, world: int) -> None:
    """Check the model of a recipe, on the meta device.

    Raises:
        ConfigError: The model cannot be built, or not be divided among the ranks.
    """
    run = resolve_recipe(recipe, world)
    sections = recipe.model, recipe.adapters, recipe.freeze, recipe.training.parameter_dtype
    built = _MODELS.get(key := repr(sections))
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))
        for name, stub in _STUBS.items():  # the originals read samples and simulate
            stack.enter_context(mock.patch.object(model_build, name, stub))
        if built is None:
            built = _MODELS[key] = model_build.build_meta_model(run)
        model_build.choose_model_stages(run, *built, torch.device("cpu"))


_STUBS = {
    "read_first_step": lambda *_: [],
    "choose_segments": lambda run, *_: run.recipe.parallel,
}
_MODELS: dict[str, Any] = {}
"""Models on the meta device by the sections that define them."""


@cache
def _directory() -> Path:
    """Return a directory with a tokenizer and an empty source, which is removed at exit."""
    temporary = tempfile.TemporaryDirectory(prefix="combinations")
    _TEMPORARY.append(temporary)
    directory = Path(temporary.name)
    make_tokenizer(directory / "tokenizer")
    (directory / "empty.jsonl").write_text("")
    return directory


_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []


def pairs() -> Iterator[tuple[str, str]]:
    """Yield row and column of every cell: pipelines with features, and pairs of features."""
    names = list(FEATURES)
    for pipeline in PIPELINES:
        yield from ((pipeline, name) for name in names)
    for number, name in enumerate(names):
        yield from ((name, other) for other in names[:number])


HEAD = """\
# Supported combinations

<!-- Written by tests/fuzz/run.py --combinations; do not edit this file. -->

This page shows which features you can combine. torchmm rejects a recipe with a combination marked
"no" before it creates process groups. The error (`ConfigError`, exit code 2) names the key and the
fix. A test checks every cell with random recipes.

To check your recipe, run `python train.py --config recipes/mine.toml --dry-run --world-size 64`.

| column | setting |
|---|---|
| TP, SP | `parallel.tensor`, `parallel.sequence_parallel` |
| async TP | `parallel.async_tensor_parallel`; requires TP and SP |
| CP | `parallel.llm.context` |
| EP | `parallel.expert` |
| reduce | `parallel.gradient_reduction = "microbatch"` |
| compile | `compile.enabled = true` for all modules |
| float8 | `[float8]` for the LLM |
| LoRA | `[adapters]` for the LLM |
| QLoRA | `[adapters]` and `[quantization]` for the LLM |
| AC auto | `activation_checkpoint.mode = "auto"` |
| bf16 | `training.parameter_dtype = "bfloat16"` |
| balance | `data.balance = "images"` |
| workers | remote data workers (`data.producers`) |
| generator | `[model.generator]` |

"""
TAIL = """
These features support all rows and columns:

{everywhere}

Further conditions:

- `float8.scaling = "tensorwise"` does not support TP and CP. With a pipeline or another placement,
  float8 supports only the LLM.
- async TP does not support LLMs with experts.
- CP does not support colocated encoders with fewer tensor-parallel ranks than the LLM, and
  `parallel.auto_sizes`.
- `parallel.reshard_after_forward = "always"` requires no pipeline.
- TP must divide attention heads and experts. CP divides the heads of a tensor-parallel rank.
- [Models that are not registered](models.md#models-that-are-not-registered) do not support TP
  and CP.
- `megatron`, `megatron_balanced`, `searched` and CSV schedules require
  `parallel.placement = "interleaved"`.
- `data.sources[].streaming` does not support remote data workers.
- `parallel.tp_comm_fraction` requires colocated encoders and TP, without async TP.

## Generators

Only diffusion transformers are supported. U-Nets (`UNet2DConditionModel`, as in Stable Diffusion)
are rejected. Their skip connections cannot be divided into pipeline stages, and the cost model has
no estimates for convolutions. `recipes/papers/bases/disttrain.toml` uses a DiT of similar size.

Next: [choose a placement](../guides/choose_placement.md) · [recipe keys](recipes.md)
"""
ALWAYS = {
    "HSDP": "FSDP2 and HSDP",
    "AC full": "full and selective activation checkpointing",
    "int8": "bfloat16 and int8 optimizer states",
    "offload": "optimizer offload",
    "packing": "balanced packing",
    "reorder": "`data.reorder`",
}
"""Features without a column, because every combination with them is supported."""


def page(cells: Cells) -> str:
    """Return the page with these cells. Features of `ALWAYS` have no row and column."""
    columns = [name for name in FEATURES if name not in ALWAYS]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in (*PIPELINES, *columns):
        shown = [
            "" if (row, name) not in cells else "yes" if cells[row, name] else "**no**"
            for name in columns
        ]
        if any(shown):
            lines.append(f"| {row} | {' | '.join(shown)} |")
    everywhere = "\n".join(f"- {text}" for text in ALWAYS.values())
    return HEAD + "\n".join(lines) + "\n" + TAIL.format(everywhere=everywhere)


def read_cells(text: str) -> Cells:
    """Return the cells of the page."""
    lines = [line.strip("|\n ").split("|") for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip(" *") for cell in line] for line in lines]
    heads = next(row for row in rows if row[:2] == ["TP", "SP"])
    cells = {
        (row[0], name): cell == "yes"
        for row in rows[rows.index(heads) + 2 :]
        for name, cell in zip(heads, row[1:], strict=False)
        if cell
    }
    always_supported = [pair for pair in pairs() if not ALWAYS.keys().isdisjoint(pair)]
    return cells | dict.fromkeys(always_supported, True)


def write_page() -> None:
    """Check all combinations and write the page.

    Raises:
        ValueError: A feature of `ALWAYS` has an unsupported combination.
    """
    cells = {pair: not problems(pair) for pair in pairs()}
    unsupported = [
        pair for pair, yes in cells.items() if not yes and not ALWAYS.keys().isdisjoint(pair)
    ]
    if unsupported:
        raise ValueError(f"features without a column have unsupported combinations: {unsupported}")
    PAGE.write_text(page(cells))
