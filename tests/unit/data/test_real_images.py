"""50 real images: the pixels of the loader equal those of the Hugging Face processors bitwise."""

import datasets
import numpy as np
import pytest
import transformers

from torchmm.data.media.images import ImagePreprocessor, decode_rgb, read_size
from torchmm.models.build import build_model
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

COUNT = 50
MAX_PIXELS = 10**8
SMALL_LLM = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
VLM_CONFIGS = {
    "llava": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 64, **SMALL_LLM},
        "vision_config": {
            "model_type": "clip_vision_model",
            "image_size": 336,
            "patch_size": 14,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "image_token_index": 3,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {"vocab_size": 151680, **SMALL_LLM},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "depth": 1,
            "fullatt_block_indexes": [0],
            "num_heads": 2,
            "out_hidden_size": 32,
        },
    },
}

VISION = {k: v for k, v in VLM_CONFIGS["llava"]["vision_config"].items() if k != "model_type"}
LLAMA = VLM_CONFIGS["llava"]["text_config"]
VLM_CONFIGS |= {
    "internvl": {
        "model_type": "internvl",
        "text_config": LLAMA,
        "vision_config": {"model_type": "internvl_vision", **VISION},
        "image_token_id": 3,
    },
    "idefics3": {
        "model_type": "idefics3",
        "text_config": LLAMA,
        "vision_config": {"model_type": "idefics3_vision", **VISION},
        "image_token_id": 3,
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "text_config": LLAMA,
        "vision_config": {"model_type": "smolvlm_vision", **VISION},
        "image_token_id": 3,
    },
    "paligemma": {
        "model_type": "paligemma",
        "text_config": {**LLAMA, "model_type": "gemma"},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "image_token_index": 3,
        "projection_dim": 32,
    },
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {**LLAMA, "model_type": "gemma3_text"},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "image_token_index": 3,
        "mm_tokens_per_image": 36,
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "text_config": {"vocab_size": 151680, **SMALL_LLM},
        "vision_config": {"hidden_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2},
    },
}


@pytest.mark.parametrize("family", VLM_CONFIGS)
def test_real_images_match_hugging_face_processor(family, real_data):
    model = build_model(ModelConfig(config=VLM_CONFIGS[family]), FreezeConfig())
    spec = model.image_specs()["vision"]
    ours = ImagePreprocessor(spec)
    theirs = getattr(transformers, spec.processor_class)(**spec.processor)
    rows = datasets.load_dataset(
        "parquet", data_dir=str(real_data / "tuxpaint_stamps" / "train"), split="train"
    ).cast_column("image", datasets.Image(decode=False))
    assert len(rows) >= COUNT
    for row in rows.select(range(COUNT)):
        data = row["image"]["bytes"]
        image = decode_rgb(data, MAX_PIXELS)
        outputs = theirs(images=[image], return_tensors="np")
        pixels = outputs["pixel_values"]
        meta = ours.meta(*read_size(data, MAX_PIXELS))
        actual = ours.pixels(image)
        np.testing.assert_array_equal(actual, pixels.reshape(actual.shape))
        if family.startswith("qwen"):
            grid = outputs["image_grid_thw"][0]
            assert meta.patches == int(np.prod(grid))
            assert meta.tokens == meta.patches // spec.merge**2
        else:
            patches = (pixels.shape[-1] // spec.patch_size_px) ** 2
            assert (meta.patches, meta.tokens) == (patches, patches // spec.merge**2)
