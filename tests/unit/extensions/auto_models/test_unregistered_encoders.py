"""Image encoders without a registered family: models that pass the proof, and detected errors."""

import importlib.util
import json
import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch
from counting import count_flops
from model_cases import LLMS, build, microbatch
from PIL import Image
from transformers import CONFIG_MAPPING, PreTrainedModel, ViTForImageClassification
from transformers.models.vit import modeling_vit

from torchmm.common.batch import EncoderInputs, ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.errors import ConfigError
from torchmm.costs.flops import microbatch_flops
from torchmm.data.media.images import ImagePreprocessor
from torchmm.extensions.auto_models import parity
from torchmm.extensions.auto_models.encoder_structure import _weights_outside as weights_outside
from torchmm.extensions.auto_models.encoders import DetectedEncoderFamily, small_encoder_config
from torchmm.extensions.auto_models.parity import ParityResult, compare_encoder
from torchmm.models.build import ENCODER_FILES, build_model
from torchmm.models.encoders import EncoderModule, EncoderSpec
from torchmm.models.hf.load import load_weights
from torchmm.parallel.tensor.apply import tensor_problems
from torchmm.recipe.model_section import EncoderConfig, FreezeConfig, LlmConfig, ModelConfig

ROOT = Path(__file__).parents[4]
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def load_script() -> ModuleType:
    path = ROOT / "scripts" / "unlisted_models.py"
    spec = importlib.util.spec_from_file_location("unlisted_models", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


REGISTERS = {k: v for k, v in TINY.items() if k != "intermediate_size"}


def pair(model_type: str, sizes: dict = TINY, **section: object) -> ModelConfig:
    encoder = EncoderConfig(config={"model_type": model_type, **sizes}, **section)  # type: ignore[arg-type]
    return ModelConfig(llm=LlmConfig(config=LLMS["qwen2"]), encoders={"eye": encoder})


def proof(model_type: str, **settings: object) -> ParityResult[DetectedEncoderFamily]:
    return compare_encoder(
        CONFIG_MAPPING[model_type](**settings), ENCODER_FILES, "ViTImageProcessor"
    )


def rejection(model_type: str, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        proof(model_type, **settings)
    return "; ".join(caught.value.problems)


@pytest.mark.parametrize("count", [3, 4])
def test_llava_requires_hidden_states_of_layers(count, monkeypatch) -> None:
    """Return hidden states of other values, then too few hidden states."""
    assert proof("vit", **TINY).family.is_llava_compatible
    forward = modeling_vit.ViTModel.forward

    def changed(*arguments: object, **options: object) -> object:
        output = forward(*arguments, **options)
        if output.hidden_states is not None:
            factor = 2 if count == 4 else 1
            states = [factor * state for state in output.hidden_states[:count]]
            output.hidden_states = tuple(states)
        return output

    monkeypatch.setattr(modeling_vit.ViTModel, "forward", changed)
    assert not proof("vit", **TINY).family.is_llava_compatible


def test_unlisted_encoder_trains_with_warning(caplog) -> None:
    caplog.set_level(logging.WARNING)
    parity._register_encoder.cache_clear()
    model = build(pair("vit"))
    images = EncoderInputs(torch.randn(2, 3, 16, 16), [(1, 4, 4)] * 2, torch.arange(3, 35))
    batch = microbatch([40], {"eye": images}, images.positions_K)
    model.llm(batch, model.encode(batch)).backward()
    assert all(p.grad is not None for p in model.parameters())
    (message,) = [r.message for r in caplog.records if "'vit' is not registered" in r.message]
    assert "Tensor parallelism was not compared" in message
    (problem,) = tensor_problems(model.encoders["eye"], 2)  # type: ignore[arg-type]
    assert "'eye' is not a registered model type" in problem
    caplog.clear()
    build_model(pair("vit"), FreezeConfig())
    assert not caplog.records  # once per process


@pytest.mark.parametrize(
    ("model_type", "tokens", "final_norm"),
    [
        ("deit", 2, "layernorm"),
        ("dinov2_with_registers", 5, "layernorm"),
        ("ijepa", 0, "layernorm"),
        ("altclip_vision_model", 1, ""),  # not registered with `AutoModel`; layers require a mask
        ("git_vision_model", 1, "vision_model.post_layernorm"),  # in a nested module
    ],
)
def test_encoder_structure_is_detected_from_forward(
    model_type: str, tokens: int, final_norm: str
) -> None:
    actual = proof(model_type)
    assert actual.worst < 1e-5
    assert not actual.unreadable
    assert actual.family.form.num_prefix_tokens == tokens
    assert actual.family.form.final_norm == final_norm


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("beit", {}, "layers have inputs besides hidden states: ['resolution']"),
        ("vit_mae", {}, "for 2 images of 16 patches"),  # drops patches
        ("yolos", {"image_size": [64, 64]}, "the input of layer 1"),
        ("yolos", {}, "is not a square"),
        ("sam_vision_model", {}, "an operation that is not a separate module is before the layers"),
        ("mobilevit", {}, "list of layers is unknown"),
        ("timm_wrapper", {}, "images have no fixed size"),
    ],
)
def test_unproven_encoder_is_rejected_with_reason(model_type: str, settings, reason: str) -> None:
    assert reason in rejection(model_type, **settings)


