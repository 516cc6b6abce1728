"""Multimodal models for random recipes, and the inputs of the Hugging Face model for one sample.

A multimodal model is one config in the recipe and one Hugging Face model in the reference. The
Hugging Face forward finds the placeholders, computes M-RoPE positions and adds deepstack features.
Images, videos and audio of a sample have the layout of the Hugging Face processor.

Shape legend: N images or audio inputs of a sample, P patches, F mel frames, M mel bins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from fuzz.data import SPECIAL, TOKEN_IDS
from fuzz.losses import TextLoss

if TYPE_CHECKING:
    from fuzz.reference import Sample

Table = dict[str, Any]

CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
}
"""Hugging Face classes by model_type. New entries go into `LATER_CLASSES`."""
LATER_CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
}
"""Hugging Face classes of models that were added later.

They replace a random multimodal model with probability `LATER`, so that old seeds keep most of
their draws.
"""
LATER = 0.5
VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Composites that are also drawn with videos."""
OMNI = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
"""Models with a vision and an audio encoder."""
SPEECH = {
    "voxtral": "",
    "qwen2_audio": "feature_attention_mask",
    "audioflamingo3": "input_features_mask",
}
"""Models with an audio encoder only, and the argument of their audio mask."""
PATCH_PX, MEL_BINS = 8, 8
SECOND_FRAMES, SECOND_POSITIONS = 100, 13
"""Mel frames and encoder positions per second of Qwen3-Omni.

The last position of a second has fewer frames.
"""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DELTA_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def draw_composite(rng: Random) -> Table:
    """Draw the [model] keys `config` and `processor`; the latter gives images of a few tokens."""
    model_type = rng.choice(list(CLASSES))
    later = Random(f"{rng.random()}")
    if later.random() < LATER:
        model_type = later.choice(list(LATER_CLASSES))
    config: Table = {
        "model_type": model_type,
        "text_config": _text(rng, model_type),
        "tie_word_embeddings": rng.random() < 0.5,
        **_special_tokens(model_type),
    }
    if model_type in SPEECH:
        return {"config": config | {"audio_config": _speech_audio(rng, model_type)}}
    config["vision_config"] = _vision(rng, model_type)
    size = {"shortest_edge": (2 * PATCH_PX) ** 2, "longest_edge": (4 * PATCH_PX) ** 2}
    processor: Table = {"size": size}
    if model_type == "gemma3":
        processor = {"size": {"height": 4 * PATCH_PX, "width": 4 * PATCH_PX}}
    elif model_type == "mistral3":
        config |= {"spatial_merge_size": 2, "vision_feature_layer": -1}
        processor = {"size": {"longest_edge": 4 * PATCH_PX}}
    elif model_type == "gemma4":
        processor = {"max_soft_tokens": 70}  # the minimum
    elif model_type in OMNI:
        config["audio_config"] = _omni_audio(rng, model_type)
    elif model_type.startswith("glm4v"):  # a patch has two frames
        processor = {"size": {edge: 2 * pixels for edge, pixels in size.items()}}
    return {"config": config, "processor": processor}


def delta_layers(layers: int) -> Table:
    """Return the layer types of Qwen3.5.

    The first layer has attention. With random weights, float32 rounding errors grow a hundredfold
    in gradients of a delta net that reads features directly, in any implementation.
    """
    kinds = ("full_attention", "linear_attention")
    return {**DELTA_NETS, "layer_types": [kinds[i % 2] for i in range(layers)]}


