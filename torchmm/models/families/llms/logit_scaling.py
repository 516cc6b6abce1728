"""LLMs that change their logits before or after the head."""

from __future__ import annotations

import json
from functools import lru_cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from torchmm.models.families.introspection import randomize
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.small_configs import small_llm_config

_LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "dim_model_base")
"""Settings to name in the message; the copy decides whether logits differ."""


def describe_logit_change(
    config: PreTrainedConfig, family: LlmFamily, *, caps: bool = False
) -> str:
    """Return a description of changes to logits before or after the head, or "".

    Multimodal Hugging Face classes have a separate head and omit such a change. A small random copy
    of the LLM shows it, because it depends on settings as well as on the class.

    Args:
        config: Config of the causal LM.
        family: Family with the names of the parts.
        caps: Whether the multimodal class applies `final_logit_softcapping` itself.
    """
    settings = config.to_dict()
    values = {key: settings[key] for key in _LOGIT_KEYS if settings.get(key) not in (None, 1)}
    names = family.text_model, family.layers, family.head
    if getattr(config, "is_heterogeneous", False):  # no small copy
        return "" if caps else "has layers of different sizes and may cap its logits"
    if not _changes_logits(json.dumps(settings, sort_keys=True, default=str), names, caps):
        return ""
    named = ", ".join(f"{key} = {value}" for key, value in values.items())
    return f"scales or caps its logits ({named})" if named else "scales or caps its logits"


@lru_cache
def _changes_logits(settings: str, names: tuple[str, str, str], caps: bool) -> bool:
    text_model, layers, head = names
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # does not change generators of GPUs
        config = AutoConfig.for_model(**json.loads(settings))
        small = small_llm_config(config, f"{text_model}.{layers}")
        hf_model = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        ).eval()
        randomize(hf_model)
        ids = torch.randint(3, 60, (1, 9))
        hidden = hf_model.get_submodule(text_model)(ids, use_cache=False).last_hidden_state
        expected = hf_model.get_submodule(head)(hidden)
        cap = getattr(small, "final_logit_softcapping", None)
        if caps and cap is not None:
            expected = torch.tanh(expected / cap) * cap
        logits = hf_model(ids, use_cache=False).logits
        return not torch.allclose(logits, expected, rtol=1e-5, atol=1e-6)
