"""Other programs as sides: a plain Hugging Face loop and TRL's SFTTrainer.

The loop has float32 parameters, bf16 by autocast, sdpa attention on padded samples, gradient
clipping and one fused AdamW. Variants compile each layer, use the layers and the loss of
liger-kernel, and pack samples, with torchmm's attention function in place of flash-attn.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlavaForConditionalGeneration,
)

from support.captions import load_captions
from support.one_gpu.ours import draw
from torchmm.common.batch import IGNORE_TARGET, Microbatch
from torchmm.data.loader import StepBatch
from torchmm.models.hf.export import hf_name, hf_prefixes
from torchmm.models.layers.attention import Segments, attention
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.recipe import Recipe

Inputs = dict[str, Any]
PACKED = "packed_autocast"


def packed_autocast(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Run torchmm's packed attention in the dtype of autocast, as sdpa does."""
    return attention(module, query.to(value.dtype), key.to(value.dtype), value, *args, **kwargs)


AttentionInterface.register(PACKED, packed_autocast)


@dataclass(frozen=True)
class Variant:
    """Settings of a training loop that torchmm is compared with.

    Attributes:
        passes: forward passes per microbatch; more need less memory.
        trl: whether TRL's trainer runs the steps.
    """

    name: str
    compiled: bool = False
    packed: bool = False
    liger: bool = False
    trl: bool = False
    passes: int = 1

    @property
    def missing(self) -> str:
        """Return the name of a package that is needed and not installed, or nothing."""
        for needed, package in ((self.liger, "liger_kernel"), (self.trl, "trl")):
            if needed and not is_importable(package):
                return package
        return ""


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("HF compiled", compiled=True),
        Variant("HF compiled, packed, liger-kernel", compiled=True, packed=True, liger=True),
        Variant("HF compiled, packed", compiled=True, packed=True),
        Variant("HF eager"),
        Variant("TRL", trl=True),
    )
}


def is_importable(package: str) -> bool:
    """Return True if a package can be imported."""
    try:
        import_module(package)
    except ImportError:
        return False
    return True


class HfSide:
    """Hugging Face's model of a recipe in a plain loop. See `steps.Side`.

    Args:
        original: the model of the recipe on the meta device, which has the names of the weights.
        flops: model FLOPs of each batch.
        backend: backend of torch.compile.
    """

    def __init__(
        self,
        recipe: Recipe,
        original: MultimodalModel,
        batches: Sequence[StepBatch],
        flops: list[float],
        device: torch.device,
        variant: Variant,
        backend: str = "inductor",
    ) -> None:
        self.device, self.flops, self.wait_s = device, flops, 0.0
        self.tokens = [sum(m.meta.used_tokens for m in b.microbatches) for b in batches]
        self.bf16 = recipe.training.dtype == "bfloat16"
        self.max_grad_norm = recipe.optimizer.max_grad_norm
        # Liger-kernel also replaces globals of transformers, which torchmm's layers use.
        self._globals = _saved_globals() if variant.liger else None
        self.model = _build_model(original, device, variant, backend)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.optimizer.lr, betas=(0.9, 0.95),
            weight_decay=recipe.optimizer.weight_decay, fused=True,
        )  # fmt: skip
        make = _packed_inputs if variant.packed else _padded_inputs
        self.batches = [
            [
                group
                for microbatch in batch.microbatches
                for group in make(microbatch, variant.passes, device)
            ]
            for batch in batches
        ]
        self.targets = [sum(m.target_count for m in b.microbatches) for b in batches]

    def step(self, index: int) -> float:
        """Run a training step with batch `index` and return its loss."""
        losses = [
            self.backward(inputs, self.targets[index], len(self.batches[index]))
            for inputs in self.batches[index]
        ]
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        begin_s = time.perf_counter()
        loss = float(torch.stack(losses).sum())
        self.wait_s += time.perf_counter() - begin_s
        return loss

    def backward(self, inputs: Inputs, targets: int, _: int) -> Tensor:
        """Add the gradients of one forward pass and return its part of the loss."""
        moved = {
            key: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for key, value in inputs.items()
        }
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            output = self.model(**moved, use_cache=False, num_items_in_batch=targets)
        output.loss.backward()
        return output.loss.detach()

    def clip(self) -> None:
        """Apply gradient clipping."""
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)

    def close(self) -> None:
        """Free the model and restore the functions that liger-kernel replaced."""
        del self.model, self.optimizer, self.batches
        if self._globals is not None:
            _restore_globals(self._globals)


class TrlSide(HfSide):
    """The same model in TRL's SFTTrainer: its training step, clipping and optimizer.

    Args:
        folder: directory for the files of the trainer.
    """

    def __init__(self, *args: Any, folder: Path) -> None:
        super().__init__(*args)
        trl, datasets = import_module("trl"), import_module("datasets")
        config = trl.SFTConfig(
            output_dir=str(folder / "trl"), max_grad_norm=self.max_grad_norm, bf16=self.bf16,
            use_cpu=self.device.type == "cpu", report_to="none", max_length=None,
            gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        self.trainer = trl.SFTTrainer(
            self.model,
            config,
            # Batches are passed to each step; the trainer only needs an example of the columns.
            train_dataset=datasets.Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]}),
            data_collator=torch.utils.data.default_collate,
            processing_class=load_captions(0).tokenizer,
            optimizers=(self.optimizer, None),
        )
        accelerator = self.trainer.accelerator
        self.model, self.optimizer = accelerator.prepare(self.trainer.model, self.optimizer)
        self.model.train()

    def close(self) -> None:
        """Free the model."""
        del self.trainer
        super().close()

    def backward(self, inputs: Inputs, targets: int, passes: int) -> Tensor:
        """Run the training step of the trainer."""
        self.trainer.current_gradient_accumulation_steps = passes
        count = torch.tensor(targets, device=self.device)
        return self.trainer.training_step(self.model, dict(inputs), num_items_in_batch=count)

    def clip(self) -> None:
        """Apply gradient clipping."""
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)