def test_proof_detects_layers_that_mix_images(monkeypatch) -> None:
    right = modeling_vit.ViTLayer.forward

    def mixing(self, hidden_states, attention_mask=None, **kwargs):
        return right(self, hidden_states) + hidden_states.mean(0)

    monkeypatch.setattr(modeling_vit.ViTLayer, "forward", mixing)
    assert "of images together" in rejection("vit")


def test_encoder_weights_outside_layers_are_listed() -> None:
    tower = torch.nn.ModuleDict({"embed": torch.nn.Linear(2, 2), "layers": torch.nn.Linear(2, 2)})
    last = tower["layers"](tower["embed"](torch.ones(1, 2)))
    assert weights_outside(tower, last, ["embed", "layers"]) == []
    assert weights_outside(tower, last, ["layers"]) == ["embed.weight", "embed.bias"]
    tower["unused"] = torch.nn.Linear(2, 2)
    assert weights_outside(tower, last, ["embed", "layers"]) == []


def test_proof_detects_positions_that_depend_on_batch(monkeypatch) -> None:
    right = modeling_vit.ViTEmbeddings.forward

    def counting(self, pixel_values, **kwargs):
        places = torch.arange(len(pixel_values), dtype=pixel_values.dtype)
        return right(self, pixel_values, **kwargs) + places[:, None, None]

    monkeypatch.setattr(modeling_vit.ViTEmbeddings, "forward", counting)
    assert "pixels of patch 0 change positions" in rejection("vit")


@pytest.mark.parametrize("broken", ["layer", "order", "class token"])
def test_proof_detects_errors_of_encoder(broken: str, monkeypatch) -> None:
    run_layer, finish = DetectedEncoderFamily.run_layer, DetectedEncoderFamily.finish

    def skip_layer(self, tower, index, layer, hidden, context):
        return hidden if index == 1 else run_layer(self, tower, index, layer, hidden, context)

    def reverse_order(self, tower, hidden, *arguments):
        return finish(self, tower, hidden.flip(0), *arguments)

    def shift_tokens(self, tower, hidden, *arguments):
        return finish(self, tower, hidden.roll(1, dims=1), *arguments)

    if broken == "layer":
        monkeypatch.setattr(DetectedEncoderFamily, "run_layer", skip_layer)
    else:
        monkeypatch.setattr(
            DetectedEncoderFamily, "finish", reverse_order if broken == "order" else shift_tokens
        )
    assert "comparisons with the Hugging Face model fail" in rejection("vit")


def test_proof_detects_wrong_encoder_gradient(monkeypatch) -> None:
    right = parity._stage_features

    def wrong(ours, inputs):
        results = right(ours, inputs)
        results["gradient of layers.1.mlp.fc1.weight"] *= 1.0001
        return results

    monkeypatch.setattr(parity, "_stage_features", wrong)
    assert "gradient of layers.1.mlp.fc1.weight of images" in rejection("vit")


