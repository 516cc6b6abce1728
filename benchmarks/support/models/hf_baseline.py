"""The baseline: Hugging Face's LLaVA in a plain training loop, the way Accelerate runs it.

`LlavaForConditionalGeneration` with sdpa attention on padded batches of its processor, labels in,
loss out; bf16 by autocast over float32 parameters; `clip_grad_norm_`; one fused AdamW. Compiling
is per layer, as Accelerate's regional compilation does it: a full-model graph would be compiled
again for every padded length.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration, LlavaProcessor, SiglipImageProcessorPil

from support.captions import IMAGE_TOKEN, Captions
from torchmm.common.batch import IGNORE_TARGET, Microbatch
from torchmm.data.media.images import decode_rgb
from torchmm.models.hf.export import hf_name, hf_prefixes
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.recipe import Recipe

PaddedBatch = dict[str, Tensor]


@dataclass
class HfBaseline:
    """Hugging Face's model with the optimizer of a recipe."""

    model: LlavaForConditionalGeneration
    optimizer: torch.optim.AdamW
    max_grad_norm: float
    device: torch.device
    bf16: bool

    def step(self, batch: PaddedBatch) -> float:
        """Run an optimizer step and return the loss before it, in nats per target."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def build_baseline(recipe: Recipe, ours: MultimodalModel, device: torch.device) -> HfBaseline:
    """Return the model of Hugging Face with the weights of `ours` and the settings of `recipe`."""
    model = build_hf_model(recipe, ours, device)
    if recipe.activation_checkpoint.mode != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = build_optimizer(model, recipe)
    bf16 = recipe.training.dtype == "bfloat16"
    return HfBaseline(model, optimizer, recipe.optimizer.max_grad_norm, device, bf16)


def build_hf_model(
    recipe: Recipe, ours: MultimodalModel, device: torch.device
) -> LlavaForConditionalGeneration:
    """Return the model with the weights of `ours`, frozen and compiled as in `recipe`."""
    with torch.device(device):
        model = LlavaForConditionalGeneration._from_config(
            copy.deepcopy(ours.composite), attn_implementation="sdpa", dtype=torch.float32
        )
    _copy_weights(model, ours)
    model.model.vision_tower.use_head = False  # in the baseline's favour: no LLaVA reads it
    if "llm" in recipe.freeze.modules:
        model.model.language_model.requires_grad_(False)
        model.lm_head.requires_grad_(False)
    if recipe.compile.enabled is True:
        for part in (model.model.vision_tower.encoder, model.model.language_model):
            for layer in part.layers:
                layer.compile()
    return model.train()


def build_optimizer(model: LlavaForConditionalGeneration, recipe: Recipe) -> torch.optim.AdamW:
    """Return the optimizer of all trained parameters."""
    config = recipe.optimizer
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


@torch.no_grad()
def _copy_weights(model: LlavaForConditionalGeneration, ours: MultimodalModel) -> None:
    prefixes = hf_prefixes(ours)
    for module in ours.modality_modules():
        for name, value in module.state_dict().items():
            theirs = hf_name(prefixes, module.name, name)
            assert theirs is not None, name
            full_value = value.full_tensor() if hasattr(value, "full_tensor") else value
            model.get_parameter(theirs).copy_(full_value)


def pad_batch(
    captions: Captions, microbatch: Microbatch, vision: dict, device: torch.device
) -> PaddedBatch:
    """Return the samples of `microbatch` in its order, padded by the processor, as arguments.

    Raises:
        ValueError: The token ids differ from those of `microbatch`.
    """
    tokenizer = captions.tokenizer
    size = {"height": vision["image_size"], "width": vision["image_size"]}
    processor = LlavaProcessor(
        SiglipImageProcessorPil(size=size),
        tokenizer,
        patch_size=vision["patch_size"],
        vision_feature_select_strategy="full",
        image_token=IMAGE_TOKEN,
    )
    records = [captions.records[sample.index] for sample in microbatch.meta.samples]
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    batch = processor(
        images=[decode_rgb(r["image"]["bytes"], 10**9) for r in records],
        text=[f"{begin}{IMAGE_TOKEN}{r['text']}{end}" for r in records],
        add_special_tokens=False,
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    _check_ids(batch, microbatch)
    hidden = (batch["attention_mask"] == 0) | (batch["input_ids"] == processor.image_token_id)
    labels = batch["input_ids"].masked_fill(hidden, IGNORE_TARGET)
    names = ("input_ids", "attention_mask", "pixel_values")
    return {**{n: batch[n].to(device) for n in names}, "labels": labels.to(device)}


def _check_ids(batch: PaddedBatch, microbatch: Microbatch) -> None:
    masks = batch["attention_mask"].bool()
    padded = [ids[mask] for ids, mask in zip(batch["input_ids"], masks, strict=True)]
    packed = [
        microbatch.input_ids_T[start:stop]
        for start, stop in pairwise(microbatch.cu_seqlens)
        if (microbatch.targets_T[start:stop] != IGNORE_TARGET).any()  # else: filling
    ]
    for number, (theirs, ours) in enumerate(zip(padded, packed, strict=True)):
        if not torch.equal(theirs, ours):
            raise ValueError(
                f"sample {number}: ids differ: {theirs.tolist()}, {ours.tolist()} (torchmm)"
            )