def _text(rng: Random, model_type: str) -> Table:
    layers = rng.choice((2, 2, 3, 4))
    config: Table = {
        "vocab_size": rng.choice((96, 96, 97)),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice((2, 4)),
        "max_position_embeddings": 512,
        "pad_token_id": SPECIAL.index("<pad>"),
    }
    # The sections of height and width decide which rotary pairs belong to which position.
    sections = Random(repr(config)).choice(([2, 1, 1], [1, 1, 2], [1, 2, 1]))
    delta = {"head_dim": 16, **delta_layers(layers)}
    delta_rope = {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
    glm_rope = {"mrope_section": [1, 2, 1]}
    keys: dict[str, tuple[Table, Table | None]] = {  # keys of the text model and of its RoPE
        "qwen2_vl": ({}, {"mrope_section": sections}),
        "qwen2_5_vl": ({}, {"mrope_section": sections}),
        "qwen3_vl": ({"head_dim": 8}, {}),
        "qwen3_vl_moe": ({"head_dim": 8, **_EXPERTS}, {}),
        "qwen3_5": (delta, delta_rope),
        "qwen3_5_moe": (delta | _EXPERTS | {"shared_expert_intermediate_size": 16}, delta_rope),
        "qwen3_omni_moe_thinker": (_EXPERTS, {}),
        "qwen2_5_omni_thinker": ({}, {}),
        "glm4v": ({}, glm_rope),
        "glm4v_moe": (
            {**_SHARED_EXPERTS, "head_dim": 16},
            {**glm_rope, "partial_rotary_factor": 0.5},
        ),
        "mistral3": ({"model_type": "mistral"}, None),
        "gemma3": ({"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 24}, None),
        "voxtral": ({"model_type": "llama"}, None),
        "qwen2_audio": ({"model_type": "qwen2"}, None),
        "audioflamingo3": ({"model_type": "qwen2"}, None),
    }
    if model_type == "gemma4":
        return config | _gemma4(rng, layers)
    text_keys, rope_keys = keys[model_type]
    config |= text_keys
    if rope_keys is not None:
        default = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        config["rope_parameters"] = default | rope_keys
    if model_type == "mistral3":
        config["sliding_window"] = rng.choice((8, 24))
    if model_type == "qwen3_5_moe":
        del config["intermediate_size"]
    return config


def _gemma4(rng: Random, layers: int) -> Table:
    kinds = ("sliding_attention", "full_attention")
    config: Table = {
        "model_type": "gemma4_text",
        "head_dim": 4,  # attention is even sharper with wider heads
        "global_head_dim": 8,
        "num_global_key_value_heads": 2,
        "sliding_window": 24,
        "layer_types": [kinds[i % 2] for i in range(layers)],
        "final_logit_softcapping": 3.0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": rng.random() < 0.5,
        "use_bidirectional_attention": rng.choice(("vision", None)),
    }
    if rng.random() < 0.5:
        experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
        config |= {"enable_moe_block": True, **experts}
    return {key: value for key, value in config.items() if value is not None}


def _vision(rng: Random, model_type: str) -> Table:
    layers = rng.choice((2, 2, 3, 4))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "patch_size": PATCH_PX}
    if model_type in ("mistral3", "gemma4"):
        config: Table = {**sizes, "num_hidden_layers": layers, "num_attention_heads": 4}
        if model_type == "mistral3":
            return {"model_type": "pixtral", **config, "image_size": 4 * PATCH_PX}
        specific = {"num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2}
        return {"model_type": "gemma4_vision", **config, **specific, "position_embedding_size": 64}
    if model_type == "gemma3":
        specific = {"image_size": 4 * PATCH_PX, "vision_use_head": False}
        config = {**sizes, "num_hidden_layers": layers, "num_attention_heads": 4}
        return {"model_type": "siglip_vision_model", **config, **specific}
    config = {**sizes, "depth": layers, "num_heads": 4, "out_hidden_size": 32}
    if model_type == "qwen2_vl":
        config = {"depth": layers, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
        return {**config, "num_heads": 4, "patch_size": PATCH_PX, "model_type": "qwen2_vl_vision"}
    if model_type.startswith("glm4v"):
        return {**config, "model_type": f"{model_type}_vision", "image_size": 5 * PATCH_PX}
    if model_type in ("qwen2_5_omni_thinker", "qwen2_5_vl"):
        full = sorted(rng.sample(range(layers), rng.choice((0, 1))))
        windows = {"window_size": 2 * PATCH_PX, "fullatt_block_indexes": full}
        omni = model_type == "qwen2_5_omni_thinker"
        name = "qwen2_5_omni_vision_encoder" if omni else "qwen2_5_vl_vision"
        return {**config, **windows, "model_type": name}
    config["num_position_embeddings"] = 25
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        return {**config, "model_type": f"{model_type}_vision"}
    deepstack_layers = sorted(rng.sample(range(layers), rng.choice((1, 2))))
    omni = model_type == "qwen3_omni_moe_thinker"
    name = "qwen3_omni_moe_vision_encoder" if omni else f"{model_type}_vision"
    return {**config, "model_type": name, "deepstack_visual_indexes": deepstack_layers}


def _omni_audio(rng: Random, model_type: str) -> Table:
    sizes = {
        "num_mel_bins": MEL_BINS,
        "d_model": 32,
        "encoder_layers": rng.choice((2, 2, 3, 4)),
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "max_source_positions": 16,
        "output_dim": 32,
    }
    if model_type == "qwen2_5_omni_thinker":
        return {"model_type": "qwen2_5_omni_audio_encoder", **sizes, "n_window": rng.choice((3, 8))}
    specific = {"n_window_infer": 200, "downsample_hidden_size": 12}
    return {"model_type": "qwen3_omni_moe_audio_encoder", **sizes, **specific}


def _speech_audio(rng: Random, model_type: str) -> Table:
    """Return the config of an audio encoder with 2 s chunks (Voxtral) or 1 s chunks."""
    is_voxtral = model_type == "voxtral"
    return {
        "model_type": f"{model_type}_encoder",
        "num_mel_bins": MEL_BINS,
        "d_model": 32,
        "encoder_layers": rng.choice((2, 2, 3, 4)),
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 4 * 32 if is_voxtral else 48,
        "max_source_positions": 100 if is_voxtral else 50,
    }


def spare_tokens(model: Table) -> int:
    """Return the additional sequence length that images, videos or audio need."""
    model_type = model.get("config", {}).get("model_type")
    if model_type == "voxtral":
        return 2 * 25
    if model_type in VIDEO:
        return 48  # four pairs of frames, each with a timestamp
    return model.get("processor", {}).get("max_soft_tokens", 0)


def _special_tokens(model_type: str) -> Table:
    start, stop = TOKEN_IDS["<|vision_start|>"], TOKEN_IDS["<|vision_end|>"]
    image, video = TOKEN_IDS["<image>"], TOKEN_IDS["<video>"]
    if model_type in SPEECH:
        key = "audio_token_index" if model_type == "qwen2_audio" else "audio_token_id"
        return {key: TOKEN_IDS["<sound>"]}
    if model_type == "mistral3":
        return {"image_token_index": image}
    tokens = {"image_token_id": image, "video_token_id": video}
    if model_type == "gemma3":
        ends = {"boi_token_index": start, "eoi_token_index": stop}
        return {"image_token_index": image, **ends, "mm_tokens_per_image": 4}
    if model_type == "gemma4":
        return tokens | {"boi_token_id": start, "eoi_token_id": stop, "audio_token_id": video}
    if model_type in OMNI:
        tokens["audio_token_id"] = TOKEN_IDS["<sound>"]
        tokens["audio_start_token_id"] = TOKEN_IDS["<|audio_start|>"]
    if model_type == "qwen3_omni_moe_thinker":
        return tokens  # other tokens are identified by name
    if model_type == "qwen2_5_omni_thinker":
        tokens["audio_end_token_id"] = TOKEN_IDS["<|audio_end|>"]
    if model_type.startswith("glm4v"):
        around = {"image_start_token_id": start, "image_end_token_id": stop}
        return tokens | around | {"video_start_token_id": video, "video_end_token_id": video}
    return tokens | {"vision_start_token_id": start, "vision_end_token_id": stop}


def layers_of(config: Table) -> dict[str, int]:
    """Return the number of layers by module, in the order of the model."""
    layers = {}
    if vision := config.get("vision_config"):
        layers["vision"] = vision["depth" if "depth" in vision else "num_hidden_layers"]
    if "audio_config" in config:
        layers["audio"] = config["audio_config"]["encoder_layers"]
    return layers | {"llm": config["text_config"]["num_hidden_layers"]}


class CompositeReference(nn.Module):
    """Hugging Face model.

    Args:
        config: Config of the recipe.
        names: Parameter names in the Hugging Face model by names in checkpoints.
    """

    def __init__(self, config: Table, names: Mapping[str, str]) -> None:
        super().__init__()
        self.kind = config["model_type"]
        kind: Any = getattr(transformers, (CLASSES | LATER_CLASSES)[self.kind])
        self.model: Any = kind._from_config(
            AutoConfig.for_model(**config), attn_implementation="eager"
        )
        if self.kind == "qwen3_omni_moe_thinker":  # published configs have it, the class does not
            self.model.config.vision_start_token_id = TOKEN_IDS["<|vision_start|>"]
        self.names = names
        self.weights = 1.0, 0.0
        self.text_loss = TextLoss()

    def losses(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss over targets. The image loss is zero."""
        logits = self.model(**self._arguments(sample)).logits[0]
        return self.text_loss(logits, sample.targets), torch.zeros(())

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in checkpoints."""
        tensors = self.model.state_dict(keep_vars=True)
        parameters = {
            checkpoint_name: tensors[hf_name] for checkpoint_name, hf_name in self.names.items()
        }
        return {
            name: value for name, value in parameters.items() if isinstance(value, nn.Parameter)
        }

    def _arguments(self, sample: Sample) -> Table:
        """Return the keyword arguments of the Hugging Face forward for a sample."""
        ids = sample.ids[None]
        arguments: Table = {"input_ids": ids, "use_cache": False}
        images, videos = (ids == TOKEN_IDS[name] for name in ("<image>", "<video>"))
        if self.kind in OMNI:
            arguments["attention_mask"] = torch.ones_like(ids)
        elif self.kind not in ("mistral3", *SPEECH):
            key = "token_type_ids" if self.kind == "gemma3" else "mm_token_type_ids"
            arguments[key] = images.int() + 2 * videos.int()
        if "vision" in sample.read:
            pixels, grids, token_positions = sample.read["vision"]
            if self.kind in VIDEO:
                is_video = videos[0, token_positions].tolist()
                arguments |= _images_and_videos(pixels, grids, is_video)
            elif self.kind == "gemma3":
                arguments["pixel_values"] = pixels
            elif self.kind in ("mistral3", "gemma4"):
                parts = list(pixels.split([rows * columns for _, rows, columns in grids]))
                shapes = [(rows, columns) for _, rows, columns in grids]
                arrange = _padded_images if self.kind == "mistral3" else _patches_with_positions
                arguments |= arrange(parts, shapes)
            else:
                arguments |= {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
        if "audio" in sample.read:
            positions, grids, _ = sample.read["audio"]
            audios = positions.split([count for _, _, count in grids])
            if self.kind in SPEECH:
                arguments |= _audio_chunks(
                    audios, self.model.config.audio_config, SPEECH[self.kind]
                )
            else:
                arguments |= _masked_frames([_frames(audio, self.kind) for audio in audios])
        return arguments


def _images_and_videos(
    pixels: Tensor, grids: list[tuple[int, int, int]], is_video: list[bool]
) -> Table:
    """Split patches into the arguments of images and of videos with one grid per second.

    Args:
        is_video: Whether each placeholder token is a video token. A token has four patches.
    """
    sizes = [frames * rows * columns for frames, rows, columns in grids]
    first_tokens = [sum(sizes[:n]) // 4 for n in range(len(sizes))]
    parts, arguments = pixels.split(sizes), {}
    for key, grid, video in (("", "image", False), ("_videos", "video", True)):
        chosen = [n for n, token in enumerate(first_tokens) if is_video[token] == video]
        if chosen:
            arguments[f"pixel_values{key}"] = torch.cat([parts[n] for n in chosen])
            arguments[f"{grid}_grid_thw"] = torch.tensor([grids[n] for n in chosen])
    if "video_grid_thw" in arguments:
        arguments["second_per_grid_ts"] = torch.ones(len(arguments["video_grid_thw"]))
    return arguments


def _padded_images(images: list[Tensor], shapes: list[tuple[int, int]]) -> Table:
    """Return full images, padded with zeros to the right and below."""
    sizes = torch.tensor(shapes) * PATCH_PX
    height, width = sizes.amax(0).tolist()
    padded = torch.zeros(len(images), 3, height, width)
    for target, image, (rows, columns) in zip(padded, images, shapes, strict=True):
        blocks = image.view(rows, columns, 3, PATCH_PX, PATCH_PX).permute(2, 0, 3, 1, 4)
        pixels = blocks.reshape(3, rows * PATCH_PX, columns * PATCH_PX)
        target[:, : pixels.shape[1], : pixels.shape[2]] = pixels
    return {"pixel_values": padded, "image_sizes": sizes}


def _patches_with_positions(images: list[Tensor], shapes: list[tuple[int, int]]) -> Table:
    """Return (N, P, values) patches and their columns and rows. Padding has position -1."""
    grid_positions = [
        torch.tensor([[column, row] for row in range(rows) for column in range(columns)])
        for rows, columns in shapes
    ]
    pad = nn.utils.rnn.pad_sequence
    return {
        "pixel_values": pad(images, batch_first=True),
        "image_position_ids": pad(grid_positions, batch_first=True, padding_value=-1),
    }


def _frames(audio: Tensor, model_type: str) -> Tensor:
    """Return the (F, M) mel frames of an audio input."""
    if model_type == "qwen2_5_omni_thinker":
        return audio.reshape(-1, MEL_BINS)
    seconds = audio.split(SECOND_POSITIONS)
    return torch.cat([second.reshape(-1, MEL_BINS)[:SECOND_FRAMES] for second in seconds])


def _masked_frames(frames: list[Tensor]) -> Table:
    """Return (N, M, F) mel frames of audio inputs, and the mask of valid frames."""
    padded = nn.utils.rnn.pad_sequence(frames, batch_first=True)
    lengths = torch.tensor([len(audio) for audio in frames])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return {"input_features": padded.mT, "feature_attention_mask": mask.long()}


def _audio_chunks(audios: Sequence[Tensor], config: Any, mask: str) -> Table:
    """Return (N, M, F) mel frames of fixed-length chunks, and the mask of valid frames if required.

    An encoder position has two frames. If silence is masked, its patch also includes the next
    frame. At the last position, this is a frame of the silence.
    """
    frames, counts = [], []
    for audio in audios:
        for window in audio.split(config.max_source_positions):
            patches = window.unflatten(1, (-1, MEL_BINS))
            padded = torch.zeros(2 * config.max_source_positions + 1, MEL_BINS)
            valid = torch.cat([patches[:, :2].flatten(0, 1), patches[-1, 2:]])
            padded[: len(valid)] = valid
            frames.append(padded[:-1])
            counts.append(2 * len(window))
    arguments = {"input_features": torch.stack(frames).mT}
    if mask:
        is_valid = torch.arange(frames[0].shape[0]) < torch.tensor(counts)[:, None]
        arguments[mask] = is_valid.long()
    return arguments
