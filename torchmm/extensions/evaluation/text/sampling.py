"""Selection of the next token from logits.

Logits processors are those of the Hugging Face `generate`, in the same order. Random tokens depend
on the seed and on the numbers of prompt and token. They are therefore the same on every device,
with any parallelism and in every batch.

Shape legend: B prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchmm.common.batch import Microbatch


@dataclass(frozen=True)
class Sampling:
    """Decoding settings, with the names and meanings of `GenerationConfig`."""

    max_new_tokens: int
    temperature: float = 0.0
    """Sampling temperature. If 0, the token with the highest probability is selected."""
    top_k: int = 0
    """Number of tokens with the highest probability to sample from. 0 disables the limit."""
    top_p: float = 1.0
    """Minimum total probability of the tokens to sample from."""
    repetition_penalty: float = 1.0
    """Penalty of tokens in the prompt and the generated text.

    Values above 1 reduce their probability.
    """
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: A value is out of range.
        """
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "not negative"),
            "top_k": (self.top_k >= 0, "not negative"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
        }
        wrong = [
            f"{name} = {getattr(self, name)} must be {rule}"
            for name, (holds, rule) in ranges.items()
            if not holds
        ]
        if wrong:
            raise ValueError("; ".join(wrong))


class TokenSampler:
    """Selection of the next token of each prompt.

    Args:
        sampling: Decoding settings.
        prompts: Packed sequences of one prompt each.
        first: Number of the first prompt, which seeds the sampling.
    """

    def __init__(self, sampling: Sampling, prompts: Sequence[Microbatch], first: int) -> None:
        self._draws = sampling.temperature > 0
        self._processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            self._processors.append(penalty)
        if self._draws:
            self._processors.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._processors.append(TopPLogitsWarper(sampling.top_p))
        self._texts = [prompt.input_ids_T.cpu() for prompt in prompts]
        self._generators = [
            torch.Generator().manual_seed((sampling.seed << 20) + first + number)
            for number in range(len(prompts))
        ]

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Return the selected tokens, int64 (B,), on the device of the logits."""
        if not self._processors:
            return logits_BV.argmax(-1)
        # Sampling runs on the CPU per prompt, so it is independent of the device and the batch.
        rows = logits_BV.float().cpu()
        selected = []
        for number, (text, generator) in enumerate(zip(self._texts, self._generators, strict=True)):
            scores_1V = self._processors(text[None], rows[number : number + 1])
            if self._draws:
                token = torch.multinomial(scores_1V.softmax(-1), 1, generator=generator)[0]
            else:
                token = scores_1V.argmax(-1)
            self._texts[number] = torch.cat([text, token])
            selected.append(token)
        return torch.cat(selected).to(logits_BV.device)
