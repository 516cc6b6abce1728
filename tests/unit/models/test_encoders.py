"""Each encoder family has the outputs and gradients of the unmodified Hugging Face encoder."""

import copy
from math import prod
from typing import Any

import pytest
import torch
from model_cases import (
    CLASS_TOKEN,
    ENCODERS,
    GRIDS,
    REGISTERS,
    SPEECH,
    build,
    make_inputs,
    pair_config,
    relative_error,
    worst_gradient,
)
from omni_cases import EARS, Ear
from proofs import proves
from torch import Tensor, nn
from transformers import AutoModel, MetaClip2VisionModel
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniVisionEncoder,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeVisionEncoder,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from torchmm.common.batch import EncoderInputs
from torchmm.models.encoders import EncoderModule
from torchmm.models.families.encoders.audio import window_lengths
from torchmm.models.layered import StageRange

UNNAMED = {  # not registered with AutoModel
    "metaclip_2_vision_model": MetaClip2VisionModel,
    "qwen2_vl_vision": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl_vision": Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3_vl_vision": Qwen3VLVisionModel,
    "qwen3_vl_moe_vision": Qwen3VLMoeVisionModel,
    "qwen3_5_vision": Qwen3_5VisionModel,
    "qwen3_5_moe_vision": Qwen3_5MoeVisionModel,
    "qwen2_5_omni_vision_encoder": Qwen2_5OmniVisionEncoder,
    "qwen2_5_omni_audio_encoder": Qwen2_5OmniAudioEncoder,
    "qwen3_omni_moe_vision_encoder": Qwen3OmniMoeVisionEncoder,
    "qwen3_omni_moe_audio_encoder": Qwen3OmniMoeAudioEncoder,
    "glm4v_vision": Glm4vVisionModel,
    "glm4v_moe_vision": Glm4vMoeVisionModel,
}


def hf_encoder(encoder: EncoderModule) -> nn.Module:
    """Return the complete Hugging Face encoder with eager attention and equal weights."""
    config = encoder.spec.config
    if config.model_type == "whisper":
        tower = WhisperEncoder._from_config(copy.deepcopy(config), attn_implementation="eager")
    elif config.model_type in UNNAMED:
        tower = UNNAMED[config.model_type]._from_config(config, attn_implementation="eager")
    else:
        tower = AutoModel.from_config(config, attn_implementation="eager")
        tower.train(config.model_type != "dinov3_vit")  # training mode would perturb positions
    missing = tower.load_state_dict(encoder.tower.state_dict(), strict=False).missing_keys
    assert {f"tower.{name}" for name in missing} == encoder.unused
    return tower


def hf_features(family: str, tower: nn.Module, inputs: EncoderInputs, layer: int) -> Tensor:
    if family == "whisper":
        return whisper_features(tower, inputs)
    if family.startswith("wav2vec2"):
        waves = waveforms(inputs)
        return torch.cat([tower(wave_S[None]).last_hidden_state[0] for wave_S in waves])
    if family.endswith("_omni_sound"):
        return chunked_features(EARS[family.removesuffix("_sound")], tower, inputs)
    if family in SPEECH:
        return window_features(family, tower, inputs)
    if family.startswith(("qwen", "glm")):
        return tower(inputs.pixels, torch.tensor(inputs.grids_thw)).pooler_output
    if family == "pixtral":
        return pixtral_features(tower, inputs)
    if family == "gemma4":
        return gemma4_features(tower, inputs)
    if family == "siglip2":
        sizes = [prod(grid) for grid in inputs.grids_thw]
        pixels = nn.utils.rnn.pad_sequence(inputs.pixels.split(sizes), batch_first=True)
        mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
        shapes = torch.tensor([grid[1:] for grid in inputs.grids_thw])
        states = tower(pixels, mask, shapes, output_hidden_states=True).hidden_states
        return states[layer][mask]
    hidden = tower(inputs.pixels, output_hidden_states=True).hidden_states[layer]
    first = REGISTERS.get(family, 0) + (family in CLASS_TOKEN)
    return hidden[:, first:].flatten(0, 1)


def whisper_features(tower: Any, inputs: EncoderInputs) -> Tensor:
    """Return features of each audio file from an encoder whose input length is set to the file."""
    table = tower.embed_positions.weight
    results = []
    for audio_PD in inputs.pixels.split([prod(grid) for grid in inputs.grids_thw]):
        tower.config.max_source_positions = len(audio_PD)
        tower.embed_positions = nn.Embedding.from_pretrained(table[: len(audio_PD)])
        mels_MF = audio_PD.reshape(-1, tower.num_mel_bins).T
        results.append(tower(mels_MF[None]).last_hidden_state[0])
    tower.embed_positions = nn.Embedding.from_pretrained(table)
    return torch.cat(results)