def _build_model(
    original: MultimodalModel, device: torch.device, variant: Variant, backend: str
) -> Any:
    """Return Hugging Face's model with the weights that torchmm draws."""
    model = _empty_model(original, device)
    prefixes = hf_prefixes(original)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in original.named_modality_modules():
        copies = module.tied_replicas()
        for name, _ in module.named_parameters():
            theirs = hf_name(prefixes, module.name, name)
            if theirs in parameters:
                draw(parameters[theirs], f"{prefix}.{copies.get(name, name)}")
    if variant.packed:
        model.config.get_text_config()._attn_implementation = PACKED
    if variant.liger:
        import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)
    lists = [m for n, m in model.named_modules() if n.endswith("layers")]
    for layer in (layer for layers in lists if variant.compiled for layer in layers):
        layer.compile(backend=backend)
    return model.train()


def _empty_model(original: MultimodalModel, device: torch.device) -> Any:
    """Return Hugging Face's model; its buffers are filled."""
    settings: Any = {"attn_implementation": "sdpa", "dtype": torch.float32}
    with torch.device(device):
        if original.composite is None:
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(original.llm.text_config), **settings
            )
        config = copy.deepcopy(original.composite)
        model = LlavaForConditionalGeneration._from_config(config, **settings)
    for module in model.model.vision_tower.modules():
        if hasattr(module, "use_head"):
            module.use_head = False  # no LLaVA model reads it
    return model


def _samples(microbatch: Microbatch) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield ids, labels and pixels of each sample."""
    pixels = next((e.pixels for e in microbatch.encoders.values()), None)
    image = 0
    samples = microbatch.meta.samples
    for sample, (start, stop) in zip(samples, pairwise(microbatch.cu_seqlens), strict=False):
        ids_S = microbatch.input_ids_T[start:stop]
        labels_S = torch.full_like(ids_S, IGNORE_TARGET)
        labels_S[1:] = microbatch.targets_T[start : stop - 1]
        count = len(sample.images)
        own = None if pixels is None else pixels[image : image + count]
        image += count
        yield ids_S, labels_S, own


def _groups(microbatch: Microbatch, passes: int) -> Iterator[Sequence[Any]]:
    samples = list(_samples(microbatch))
    size = -(-len(samples) // passes)
    yield from (samples[i : i + size] for i in range(0, len(samples), size))


def _pixels(group: Sequence[Any]) -> Inputs:
    own = [pixels for *_, pixels in group if pixels is not None]
    return {"pixel_values": torch.cat(own)} if own else {}


def _padded_inputs(microbatch: Microbatch, passes: int, device: torch.device) -> Iterator[Inputs]:
    pad = nn.utils.rnn.pad_sequence
    for group in _groups(microbatch, passes):
        ids = [ids_S for ids_S, *_ in group]
        padded = {
            "input_ids": pad(ids, batch_first=True),
            "labels": pad([n for _, n, _ in group], batch_first=True, padding_value=IGNORE_TARGET),
            "attention_mask": pad([torch.ones_like(i) for i in ids], batch_first=True),
            **_pixels(group),
        }
        yield _pinned(padded, device)


def _packed_inputs(microbatch: Microbatch, passes: int, device: torch.device) -> Iterator[Inputs]:
    for group in _groups(microbatch, passes):
        lengths = [len(ids_S) for ids_S, *_ in group]
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        packed = {
            "input_ids": torch.cat([ids_S for ids_S, *_ in group])[None],
            "labels": torch.cat([labels_S for _, labels_S, _ in group])[None],
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
            **_pixels(group),
        }
        yield _pinned(packed, device) | {"cu_seq_lens_q": Segments.from_starts(starts, device)}


def _pinned(inputs: Inputs, device: torch.device) -> Inputs:
    if device.type != "cuda":
        return inputs
    return {key: value.pin_memory() for key, value in inputs.items()}


Saved = list[tuple[Any, dict[str, Any]]]


def _saved_globals() -> Saved:
    """Return the names of all modeling modules of transformers, and of the classes in them."""
    found: Saved = []
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            classes = [v for v in vars(module).values() if isinstance(v, type)]
            own = [c for c in classes if c.__module__ == name]
            found += [(owner, dict(vars(owner))) for owner in (module, *own)]
    return found


def _restore_globals(saved: Saved) -> None:
    for owner, values in saved:
        for key, value in values.items():
            if vars(owner).get(key) is not value:
                setattr(owner, key, value)


def smaller(variant: Variant) -> Variant:
    """Return the variant with half of the samples per forward pass."""
    return replace(variant, passes=2 * variant.passes)
