"""Tests of compiled layers: number of graphs for varying lengths, and log messages.

Layers are only traced (backend "eager"). Outputs and gradients must match uncompiled layers.
"""

import logging
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from model_cases import (
    COMPOSITES,
    ENCODERS,
    LLMS,
    build,
    composite_config,
    make_inputs,
    microbatch,
    pair_config,
    relative_error,
    text_model,
)
from proofs import proves
from test_stages import example
from torch import Tensor

from torchmm.common import log
from torchmm.models.layered import LayeredModule
from torchmm.models.layers.experts import COMPILES_FROM, has_experts
from torchmm.parallel import compilation, torch_compat
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import (
    CACHE_VARIABLE,
    MAX_GRAPHS,
    Compilation,
    CompiledGraph,
    log_compiled_graphs,
    set_compile_cache,
)

LENGTHS = ([5, 9, 9], [4, 10, 9], [23], [3, 4, 2, 2, 7], [1, 20], [30, 2])
"""Sample lengths per microbatch. The longest changes first, then the number, then both."""
FEW_LLMS = ("llama", "gemma3_text", "smollm3", "qwen3_moe", "qwen3_5")
FEW_ENCODERS = ("clip", "siglip2", "qwen2_5_vl")
FEW_COMPOSITES = ("qwen3_vl",)


def with_campaigns(names: list[str], few: tuple[str, ...]) -> list:
    """Return parameters for all names. Names that are not in `few` are campaigns."""
    return [pytest.param(n, marks=() if n in few else pytest.mark.campaign) for n in names]


def results(modules: Sequence[LayeredModule], run: Callable[[], Tensor]) -> list[Tensor]:
    """Return the flattened result of `run`, and the flattened gradients of its sum."""
    for module in modules:
        module.zero_grad()
    output = run()
    output.sum().backward()
    parameters = [p for module in modules for p in module.parameters()]
    grads = [p.grad.flatten() for p in parameters if p.grad is not None]
    return [output.detach().flatten(), torch.cat(grads)]


def compile_layers(modules: Sequence[LayeredModule]) -> Compilation:
    torch.compiler.reset()  # dynamic sizes that other tests have compiled
    compilation_ = Compilation("eager")
    for module in modules:
        apply_activation_checkpoint(module, "none", compilation_)
    return compilation_


def check(
    modules: Sequence[LayeredModule], runs: list[Callable[[], Tensor]]
) -> list[CompiledGraph]:
    """Compare every run with and without compiled layers. Return the graphs."""
    expected = [results(modules, run) for run in runs]
    compilation_ = compile_layers(modules)
    for run, values in zip(runs, expected, strict=True):
        for actual, expected_values in zip(results(modules, run), values, strict=True):
            assert relative_error(actual, expected_values) < 1e-6
    graphs = compilation_.new_graphs()
    assert graphs and not compilation_.new_graphs()
    return graphs


def runs_of(family: str) -> tuple[list[LayeredModule], list[Callable[[], Tensor]]]:
    model = text_model(family)
    return [model.llm], [lambda lengths=lengths: model(microbatch(lengths)) for lengths in LENGTHS]


def skip_if_not_compiled(module: LayeredModule) -> None:
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < COMPILES_FROM and any(map(has_experts, module.layers)):
        pytest.skip("experts do not compile with this version of transformers")


@proves("compiled", LLMS)
@pytest.mark.parametrize("family", with_campaigns(list(LLMS), FEW_LLMS))
def test_llms_have_few_graphs_for_all_lengths(family: str) -> None:
    modules, runs = runs_of(family)
    skip_if_not_compiled(modules[0])
    assert max(graph.number for graph in check(modules, runs)) <= MAX_GRAPHS


@proves("compiled", COMPOSITES)
@pytest.mark.parametrize("name", with_campaigns(list(COMPOSITES), FEW_COMPOSITES))
def test_composites_have_few_graphs_for_all_batches(name: str) -> None:
    model = build(composite_config(name))
    skip_if_not_compiled(model.llm)
    batches = [example(name, model), microbatch([9, 4])]
    if model.text.mrope:
        batches[1].position_ids = batches[1].position_ids.expand(3, -1)
    modules = [*model.encoder_modules(), model.llm]
    graphs = check(modules, [lambda batch=batch: model(batch) for batch in batches])
    assert {graph.kind.split()[-1] for graph in graphs} == {module.name for module in modules}
    assert max(graph.number for graph in graphs) <= MAX_GRAPHS


@proves("compiled", ENCODERS)
@pytest.mark.parametrize("family", with_campaigns(list(ENCODERS), FEW_ENCODERS))
def test_encoders_have_few_graphs_for_all_images(family: str) -> None:
    encoder = build(pair_config("llama", family)).encoders["eye"]
    inputs = make_inputs(family)
    count = len(inputs.grids_thw)
    parts = (range(count), range(1), range(1, count), range(count - 1, count))
    graphs = check([encoder], [lambda p=p: encoder(inputs.select(p)) for p in parts])
    assert max(graph.number for graph in graphs) <= MAX_GRAPHS


def test_layers_of_one_type_share_graphs() -> None:
    graphs = check(*runs_of("gemma3_text"))
    kinds = {"layers like 0 of llm", "layers like 1 of llm"}  # with and without a window
    assert {graph.kind for graph in graphs} == kinds and len(graphs) == len(kinds)


def test_compilation_logs_progress_by_layer_type(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        time.sleep(0.2)
        return graph

    monkeypatch.setattr(log, "QUIET_S", 0.02)
    monkeypatch.setattr(log, "POLL_S", 0.01)
    monkeypatch.setattr(torch_compat, "find_compiler", lambda backend: slow)
    with caplog.at_level(logging.INFO, "torchmm"):
        check(*runs_of("gemma3_text"))
    message = "compiling layers like {0} of llm: {1} of 2 types of layers, 0 s"
    assert all(message.format(number, number + 1) in caplog.text for number in range(2))


def test_unmarked_sizes_add_graphs_with_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation, "mark_dynamic_sizes", lambda value, **_: None)
    graphs = check(*runs_of("llama"))
    assert max(graph.number for graph in graphs) > MAX_GRAPHS
    caplog.clear()
    with caplog.at_level(logging.INFO):
        log_compiled_graphs(graphs, 3, logging.getLogger())
    first, *warnings = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"step 3: {len(graphs)} graphs of layers compiled in ")
    assert len(warnings) == len(graphs) - MAX_GRAPHS
    assert warnings[0].startswith("layers like 0 of llm have 3 compiled graphs, but 2 are expected")
    assert "size mismatch at index" in warnings[0]


def test_steps_without_compilation_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        caplog.clear()
        log_compiled_graphs([], 3, logging.getLogger())
    assert not caplog.records


@pytest.mark.parametrize("before", [None, "torch default", "user setting"])
@pytest.mark.parametrize("home", ["HOME", "XDG_CACHE_HOME"])
def test_compiled_code_is_cached_in_private_directory(
    before: str | None, home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(home, str(tmp_path))
    if before is not None:
        usual = torch_compat.default_code_cache()
        monkeypatch.setenv(CACHE_VARIABLE, usual if before == "torch default" else "/elsewhere")
    set_compile_cache()
    cache = tmp_path / (".cache" if home == "HOME" else "") / "torchmm/compile"
    variable = compilation.os.environ[CACHE_VARIABLE]
    assert variable == ("/elsewhere" if before == "user setting" else str(cache))
    if before != "user setting":
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_compiled_code_without_home_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    set_compile_cache()
    assert CACHE_VARIABLE not in compilation.os.environ
