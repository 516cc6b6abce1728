"""With a cache, tokens have the logits that they have in the whole text, alone or among others."""

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
"""Shorter and longer than the window of 4; the last one shorter than filters."""
STEPS = 6


def row_of(ids_T: Tensor, cu_seqlens: list[int]) -> Microbatch:
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cu_seqlens)])
    nothing = torch.full_like(ids_T, IGNORE_TARGET)
    return Microbatch(ids_T, nothing, positions, cu_seqlens, {}, MicrobatchMeta((), len(ids_T)))


def written() -> Tensor:
    """(prompts, STEPS) tokens."""
    return torch.randint(3, 60, (len(LENGTHS), STEPS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def cached_logits(llm: LlmModule, lengths: list[int] = LENGTHS, shift: int = 0) -> Tensor:
    """(prompts, STEPS, V) before each of the tokens.

    Args:
        shift: of the positions of written tokens.
    """
    row = row_of(microbatch(lengths).input_ids_T, microbatch(lengths).cu_seqlens)
    cache, found = llm.new_cache(), []
    for step, tokens_B in enumerate(written().T):
        last = torch.tensor(row.cu_seqlens[1:]) - 1
        found.append(llm.logits(row, {}, last, cache))
        row = next_token_sequence(row, tokens_B)
        if step == 0:
            row = replace(row, position_ids=row.position_ids + shift)
    return torch.stack(found, dim=1)


@torch.no_grad()
def whole_logits(llm: LlmModule, lengths: list[int] = LENGTHS) -> Tensor:
    """The same, each from a row of its own with all tokens."""
    prompts = microbatch(lengths).input_ids_T.split(lengths)
    found = []
    for prompt_T, tokens in zip(prompts, written(), strict=True):
        ids_T = torch.cat([prompt_T, tokens[:-1]])
        last = torch.arange(len(prompt_T) - 1, len(ids_T))
        found.append(llm.logits(row_of(ids_T, [0, len(ids_T)]), {}, last))
    return torch.stack(found)


@pytest.mark.parametrize("family", list(LLMS))
def test_prompts_with_a_cache_equal_whole_texts(family: str) -> None:
    llm = text_model(family).eval().llm
    assert relative_error(cached_logits(llm), whole_logits(llm)) < 1e-5


@pytest.mark.parametrize("family", DELTA)
def test_states_behind_several_chunks_are_kept(family: str) -> None:
    llm = text_model(family).eval().llm
    lengths = [70, 3, 140]
    assert relative_error(cached_logits(llm, lengths), whole_logits(llm, lengths)) < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "qwen3_5"])
def test_shifted_positions_are_noticed(family: str) -> None:
    """Control of the comparison above; what comes first is not shifted."""
    llm = text_model(family).eval().llm
    found, wanted = cached_logits(llm, shift=1), whole_logits(llm)
    assert relative_error(found[:, 0], wanted[:, 0]) < 1e-5
    assert relative_error(found[:, 1:], wanted[:, 1:]) > 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "deepseek_v3"])
def test_keys_that_no_prompt_has_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: zeros in front of the shorter prompts are seen."""
    llm = text_model(family).eval().llm
    wanted = whole_logits(llm)
    monkeypatch.setattr(PackedCache, "visible", lambda *_: None)
    assert relative_error(cached_logits(llm), wanted) > 1e-4


def test_a_row_of_other_prompts_is_refused() -> None:
    llm = text_model("llama").llm
    cache = llm.new_cache()
    llm.logits(row_of(torch.arange(3, 8), [0, 2, 5]), {}, torch.tensor([1, 4]), cache)
    with pytest.raises(ValueError, match=r"\[1\] tokens for a cache of 2 prompts"):
        llm.logits(row_of(torch.tensor([3]), [0, 1]), {}, torch.tensor([0]), cache)
