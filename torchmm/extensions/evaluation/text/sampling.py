"""How the next token of a text is chosen, from the logits that a model gives.

What changes logits is Hugging Face's: their processors, in the order of their `generate`. Draws
depend on the seed, the prompt's number and the token's, so they are the same on every device, in
every layout and in every batch.

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
    """How tokens are chosen; names and meanings are those of Hugging Face's `GenerationConfig`."""

    max_new_tokens: int
    temperature: float = 0.0
    """0: always the likeliest token."""
    top_k: int = 0
    """Only so many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that the prompt or the text has already become less likely."""
    seed: int = 0

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a number is outside of its range.
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

    def processors(self) -> LogitsProcessorList:
        """What changes logits before a token is chosen, in Hugging Face's order."""
        made = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            made.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature > 0:
            made.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                made.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                made.append(TopPLogitsWarper(self.top_p))
        return made


class Chooser:
    """Chooses the next token of each prompt.

    Args:
        first: number of the first prompt, among all that are written with this seed.
    """

    def __init__(self, sampling: Sampling, prompts: Sequence[Microbatch], first: int) -> None:
        self._processors = sampling.processors()
        self._draws = sampling.temperature > 0
        self._texts = [prompt.input_ids_T.cpu() for prompt in prompts]
        self._generators = [
            torch.Generator().manual_seed((sampling.seed << 20) + first + number)
            for number in range(len(prompts))
        ]

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """int64 (B,), on the device of the logits."""
        if not self._processors:
            return logits_BV.argmax(-1)
        # On the CPU, prompt by prompt: draws are then the same on every device and in every batch.
        rows = logits_BV.float().cpu()
        found = []
        for number, (text, generator) in enumerate(zip(self._texts, self._generators, strict=True)):
            scores_1V = self._processors(text[None], rows[number : number + 1])  # type: ignore[arg-type]
            if self._draws:
                token = torch.multinomial(scores_1V.softmax(-1), 1, generator=generator)[0]
            else:
                token = scores_1V.argmax(-1)
            self._texts[number] = torch.cat([text, token])
            found.append(token)
        return torch.cat(found).to(logits_BV.device)
