"""Tests of encoder layers in pieces: outputs and gradients do not change."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from test_replicated_stages import graph

from torchmm.balance.optimus.encoder_overlap import EncoderOverlap
from torchmm.balance.optimus.yield_points import insert_yield_points
from torchmm.common.batch import EncoderInputs
from torchmm.models.build import build_model
from torchmm.models.encoders import EncoderModule
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.tensor.collectives import LayerHooks
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import EncoderLaunch
from torchmm.pipelining.schedules.classic import forward_only
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

CPU = torch.device("cpu")
LAYERS = 2
LLM = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "patch_size": 4}
TOWERS = {
    "clip": {**SIZES, "model_type": "clip_vision_model", "image_size": 8},
    "gated": {
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
        "model_type": "dinov2",
        "mlp_ratio": 2,
        "image_size": 8,
        "use_swiglu_ffn": True,
    },
    "packed": {
        "model_type": "qwen2_vl_vision",
        "embed_dim": 32,
        "hidden_size": 32,
        "mlp_ratio": 2,
        "num_heads": 4,
        "patch_size": 4,
    },
}
PIECES = 6
"""Pieces of a layer, in forward and in backward."""


def build(tower: str, recompute: str = "none") -> tuple[MultimodalModel, EncoderModule]:
    layers = "depth" if tower == "packed" else "num_hidden_layers"
    config = {
        "llm": {"config": LLM},
        "encoders": {"vision": {"config": {**TOWERS[tower], layers: LAYERS}}},
    }
    model = build_model(ModelConfig.model_validate(config), FreezeConfig())
    materialize(model, "cpu")
    init_weights(model, seed=3)
    encoder = model.encoders["vision"]
    assert len(encoder.layers) == LAYERS
    apply_activation_checkpoint(encoder, recompute)
    return model, encoder


def inputs_of(encoder: EncoderModule) -> EncoderInputs:
    inputs = encoder.dummy_inputs(CPU)
    torch.manual_seed(1)
    inputs.pixels.copy_(torch.randn(inputs.pixels.shape))
    return inputs


def run(encoder: EncoderModule, inputs: EncoderInputs) -> torch.Tensor:
    output = encoder(inputs)
    output.square().sum().backward()
    return output.detach()


def gradients(model: MultimodalModel) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def run_in_pieces(
    hooks: LayerHooks, work: Callable[[], object], llm: Callable[[], object], pieces: Sequence[int]
) -> None:
    """Run an encoder action in pieces during the collectives of an LLM action.

    The remaining pieces run at the position of the encoder action.

    Args:
        work: The encoder action.
        llm: The LLM action, which calls `hooks.between("llm")`.
        pieces: Number of pieces per collective.
    """
    step = graph(parts=(1,))
    encoder, backbone = Action(ActionType.F, 0, 0), Action(ActionType.F, 4, 0)
    plan = lower_plan(forward_only(step), step, {}, training=False)
    plan = replace(plan, launches={backbone: EncoderLaunch((encoder,), tuple(pieces))})
    ahead = EncoderOverlap(
        plan, {ActionType.F: lambda a: work() if a == encoder else llm()}, hooks, CPU
    )
    with ahead.activate() as handlers:
        handlers[ActionType.F](backbone)
        handlers[ActionType.F](encoder)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("tower", TOWERS)
def test_pieces_compute_the_same_as_layers(tower, recompute):
    reference, encoder = build(tower, recompute)
    inputs = inputs_of(encoder)
    expected = run(encoder, inputs)
    model, encoder = build(tower)
    hooks = LayerHooks()
    insert_yield_points(encoder, hooks.hook_for("encoder"), sends=False)
    apply_activation_checkpoint(encoder, recompute)
    outputs = []
    launched = 0

    def llm() -> None:
        nonlocal launched
        while not outputs:
            # Run a different backward pass in between, which must not run the backward of the
            # encoder.
            other = torch.ones(3, requires_grad=True)
            other.register_hook(lambda _: hooks.hook_for("llm")())
            (other * launched).sum().backward()
            launched += 1
            if not outputs:
                assert len(gradients(model)) < len(gradients(reference)), "negative control"

    run_in_pieces(hooks, lambda: outputs.append(run(encoder, inputs)), llm, [1] * 1000)
    both = 2 * PIECES * LAYERS
    minimum = both + {"none": 0, "selective": 1, "full": PIECES * LAYERS // 2}[recompute]
    assert launched >= minimum + 1
    assert recompute != "none" or launched == both + 1
    assert torch.equal(outputs[0], expected)
    actual = gradients(model)
    assert actual.keys() == gradients(reference).keys()
    for name, gradient in gradients(reference).items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


def test_encoder_outside_thread_does_not_stop():
    _, encoder = build("clip")
    inputs = inputs_of(encoder)
    hooks = LayerHooks()
    insert_yield_points(encoder, hooks.hook_for("encoder"), sends=False)
    run(encoder, inputs)
    run_in_pieces(hooks, lambda: run(encoder, inputs), lambda: run(encoder, inputs), [])


def test_thread_runs_planned_pieces_and_exits():
    done: list[int] = []

    def work() -> None:
        for piece in range(6):
            done.append(piece)
            hooks.hook_for("encoder")()

    def llm() -> None:
        for expected in (2, 2, 3, 3):  # the fourth collective has no pieces
            hooks.hook_for("llm")()
            assert done == list(range(expected))

    hooks = LayerHooks()
    threads = threading.active_count()
    hooks.hook_for("llm")()
    run_in_pieces(hooks, work, llm, [2, 0, 1])
    assert done == list(range(6)), "the remaining pieces did not run"
    assert threading.active_count() == threads
    hooks.hook_for("llm")()
    assert done == list(range(6))


def test_error_in_piece_reaches_caller():
    def work() -> None:
        hooks.hook_for("encoder")()
        raise KeyError("failed piece")

    hooks = LayerHooks()
    threads = threading.active_count()
    with pytest.raises(KeyError, match="failed piece"):
        run_in_pieces(hooks, work, lambda: [hooks.hook_for("llm")() for _ in range(2)], [1, 1])
    assert threading.active_count() == threads
    with pytest.raises(KeyError, match="failed piece"):  # while the remaining pieces run
        run_in_pieces(hooks, work, hooks.hook_for("llm"), [1])


def test_thread_uses_grad_mode_of_caller():
    modes = []
    for enabled in (False, True):
        hooks = LayerHooks()
        with torch.set_grad_enabled(enabled):
            run_in_pieces(
                hooks, lambda: modes.append(torch.is_grad_enabled()), hooks.hook_for("llm"), [1]
            )
    assert modes == [False, True]
