"""Greedy text after a prompt, by torchmm with its cache and by Hugging Face."""

from dataclasses import replace

import torch
from model_cases import IMAGE_TOKEN_ID
from transformers import PreTrainedModel

from torchmm.common.batch import IGNORE_TARGET, Microbatch
from torchmm.models.layers.kv_cache import next_token_sequence
from torchmm.models.multimodal import MultimodalModel

TOKENS = 12


@torch.no_grad()
def written(
    model: MultimodalModel, prompt: Microbatch, unwritten: int = IMAGE_TOKEN_ID
) -> list[int]:
    """Return tokens that torchmm generates after `prompt`, except the image token `unwritten`."""
    row, ids, cache = prompt, [], model.llm.new_cache()
    features = model.encode(prompt)
    for _ in range(TOKENS):
        last = torch.tensor([row.input_ids_T.numel() - 1])
        logits_1V = model.llm.logits(row, features, last, cache)
        logits_1V[:, unwritten] = -torch.inf
        token_1 = logits_1V.argmax(-1)
        ids.append(int(token_1))
        row, features = next_token_sequence(row, token_1), {}
    return ids


def written_by(plain: PreTrainedModel, sample: dict, unwritten: int = IMAGE_TOKEN_ID) -> list[int]:
    """Return tokens that the model of Hugging Face generates after `sample`."""
    settings = {"do_sample": False, "min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
    sample = {**sample, "attention_mask": torch.ones_like(sample["input_ids"])}
    settings |= {"eos_token_id": None, "pad_token_id": 0, "suppress_tokens": [unwritten]}
    ids = plain.generate(**sample, **settings)
    return ids[0, sample["input_ids"].shape[1] :].tolist()


def as_prompt(sample: Microbatch) -> Microbatch:
    nothing_T = torch.full_like(sample.targets_T, IGNORE_TARGET)
    return replace(sample, targets_T=nothing_T, target_positions_L=None)
