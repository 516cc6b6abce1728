"""Model shapes of benchmarks: small ones for CPUs, published ones for GPUs.

All shapes are LLaVA models (a SigLIP encoder, a two-layer connector and a causal LM), so that
`LlavaForConditionalGeneration` of Hugging Face is the same model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SO400M = {
    # google/siglip-so400m-patch14-384
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
QWEN3_1_7B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN3_8B = {
    **QWEN3_1_7B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Shape:
    """Model with its batch size and the settings that it requires to fit into memory."""

    vision: dict[str, Any]
    text: dict[str, Any]
    sequence_length: int
    sequences: int
    """Packed sequences per step."""
    frozen: tuple[str, ...] = ()
    activation_checkpoint: str = "none"

    def llava_config(self, image_token_id: int) -> dict[str, Any]:
        """Return the Hugging Face config of the multimodal model."""
        return {
            "model_type": "llava",
            "vision_config": {"model_type": "siglip_vision_model", **self.vision},
            "text_config": self.text,
            "image_token_index": image_token_id,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": self.text["tie_word_embeddings"],
        }


def _small(size: int, ffn: int, layers: int, image: int, sequence_length: int, n: int) -> Shape:
    """Return a shape whose encoder and LLM have the same size and six heads."""
    both = {
        "hidden_size": size,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
    }
    text = {
        "model_type": "llama",
        "vocab_size": 4096,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        **both,
    }
    vision = {"image_size": image, "patch_size": 16, **both}
    return Shape(vision, text, sequence_length, sequences=n)


SHAPES = {
    # For tests: a step takes milliseconds.
    # A sequence fits the longest caption. Otherwise, torchmm would truncate it, and the baseline
    # would not.
    "tiny": _small(48, 64, 2, image=32, sequence_length=80, n=2),
    # 4 million parameters: the smallest shape with reported results.
    "quickstart": _small(192, 512, 4, image=96, sequence_length=512, n=2),
    # 44 million parameters.
    "medium": _small(480, 1536, 8, image=128, sequence_length=512, n=1),
    "so400m_qwen3_1.7b": Shape(SO400M, QWEN3_1_7B, sequence_length=8192, sequences=1),
    # The LLM is frozen: AdamW states of 8 billion parameters would use 131 GB per program.
    "so400m_qwen3_8b_frozen_llm": Shape(
        SO400M,
        QWEN3_8B,
        sequence_length=8192,
        sequences=1,
        frozen=("llm",),
        activation_checkpoint="full",
    ),
}
