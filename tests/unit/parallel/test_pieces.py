"""Encoder layers in pieces: the same outputs and gradients, whatever happens in between."""

import threading

import pytest
import torch

from torchmm.common.batch import EncoderInputs
from torchmm.models.encoders import EncoderModule
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.registry import build_model
from torchmm.parallel.activation import apply_activation_checkpoint
from torchmm.parallel.tensor.bubbles import TensorBubbles, Turns
from torchmm.parallel.tensor.pieces import stop_in_layers
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
"""Of a layer, forward and backward each."""


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


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("tower", TOWERS)
def test_pieces_are_the_layer_stop_by_stop(tower, recompute):
    whole, encoder = build(tower, recompute)
    inputs = inputs_of(encoder)
    wanted = run(encoder, inputs)
    model, encoder = build(tower)
    bubbles = TensorBubbles()
    stop_in_layers(encoder, bubbles.pause, sends=False)
    apply_activation_checkpoint(encoder, recompute)
    outputs = []
    turns = bubbles.turns = Turns(lambda: outputs.append(run(encoder, inputs)), CPU)

    def launch(_: torch.Tensor) -> None:
        turns.launch(1)

    launched = 0
    while not turns.ended:
        # Somebody else's step in between, backward and all, which must not meet the encoder's.
        other = torch.ones(3, requires_grad=True)
        other.register_hook(launch)
        (other * launched).sum().backward()
        launched += 1
        assert bool(outputs) == turns.ended
        if not turns.ended:
            assert len(gradients(model)) < len(gradients(whole)), "negative control"
    both = 2 * PIECES * LAYERS
    least = both + {"none": 0, "selective": 1, "full": PIECES * LAYERS // 2}[recompute]
    assert launched >= least + 1
    assert recompute != "none" or launched == both + 1
    assert torch.equal(outputs[0], wanted)
    found = gradients(model)
    assert found.keys() == gradients(whole).keys()
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


def test_nothing_stops_outside_of_its_thread():
    _, encoder = build("clip")
    inputs = inputs_of(encoder)
    bubbles = TensorBubbles()
    stop_in_layers(encoder, bubbles.pause, sends=False)
    run(encoder, inputs)
    turns = bubbles.turns = Turns(lambda: None, CPU)
    run(encoder, inputs)
    turns.close()


def test_pieces_are_counted_and_left_where_they_are():
    done: list[int] = []

    def work() -> None:
        for piece in range(6):
            done.append(piece)
            bubbles.pause()

    bubbles = TensorBubbles()
    threads = threading.active_count()
    turns = bubbles.turns = Turns(work, CPU)
    bubbles.fill()
    assert done == [], "nothing was planned"
    with bubbles.launching([2, 0, 1]):
        for wanted in (2, 2, 3, 3):  # the fourth collective was not planned
            bubbles.fill()
            assert done == list(range(wanted))
    bubbles.fill()
    assert done == [0, 1, 2]
    turns.close()
    assert threading.active_count() == threads
    turns.launch(3)
    assert done == [0, 1, 2]


def test_errors_come_to_who_launches():
    def work() -> None:
        turns.pause()
        raise KeyError("torn")

    turns = Turns(work, CPU)
    turns.launch(1)
    with pytest.raises(KeyError, match="torn"):
        turns.launch(1)
    turns.launch(1)  # there is nothing left
    turns.close()


def test_grad_mode_is_the_owners():
    modes = []
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            turns = Turns(lambda: modes.append(torch.is_grad_enabled()), CPU)
            turns.launch(1)
    assert modes == [False, True]
