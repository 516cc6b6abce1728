"""Tests of compiled layers: selection, recomputation, and static sizes."""

import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from model_cases import (
    ENCODERS,
    LLMS,
    ONE_SIZE_ENCODERS,
    build,
    make_inputs,
    microbatch,
    pair_config,
    relative_error,
    text_model,
)
from test_compilation import results
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchmm.common.batch import cuda_graph_image_count
from torchmm.models.families.encoders.family import EncoderFamily
from torchmm.models.layered import LayeredModule
from torchmm.parallel import activation, compilation, torch_compat
from torchmm.parallel.activation import apply_activation_checkpoint, set_recompute_modes
from torchmm.parallel.compilation import MAX_GRAPHS, Compilation, find_compiler_problem
from torchmm.planning.executions import recompute_mode
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig

AUTO = CompileConfig()
ALONE = ParallelConfig()
EAGER_LLMS = {
    "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "mixtral", "gpt_oss", "glm4_moe",
    "deepseek_v3", "deepseek_v3_dense_queries", "gemma4_moe",
}  # fmt: skip
"""LLMs with experts or delta nets."""
COMPILED_ENCODERS = {
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v",
    "glm4v_moe", "gemma4", "pixtral", "qwen3_omni_vision", "qwen2_5_omni_vision",
}  # fmt: skip
MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "packed_attention"}
TOKENS = 24


@pytest.mark.parametrize("family", LLMS)
def test_auto_compiles_llms_without_experts_and_delta_nets(family: str) -> None:
    module = text_model(family).llm.describe()
    assert AUTO.applies_to(module, "cuda", ALONE) == (family not in EAGER_LLMS)
    assert not AUTO.applies_to(module, "cpu", ALONE)


@pytest.mark.parametrize("family", ENCODERS)
def test_auto_compiles_packed_encoders_with_rotary_positions(family: str) -> None:
    module = build(pair_config("llama", family)).encoders["eye"].describe()
    assert AUTO.applies_to(module, "cuda", ALONE) == (family in COMPILED_ENCODERS)
    assert not AUTO.applies_to(module, "cpu", ALONE)


def test_auto_skips_layers_interrupted_by_parallelism() -> None:
    llm = text_model("llama").llm.describe()
    interrupted = [
        {"tp_comm_fraction": 0.5},
        {"pipeline": 2, "schedule": "zero_bubble"},
        {"expert": 2},
        {"llm": {"context": 2}},
    ]
    for settings in interrupted:
        parallel = ParallelConfig.model_validate(settings)
        assert not AUTO.applies_to(llm, "cuda", parallel), settings
        assert CompileConfig(enabled=True).applies_to(llm, "cuda", parallel), settings
    assert AUTO.applies_to(llm, "cuda", ParallelConfig.model_validate({"pipeline": 2}))


def test_enabled_and_modules_override_auto() -> None:
    llm = text_model("llama").llm.describe()
    assert CompileConfig(enabled=True).applies_to(llm, "cpu", ALONE)
    assert not CompileConfig(enabled=False).applies_to(llm, "cuda", ALONE)
    assert not CompileConfig(modules=["eye"]).applies_to(llm, "cuda", ALONE)
    assert not CompileConfig(enabled=True, modules=["eye"]).applies_to(llm, "cuda", ALONE)


@pytest.mark.parametrize("family", ENCODERS)
def test_cuda_graphs_require_images_of_one_size(family: str) -> None:
    encoder = build(pair_config("llama", family)).encoders["eye"]
    config = CompileConfig(cuda_graphs=True)
    reason = config.reason_against_graphs(
        encoder.describe(), "cuda", 1, compiled=False, recompute="none"
    )
    assert bool(reason) == (family not in ONE_SIZE_ENCODERS)
    if not reason:  # only the captured inputs change
        assert (
            type(encoder.family).context is EncoderFamily.context and not encoder.deepstack_layers
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "device is cpu"),
        ({"ranks": 2}, "the step uses 2 ranks"),
        ({"compiled": True}, "layers are compiled"),
        ({"recompute": "full"}, 'layers are recomputed ("full")'),
    ],
)
def test_cuda_graphs_reason_names_the_setting(changes: dict, reason: str) -> None:
    vision = build(pair_config("llama", "siglip")).encoders["eye"].describe()
    fits = {"device": "cuda", "ranks": 1, "compiled": False, "recompute": "none"}
    config = CompileConfig(cuda_graphs=True)
    assert not config.reason_against_graphs(vision, **fits)
    assert config.reason_against_graphs(vision, **(fits | changes)) == reason
    assert AUTO.reason_against_graphs(vision, **fits) == "not enabled by compile.cuda_graphs"
    llm = text_model("llama").llm.describe()
    assert config.reason_against_graphs(llm, **fits) == "not enabled by compile.cuda_graphs"