def chunked_features(ear: Ear, tower: Any, inputs: EncoderInputs) -> Tensor:
    """Return features before the projection of all audio in one call."""
    audios = []
    for audio_PD in inputs.pixels.split([prod(grid) for grid in inputs.grids_thw]):
        full_length = len(audio_PD) // ear.chunk * ear.chunk
        filled = audio_PD[:full_length].reshape(-1, ear.frames * ear.chunk, tower.num_mel_bins)
        read = filled[:, : ear.chunk_frames]
        remaining = audio_PD[full_length:].reshape(-1, tower.num_mel_bins)
        audios.append(torch.cat([read.flatten(0, 1), remaining]))
    results: list[Tensor] = []
    handle = tower.ln_post.register_forward_hook(lambda *given: results.append(given[-1]))
    tower(torch.cat(audios).T, torch.tensor([len(audio) for audio in audios]))
    handle.remove()
    return results[0]


def window_features(family: str, tower: Any, inputs: EncoderInputs) -> Tensor:
    """Return features of all chunks in one call, with masked noise after each audio."""
    mels, full = tower.num_mel_bins, tower.max_source_positions
    lengths = window_lengths(inputs.grids_thw, full)
    windows_NFM = torch.randn(len(lengths), 2 * full + 1, mels)
    for window_FM, patches in zip(windows_NFM, inputs.pixels.split(lengths), strict=True):
        frames = patches.view(len(patches), -1, mels)
        held_FM = torch.cat([frames[:, :2].flatten(0, 1), frames[-1, 2:]])
        window_FM[: len(held_FM)] = held_FM
    mels_NMF = windows_NFM[:, :-1].mT
    if family == "voxtral":
        return tower(mels_NMF).last_hidden_state.flatten(0, 1)
    is_audio = torch.arange(full) < torch.tensor(lengths)[:, None]
    if family == "qwen2_audio":
        mask = torch.zeros(len(lengths), 1, 1, full).masked_fill(~is_audio[:, None, None], -1e30)
        hidden = tower(mels_NMF, attention_mask=mask).last_hidden_state
    else:
        hidden = tower(mels_NMF, is_audio.repeat_interleave(2, dim=1)).last_hidden_state
    return torch.cat([features[: n // 2] for features, n in zip(hidden, lengths, strict=True)])


def gemma4_features(tower: Any, inputs: EncoderInputs) -> Tensor:
    """Return features of a padded batch, with patches per image as the pooling requires."""
    sizes = [prod(grid) for grid in inputs.grids_thw]
    pixels = nn.utils.rnn.pad_sequence(inputs.pixels.split(sizes), batch_first=True)
    positions = torch.full((*pixels.shape[:2], 2), -1)
    for image, (_, rows, columns) in enumerate(inputs.grids_thw):
        for patch in range(rows * columns):
            positions[image, patch] = torch.tensor([patch % columns, patch // columns])
    return tower(pixels, positions).last_hidden_state


def pixtral_features(tower: Any, inputs: EncoderInputs) -> Tensor:
    """Return features of a batch of images that are padded below and to the right."""
    images = torch.zeros(len(inputs.grids_thw), 3, 16, 20)
    sizes = [(4 * rows, 4 * columns) for _, rows, columns in inputs.grids_thw]
    each = inputs.pixels.split([prod(grid) for grid in inputs.grids_thw])
    for image, patches, (height, width) in zip(images, each, sizes, strict=True):
        grid = patches.view(height // 4, width // 4, 3, 4, 4).permute(2, 0, 3, 1, 4)
        image[:, :height, :width] = grid.reshape(3, height, width)
    return tower(images, sizes).last_hidden_state[0]


def waveforms(inputs: EncoderInputs) -> list[Tensor]:
    """Return waveforms with the ten zeros that the last position requires."""
    sizes = [prod(grid) for grid in inputs.grids_thw]
    return [nn.functional.pad(x.flatten(), (0, 10)) for x in inputs.pixels.split(sizes)]


@proves("equal", ENCODERS)
@pytest.mark.parametrize(
    ("family", "layer"), [("clip", -2), ("dinov2", -2), *((name, -1) for name in ENCODERS)]
)
def test_encoder_matches_hugging_face_outputs_and_gradients(family: str, layer: int) -> None:
    encoder = build(pair_config("llama", family, feature_layer=layer)).encoders["eye"]
    inputs = make_inputs(family)
    tower = hf_encoder(encoder)
    ours = encoder(inputs)
    theirs = encoder.connector(hf_features(family, tower, inputs, layer))
    assert relative_error(ours, theirs) < 1e-5
    weights = torch.randn_like(ours)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    assert worst_gradient(encoder.tower, tower, lambda name: name) < 1e-5


def test_packed_audio_matches_padded_batch_with_mask() -> None:
    """Compare with padded batches, which Hugging Face uses for models with feature layer norm."""
    encoder = build(pair_config("llama", "wav2vec2_stable")).encoders["eye"]
    inputs = make_inputs("wav2vec2_stable")
    waves = waveforms(inputs)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(w)) for w in waves], batch_first=True)
    padded = nn.utils.rnn.pad_sequence(waves, batch_first=True)
    hidden = hf_encoder(encoder)(padded, attention_mask=mask.long()).last_hidden_state
    sizes = [prod(grid) for grid in inputs.grids_thw]
    theirs = torch.cat([row[:size] for row, size in zip(hidden, sizes, strict=True)])
    assert relative_error(encoder(inputs), encoder.connector(theirs)) < 1e-5


@proves("packed", ENCODERS)
@pytest.mark.parametrize("family", list(GRIDS))
def test_packed_images_and_audio_are_independent(family: str) -> None:
    encoder = build(pair_config("llama", family)).encoders["eye"]
    inputs = make_inputs(family)
    packed = encoder(inputs)
    single = [encoder(inputs.select(range(i, i + 1))) for i in range(len(inputs.grids_thw))]
    assert relative_error(packed, torch.cat(single)) < 1e-5


@proves("stages", ENCODERS)
@pytest.mark.parametrize("family", list(GRIDS))
def test_three_encoder_stages_match_full_encoder(family: str) -> None:
    encoder = build(pair_config("llama", family)).encoders["eye"]
    inputs = make_inputs(family)
    full = encoder(inputs)
    weights = torch.randn_like(full)
    (full * weights).sum().backward()
    stages = [encoder.rebuild() for _ in range(3)]
    reference = {n: p.grad for n, p in encoder.named_parameters()}
    observed = set()
    hidden = None
    for index, stage in enumerate(stages):
        stage.reduce_to_stages([StageRange(index, index + 1, index == 0, index == 2)])
        stage.load_state_dict(encoder.state_dict(), strict=False, assign=True)
        for name, parameter in stage.named_parameters():
            observed.add(name)
            parameter.grad = None
        hidden = stage(inputs, hidden)
    assert hidden is not None
    assert relative_error(hidden, full) < 1e-6
    (hidden * weights).sum().backward()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, reference[name], rtol=1e-5, atol=1e-6)
    assert observed == set(reference)


@pytest.mark.parametrize("family", list(GRIDS))
def test_dummy_image_is_valid(family: str) -> None:
    encoder = build(pair_config("llama", family)).encoders["eye"]
    inputs = encoder.dummy_inputs(torch.device("cpu"))
    assert encoder(inputs).isfinite().all()
    assert inputs.positions_K.numel() == 0


def test_pixel_shuffle_merges_square_of_patches() -> None:
    config = pair_config("llama", "clip", connector="pixel_shuffle_mlp", pixel_shuffle_factor=2)
    encoder = build(config).encoders["eye"]
    inputs = make_inputs("clip")
    inputs_seen: list[Tensor] = []
    encoder.connector.register_forward_pre_hook(lambda _, args: inputs_seen.append(args[0]))
    assert encoder(inputs).shape == (8, 32)
    patches = hf_features("clip", hf_encoder(encoder), inputs, -1)  # rows of 4 patches
    expected = torch.cat([patches[16 + 2], patches[16 + 3], patches[16 + 6], patches[16 + 7]])
    assert relative_error(inputs_seen[0][4 + 1], expected) < 1e-5
    assert encoder.image_spec().merge == 2


@pytest.mark.parametrize("family", ["siglip2", "qwen2_5_vl", "gemma4", "qwen3_omni_sound"])
def test_packed_layers_compile_as_one_graph(family: str) -> None:
    """Check down to the shapes of operators. `test_compilation` traces all families."""
    torch._dynamo.reset()  # compilations of all families would share one limit
    encoder = build(pair_config("llama", family)).encoders["eye"]
    inputs = make_inputs(family)
    expected = encoder(inputs)
    layer_types = 2 if family == "qwen2_5_vl" else 1  # with windows, and without
    for layer in encoder.layers[-layer_types:]:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert relative_error(encoder(inputs), expected) < 1e-6
