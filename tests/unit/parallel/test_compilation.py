"""Compiled layers: how many graphs there are, whatever lengths come, and what is told of them.

Traced only (backend "eager"): graphs are counted, and outputs and gradients equal those of what is
not compiled.
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
from torchmm.parallel import compilation, torch_private
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.compilation import (
    CACHE_VARIABLE,
    MOST_GRAPHS,
    Compilation,
    Graph,
    keep_compiled_code,
    tell_graphs,
)

LENGTHS = ([5, 9, 9], [4, 10, 9], [23], [3, 4, 2, 2, 7], [1, 20], [30, 2])
"""Of samples in microbatches: first only the longest changes, then only their number, then all."""
FEW_LLMS = ("llama", "gemma3_text", "smollm3", "qwen3_moe", "qwen3_5")
FEW_ENCODERS = ("clip", "siglip2", "qwen2_5_vl")
FEW_COMPOSITES = ("qwen3_vl",)


def chosen(names: list[str], few: tuple[str, ...]) -> list:
    """All, of which only a few are always tested."""
    return [pytest.param(n, marks=() if n in few else pytest.mark.campaign) for n in names]


def results(modules: Sequence[LayeredModule], run: Callable[[], Tensor]) -> list[Tensor]:
    """What `run` returns, and the gradients of its sum, all in a row."""
    for module in modules:
        module.zero_grad()
    output = run()
    output.sum().backward()
    parameters = [p for module in modules for p in module.parameters()]
    grads = [p.grad.flatten() for p in parameters if p.grad is not None]
    return [output.detach().flatten(), torch.cat(grads)]


def compile_layers(modules: Sequence[LayeredModule]) -> Compilation:
    torch.compiler.reset()  # what other tests have taught the compiler about sizes
    found = Compilation("eager")
    for module in modules:
        apply_activation_checkpoint(module, "none", found)
    return found


def check(modules: Sequence[LayeredModule], runs: list[Callable[[], Tensor]]) -> list[Graph]:
    """Compares every run with and without compiled layers; the graphs."""
    expected = [results(modules, run) for run in runs]
    found = compile_layers(modules)
    for run, values in zip(runs, expected, strict=True):
        for ours, wanted in zip(results(modules, run), values, strict=True):
            assert relative_error(ours, wanted) < 1e-6
    graphs = found.new_graphs()
    assert graphs and not found.new_graphs()
    return graphs


def runs_of(family: str) -> tuple[list[LayeredModule], list[Callable[[], Tensor]]]:
    model = text_model(family)
    return [model.llm], [lambda own=own: model(microbatch(own)) for own in LENGTHS]


def skip_if_not_compiled(module: LayeredModule) -> None:
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < COMPILES_FROM and any(map(has_experts, module.layers)):
        pytest.skip("experts do not compile with this version of transformers, which is said")


@proves("compiled", LLMS)
@pytest.mark.parametrize("family", chosen(list(LLMS), FEW_LLMS))
def test_llms_have_few_graphs_whatever_lengths_come(family: str) -> None:
    modules, runs = runs_of(family)
    skip_if_not_compiled(modules[0])
    assert max(graph.number for graph in check(modules, runs)) <= MOST_GRAPHS


@proves("compiled", COMPOSITES)
@pytest.mark.parametrize("name", chosen(list(COMPOSITES), FEW_COMPOSITES))
def test_composites_have_few_graphs_with_images_and_without(name: str) -> None:
    model = build(composite_config(name))
    skip_if_not_compiled(model.llm)
    batches = [example(name, model), microbatch([9, 4])]
    if model.text.mrope:
        batches[1].position_ids = batches[1].position_ids.expand(3, -1)
    modules = [*model.encoder_modules(), model.llm]
    graphs = check(modules, [lambda own=own: model(own) for own in batches])
    assert {graph.kind.split()[-1] for graph in graphs} == {module.name for module in modules}
    assert max(graph.number for graph in graphs) <= MOST_GRAPHS


@proves("compiled", ENCODERS)
@pytest.mark.parametrize("family", chosen(list(ENCODERS), FEW_ENCODERS))
def test_encoders_have_few_graphs_whatever_images_come(family: str) -> None:
    encoder = build(pair_config("llama", family)).encoders["eye"]
    inputs = make_inputs(family)
    count = len(inputs.grids_thw)
    parts = (range(count), range(1), range(1, count), range(count - 1, count))
    graphs = check([encoder], [lambda p=p: encoder(inputs.select(p)) for p in parts])
    assert max(graph.number for graph in graphs) <= MOST_GRAPHS


def test_layers_of_one_kind_share_their_graphs() -> None:
    graphs = check(*runs_of("gemma3_text"))
    kinds = {"layers like 0 of llm", "layers like 1 of llm"}  # with a window, and without
    assert {graph.kind for graph in graphs} == kinds and len(graphs) == len(kinds)


def test_compiling_says_which_of_how_many_kinds_it_is_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        time.sleep(0.2)
        return graph

    monkeypatch.setattr(log, "QUIET_S", 0.02)
    monkeypatch.setattr(log, "POLL_S", 0.01)
    monkeypatch.setattr(torch_private, "compiler_named", lambda backend: slow)
    with caplog.at_level(logging.INFO, "torchmm"):
        check(*runs_of("gemma3_text"))
    told = "compiling layers like {0} of llm: {1} of 2 types of layers, 0 s"
    assert all(told.format(number, number + 1) in caplog.text for number in range(2))


def test_without_a_word_about_sizes_there_are_more_which_is_told_with_the_guard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation, "mark_sizes", lambda value, **_: None)
    graphs = check(*runs_of("llama"))
    assert max(graph.number for graph in graphs) > MOST_GRAPHS
    caplog.clear()
    with caplog.at_level(logging.INFO):
        tell_graphs(graphs, 3, logging.getLogger())
    first, *warnings = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"step 3: {len(graphs)} graphs of layers compiled in ")
    assert len(warnings) == len(graphs) - MOST_GRAPHS
    assert warnings[0].startswith("layers like 0 of llm have 3 compiled graphs, but 2 are expected")
    assert "size mismatch at index" in warnings[0]


def test_nothing_is_told_of_steps_that_compile_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        caplog.clear()
        tell_graphs([], 3, logging.getLogger())
    assert not caplog.records


@pytest.mark.parametrize("before", [None, "torch's", "the user's"])
@pytest.mark.parametrize("home", ["HOME", "XDG_CACHE_HOME"])
def test_compiled_code_is_kept_in_private_directory(
    before: str | None, home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(home, str(tmp_path))
    if before is not None:
        usual = torch_private.usual_code_cache()
        monkeypatch.setenv(CACHE_VARIABLE, usual if before == "torch's" else "/elsewhere")
    keep_compiled_code()
    cache = tmp_path / (".cache" if home == "HOME" else "") / "torchmm/compile"
    kept = compilation.os.environ[CACHE_VARIABLE]
    assert kept == ("/elsewhere" if before == "the user's" else str(cache))
    if before != "the user's":
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_compiled_code_without_home_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_code()
    assert CACHE_VARIABLE not in compilation.os.environ