def test_files_of_classification_model_are_read(tmp_path: Path) -> None:
    """Check files of transformers classes, with the weight names of earlier versions."""
    plain = ViTForImageClassification(CONFIG_MAPPING["vit"](**TINY))
    plain.save_pretrained(tmp_path)
    names = json.dumps(sorted(path.name for path in tmp_path.iterdir()))
    assert "model.safetensors" in names
    section = EncoderConfig(source=str(tmp_path))
    config = ModelConfig(llm=LlmConfig(config=LLMS["qwen2"]), encoders={"eye": section})
    model = build(config)
    load_weights(model)
    expected = plain.vit.state_dict()
    actual = model.encoders["eye"].tower.state_dict()
    assert len(actual) > 40
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())


@pytest.mark.parametrize("model_type", ["vit", "deit", "chinese_clip_vision_model"])
def test_image_processor_matches_encoder(model_type: str) -> None:
    spec = build_model(pair(model_type), FreezeConfig()).image_specs()["eye"]
    pixels = ImagePreprocessor(spec).pixels(Image.new("RGB", (70, 40), "red"))
    assert pixels.shape == (3, 16, 16)


def test_encoder_without_processor_requires_one() -> None:
    with pytest.raises(ConfigError, match="image_processor_type"):
        build_model(pair("dinov2_with_registers", REGISTERS), FreezeConfig())
    named = {"image_processor_type": "ViTImageProcessor"}
    model = build_model(pair("dinov2_with_registers", REGISTERS, processor=named), FreezeConfig())
    assert model.image_specs()["eye"].processor_class == "ViTImageProcessor"


@pytest.mark.parametrize(
    ("model_type", "mechanism"),
    [
        ("swin", "biases by distance, stages of several widths, attention in windows"),
        ("convnext", "stages of several widths, convolutional stages"),
        ("timm_wrapper", "a backbone of another library (timm)"),
    ],
)
def test_unsupported_encoder_error_names_mechanism(model_type: str, mechanism: str) -> None:
    encoder = EncoderConfig(config={"model_type": model_type})
    config = ModelConfig(llm=LlmConfig(config=LLMS["qwen2"]), encoders={"eye": encoder})
    with pytest.raises(ConfigError) as caught:
        build_model(config, FreezeConfig())
    problem = caught.value.problems[-1]
    assert f"model_type {model_type!r} is not supported; it has {mechanism}" in problem
    assert "does not match the structure of a ViT encoder" in problem


def test_unsupported_multimodal_error_names_similar_type() -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig(config={"model_type": "blip-2"}), FreezeConfig())
    (problem,) = caught.value.problems
    assert (
        "it has a Q-Former, attention to an encoder; the most similar registered type is 'llava'"
        in problem
    )


@pytest.mark.campaign
def test_survey_of_image_encoders_matches_documentation() -> None:
    """Check the list of supported models, and compare the FLOPs of the cost model with torch."""
    script = load_script()
    kind = script.ENCODERS
    outcomes = script.compare_all(kind, script.image_encoders())
    page = (ROOT / "docs" / "reference" / "unlisted_models.md").read_text()
    assert script.present_section(kind, page) == script.section(kind, outcomes).strip()
    for name, outcome in outcomes.items():
        if outcome.parity:
            actual, counted = flops_of(name, outcome.parity.family)
            assert actual == pytest.approx(counted, rel=0.01), name


def flops_of(model_type: str, family: DetectedEncoderFamily) -> tuple[float, float]:
    """Return the FLOPs of a forward pass by the cost model, and by the FLOP counter of torch."""
    config = small_encoder_config(CONFIG_MAPPING[model_type]())
    spec = EncoderSpec("eye", family, config, "", {}, None, 24, torch.float32)
    encoder = EncoderModule(spec, ENCODER_FILES)
    assert isinstance(encoder.tower, PreTrainedModel)
    inputs = EncoderInputs(torch.randn(2, 3, 16, 16), [(1, 4, 4)] * 2, torch.empty(0))
    counted, _ = count_flops(lambda: encoder(inputs))
    images = (ImageMeta(16, 16, 16, 16),) * 2
    meta = MicrobatchMeta((SampleMeta("s", 0, 40, images, "eye"),), 40)
    return microbatch_flops([encoder.describe()], meta)["eye"].forward, counted
