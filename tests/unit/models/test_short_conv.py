"""Short convolutions on packed sequences: equal to Hugging Face for each sample."""

from collections.abc import Callable

import pytest
import torch
from model_cases import (
    LLMS,
    build,
    microbatch,
    plain_causal_lm,
    relative_error,
    text_model,
    worst_gradient,
)
from test_llm import hf_loss_and_logits
from torch import Tensor

from torchmm.common.errors import ConfigError
from torchmm.common.layers import ConvolutionSizes
from torchmm.models.families.llms import hybrid
from torchmm.models.layers import short_conv
from torchmm.models.layers.attention import Segments
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.model_section import LlmConfig, ModelConfig

LENGTHS = [1, 2, 3, 9, 1, 5]
"""Sample lengths, some of them shorter than a filter."""


def errors_against_hugging_face(model: MultimodalModel) -> list[float]:
    """Return the error of logits, and of the worst gradient."""
    plain = plain_causal_lm(model)
    batch = microbatch(LENGTHS, ignored=0)
    loss = model(batch)
    expected, expected_logits = hf_loss_and_logits(plain, batch)
    logits = model.llm.logits(batch, {}, torch.arange(sum(LENGTHS)))
    loss.backward()
    expected.backward()
    worst = worst_gradient(model.llm.backbone, plain, lambda name: name)
    return [relative_error(logits, expected_logits), worst]


@pytest.mark.parametrize("changes", [{}, {"conv_bias": True}, {"conv_L_cache": 4}], ids=str)
def test_short_convolution_matches_hugging_face(changes: dict) -> None:
    model = build(ModelConfig(llm=LlmConfig(config={**LLMS["lfm2"], **changes})))
    assert max(errors_against_hugging_face(model)) < 1e-5


def test_convolution_comparison_detects_leak_between_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the comparison above: convolutions treat the sequence as one sample."""
    right: Callable[..., Tensor] = short_conv.packed_convolution

    def wrong(x_TC: Tensor, filters_CW: Tensor, _: Segments) -> Tensor:
        full = Segments.from_starts([0, sum(LENGTHS)], torch.device("cpu"))
        return right(x_TC, filters_CW, full)

    monkeypatch.setattr(short_conv, "packed_convolution", wrong)
    assert min(errors_against_hugging_face(text_model("lfm2"))) > 1e-2


def test_layer_descriptions_match_layer_types() -> None:
    convolution, attention, _ = text_model("lfm2").llm.layer_sizes()
    assert convolution.mixer == ConvolutionSizes(filter_width=3) and not convolution.qk_norm
    assert attention.mixer is None and attention.qk_norm
    assert convolution.ffn_size == attention.ffn_size == 32  # two thirds of the config value


def test_attention_mask_of_packed_samples_is_rejected() -> None:
    layer = text_model("lfm2").llm.layers[0]
    segments = Segments.from_starts([0, 5], torch.device("cpu"))
    with pytest.raises(ValueError, match="no attention mask"):
        layer.conv(torch.randn(1, 5, 32), segments, attention_mask=torch.ones(1, 5))


def test_convolution_without_sample_boundaries_is_rejected(monkeypatch) -> None:
    """Check layers of transformers before 5.23."""

    class Earlier:
        def forward(self, hidden_states, past_key_values=None, attention_mask=None, seq_idx=None):
            raise NotImplementedError

    monkeypatch.setattr(hybrid, "Lfm2ShortConv", Earlier)
    with pytest.raises(ConfigError, match="do not pass sample boundaries to their convolutions"):
        text_model("lfm2")