def test_padded_image_counts_are_few_and_close() -> None:
    padded = [cuda_graph_image_count(count) for count in range(1, 97)]
    assert sorted(set(padded)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]
    assert all(count <= padded_count < 1.5 * count for count, padded_count in enumerate(padded, 1))


def test_selective_is_full_for_eager_layers_on_cuda() -> None:
    model = build(pair_config("llama", "siglip2"))
    modules = [model.llm.describe(), model.encoders["eye"].describe()]
    recipe = Recipe(activation_checkpoint=ActivationCheckpointConfig(mode="selective"))
    eager = recipe.model_copy(update={"compile": CompileConfig(enabled=False)})
    modes = {
        (setting.compile.enabled, device): [recompute_mode(setting, m, device) for m in modules]
        for setting in (recipe, eager)
        for device in ("cuda", "cpu")
    }
    assert modes == {
        ("auto", "cuda"): ["selective", "full"],
        ("auto", "cpu"): ["selective", "selective"],
        (False, "cuda"): ["full", "full"],
        (False, "cpu"): ["selective", "selective"],
    }


def test_missing_triton_is_reported_for_cuda(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "install the triton package" in find_compiler_problem(AUTO, "cuda")
    assert not find_compiler_problem(AUTO, "cpu")
    assert not find_compiler_problem(CompileConfig(backend="aot_eager"), "cuda")
    monkeypatch.setattr(compilation, "find_missing_compiler", lambda device: "")
    assert not find_compiler_problem(AUTO, "cuda")


def compile_llm(mode: str = "none", **settings: bool) -> tuple[Callable, Compilation]:
    """Return a function that runs an LLM on samples of some lengths, and the compilation."""
    torch.compiler.reset()
    model = text_model("llama")
    compilation = Compilation("eager", **settings)
    apply_activation_checkpoint(model.llm, mode, compilation)
    return lambda lengths: results([model.llm], lambda: model(microbatch(lengths))), compilation


def row_lengths(number: int) -> list[int]:
    """Return sample lengths that sum to `TOKENS` tokens, different for each number."""
    lengths = [1 + (number * 7 + i) % 5 for i in range(number % 6)]
    return [*lengths, TOKENS - sum(lengths)]


def test_constant_sequence_length_uses_one_static_graph(monkeypatch) -> None:
    """Count graphs over 50 microbatches with 50 divisions into samples."""
    shapes: list[torch.Size] = []

    def record(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        shapes.extend(x.shape for x in inputs if isinstance(x, Tensor) and x.ndim == 3)
        return graph

    monkeypatch.setattr(torch_compat, "find_compiler", lambda backend: record)
    plain = text_model("llama")
    run, compilation = compile_llm(has_constant_rows=True)
    for number in range(50):
        results_ = run(row_lengths(number))
        if number % 10 == 0:
            lengths = row_lengths(number)
            expected = results([plain.llm], lambda lengths=lengths: plain(microbatch(lengths)))
            for actual, reference in zip(results_, expected, strict=True):
                assert relative_error(actual, reference) < 1e-6
    graphs = compilation.new_graphs()
    assert max(graph.number for graph in graphs) <= MAX_GRAPHS
    hidden = [shape for shape in shapes if shape[-1] == plain.llm.text_config.hidden_size]
    assert hidden and all(isinstance(shape[1], int) for shape in hidden)
    run([TOKENS + 3])  # negative control: a different number of tokens requires a new graph
    assert compilation.new_graphs()


def count_products(monkeypatch, mode: str) -> tuple[Counter, Counter]:
    """Return the operator counts of the backward graphs, and of the forward graphs."""
    backward: Counter = Counter()
    forward: Counter = Counter()

    def counting(counter: Counter) -> Callable:
        def compile_graph(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable:
            calls = [n.target for n in graph.graph.nodes if n.op == "call_function"]
            counter.update(str(getattr(c, "_overloadpacket", c)).rpartition(".")[2] for c in calls)
            return graph.forward

        return compile_graph

    backend = aot_autograd(
        fw_compiler=counting(forward),
        bw_compiler=counting(backward),
        partition_fn=min_cut_rematerialization_partition,
    )
    monkeypatch.setattr(torch_compat, "find_compiler", lambda name: backend)
    run, compilation = compile_llm(mode)
    run([5, 9, 9])
    assert len({graph.kind for graph in compilation.new_graphs()}) == 1
    return backward, forward


def test_compiled_selective_recomputation_repeats_no_matmul(monkeypatch) -> None:
    """Count the matmuls and attention operators of compiled backward graphs."""
    products = {}
    cheap = {}
    for mode in ("none", "selective", "full"):
        backward, forward = count_products(monkeypatch, mode)
        products[mode] = sum(backward[name] for name in MATRIX_PRODUCTS)
        cheap[mode] = backward["rsqrt"]
        assert forward["mm"] > 0 and forward["packed_attention"] > 0, forward
    assert products["selective"] == products["none"] < products["full"]
    assert cheap["selective"] > 0


def test_auto_mode_selective_is_full_on_cuda(monkeypatch) -> None:
    """Count calls of the function that dispatches every operator in Python."""
    calls: list[object] = []

    def contexts(policy: object) -> object:
        calls.append(policy)
        return create_selective_checkpoint_contexts(policy)

    monkeypatch.setattr(activation, "create_selective_checkpoint_contexts", contexts)
    counts = {}
    for is_eager_on_cuda in (False, True):
        model = text_model("llama")
        module = model.llm
        apply_activation_checkpoint(module, "auto", is_eager_on_cuda=is_eager_on_cuda)
        set_recompute_modes(module, ["selective"] * len(module.layers))
        calls.clear()
        model(microbatch([5, 9, 9])).backward()
        counts[is_eager_on_cuda] = len(calls)
    assert counts == {False: len(module.layers), True: 0}


def failing(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
    raise RuntimeError("no C compiler")


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_auto_runs_eagerly_if_compilation_fails(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_compat, "find_compiler", lambda backend: failing)
    plain = text_model("llama")
    run, _ = compile_llm(mode, falls_back=True)
    with caplog.at_level(logging.WARNING):
        for lengths in ([5, 9, 9], [3, 20]):
            expected = results([plain.llm], lambda lengths=lengths: plain(microbatch(lengths)))
            for actual, reference in zip(run(lengths), expected, strict=True):
                assert relative_error(actual, reference) < 1e-6
    warnings = [r.getMessage() for r in caplog.records if "without torch.compile" in r.getMessage()]
    assert len(warnings) == 1 and "no C compiler" in warnings[0]
    run, _ = compile_llm(mode)
    with pytest.raises(BackendCompilerFailed, match="no C compiler"):
        run([5, 9, 9])


@pytest.mark.parametrize("mode", ["selective", "full", "auto"])
@pytest.mark.parametrize("trains", [False, True])
def test_compiled_encoder_recomputes_only_with_backward(mode: str, trains: bool) -> None:
    torch.compiler.reset()
    plain, model = (build(pair_config("llama", "siglip")).encoders["eye"] for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for module in (plain, model):
        module.requires_grad_(trains)
    apply_activation_checkpoint(model, mode, Compilation("aot_eager"))
    if mode == "auto":
        set_recompute_modes(model, ["full"] * len(model.layers))
    inputs = make_inputs("siglip")
    if trains:
        for actual, reference in zip(
            *(results([m], lambda m=m: m(inputs)) for m in (model, plain)), strict=True
        ):
            assert relative_error(actual, reference) < 1e-6
    with torch.set_grad_enabled(not trains):
        assert relative_error(model(inputs), plain(inputs)) < 1e-6


def compiled_by_inductor(module: LayeredModule, mode: str, *, constant: bool) -> Compilation:
    torch.compiler.reset()
    compilation = Compilation("inductor", has_constant_rows=constant)
    apply_activation_checkpoint(module, mode, compilation)
    return compilation


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_inductor_llm_matches_eager_in_float32(mode: str) -> None:
    plain, model = text_model("qwen3"), text_model("qwen3")
    compilation = compiled_by_inductor(model.llm, mode, constant=True)
    for number in (3, 4, 0):
        batch = microbatch(row_lengths(number))
        expected = results([plain.llm], lambda batch=batch: plain(batch))
        results_ = results([model.llm], lambda batch=batch: model(batch))
        for actual, reference in zip(results_, expected, strict=True):
            assert relative_error(actual, reference) < 1e-5
    assert max(graph.number for graph in compilation.new_graphs()) <= MAX_GRAPHS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_inductor_qwen_encoder_matches_eager_in_float32(mode: str) -> None:
    plain, model = (build(pair_config("llama", "qwen3_vl")).encoders["eye"] for _ in range(2))
    model.load_state_dict(plain.state_dict())
    compilation = compiled_by_inductor(model, mode, constant=False)
    inputs = make_inputs("qwen3_vl")
    count = len(inputs.grids_thw)
    for images in (range(count), range(1, count)):
        selected = inputs.select(images)
        expected = results([plain], lambda selected=selected: plain(selected))
        results_ = results([model], lambda selected=selected: model(selected))
        for actual, reference in zip(results_, expected, strict=True):
            assert relative_error(actual, reference) < 1e-5
    assert max(graph.number for graph in compilation.new_graphs()) <= MAX_GRAPHS
