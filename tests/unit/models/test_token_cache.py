"""Logits with a cache equal the logits of the full text, for one prompt or several."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from model_cases import DELTA, LLMS, microbatch, relative_error, text_model
from torch import Tensor

from torchmm.common.batch import IGNORE_TARGET, Microbatch, MicrobatchMeta
from torchmm.models.layers.kv_cache import PackedCache, next_token_sequence
from torchmm.models.llm import LlmModule

LENGTHS = [5, 21, 2]
"""Prompt lengths below and above the window of 4. The last prompt is shorter than a filter."""
STEPS = 6


def row_of(ids_T: Tensor, cu_seqlens: list[int]) -> Microbatch:
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cu_seqlens)])
    no_targets = torch.full_like(ids_T, IGNORE_TARGET)
    return Microbatch(ids_T, no_targets, positions, cu_seqlens, {}, MicrobatchMeta((), len(ids_T)))


def generated_tokens() -> Tensor:
    """Return generated tokens of shape (prompts, STEPS)."""
    return torch.randint(3, 60, (len(LENGTHS), STEPS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def cached_logits(llm: LlmModule, lengths: list[int] = LENGTHS, shift: int = 0) -> Tensor:
    """Return logits (prompts, STEPS, V) before each token, computed with a cache.

    Args:
        llm: Model that computes the logits.
        lengths: Prompt lengths.
        shift: Offset that is added to the positions of generated tokens.
    """
    row = row_of(microbatch(lengths).input_ids_T, microbatch(lengths).cu_seqlens)
    cache, results = llm.new_cache(), []
    for step, tokens_B in enumerate(generated_tokens().T):
        last = torch.tensor(row.cu_seqlens[1:]) - 1
        results.append(llm.logits(row, {}, last, cache))
        row = next_token_sequence(row, tokens_B)
        if step == 0:
            row = replace(row, position_ids=row.position_ids + shift)
    return torch.stack(results, dim=1)


@torch.no_grad()
def uncached_logits(llm: LlmModule, lengths: list[int] = LENGTHS) -> Tensor:
    """Return the same logits, computed from separate sequences with all tokens."""
    prompts = microbatch(lengths).input_ids_T.split(lengths)
    results = []
    for prompt_T, tokens in zip(prompts, generated_tokens(), strict=True):
        ids_T = torch.cat([prompt_T, tokens[:-1]])
        last = torch.arange(len(prompt_T) - 1, len(ids_T))
        results.append(llm.logits(row_of(ids_T, [0, len(ids_T)]), {}, last))
    return torch.stack(results)


@pytest.mark.parametrize("family", list(LLMS))
def test_cached_logits_match_full_text(family: str) -> None:
    llm = text_model(family).eval().llm
    assert relative_error(cached_logits(llm), uncached_logits(llm)) < 1e-5


@pytest.mark.parametrize("family", DELTA)
def test_cached_states_of_several_chunks_match_full_text(family: str) -> None:
    llm = text_model(family).eval().llm
    lengths = [70, 3, 140]
    assert relative_error(cached_logits(llm, lengths), uncached_logits(llm, lengths)) < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "qwen3_5"])
def test_shifted_positions_change_cached_logits(family: str) -> None:
    """Check the comparison above. Only positions after the prompt are shifted."""
    llm = text_model(family).eval().llm
    actual, expected = cached_logits(llm, shift=1), uncached_logits(llm)
    assert relative_error(actual[:, 0], expected[:, 0]) < 1e-5
    assert relative_error(actual[:, 1:], expected[:, 1:]) > 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "deepseek_v3"])
def test_unmasked_padding_changes_cached_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that zeros before the shorter prompts change the logits without a mask."""
    llm = text_model(family).eval().llm
    expected = uncached_logits(llm)
    monkeypatch.setattr(PackedCache, "visible_keys", lambda *_: None)
    assert relative_error(cached_logits(llm), expected) > 1e-4


def test_cache_of_different_prompts_is_rejected() -> None:
    llm = text_model("llama").llm
    cache = llm.new_cache()
    llm.logits(row_of(torch.arange(3, 8), [0, 2, 5]), {}, torch.tensor([1, 4]), cache)
    with pytest.raises(ValueError, match=r"\[1\] tokens for a cache of 2 prompts"):
        llm.logits(row_of(torch.tensor([3]), [0, 1]), {}, torch.tensor([0]), cache)
