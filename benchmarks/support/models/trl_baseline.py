"""The baseline of TRL: its SFTTrainer on the model, optimizer and batches of `hf_baseline.py`.

Its head and loss read targets only, in tiles. A step is `SFTTrainer.training_step` and the steps of
`Trainer.train` after it, because `train` itself cannot be stopped and timed every few steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from support.models.hf_baseline import PaddedBatch, build_hf_model, build_optimizer
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.recipe import Recipe


@dataclass
class TrlBaseline:
    """A model in TRL's trainer."""

    trainer: SFTTrainer
    model: torch.nn.Module
    optimizer: Any

    def step(self, batch: PaddedBatch) -> float:
        """Run an optimizer step and return the loss before it, in nats per target."""
        loss = self.trainer.training_step(self.model, dict(batch))
        most = self.trainer.args.max_grad_norm
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), most)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def build_baseline(
    recipe: Recipe,
    ours: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    scratch: Path,
) -> TrlBaseline:
    """Return the trainer of TRL with the weights of `ours` and the settings of `recipe`."""
    config = SFTConfig(
        output_dir=str(scratch / "trl"),
        max_grad_norm=recipe.optimizer.max_grad_norm,
        bf16=recipe.training.dtype == "bfloat16",
        activation_checkpointing=recipe.activation_checkpoint.mode != "none",
        use_cpu=device.type == "cpu",
        report_to="none",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
    )
    model = build_hf_model(recipe, ours, device)
    trainer = SFTTrainer(
        model,
        config,
        # Batches are passed step by step; the trainer requires an example of their columns.
        train_dataset=Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]}),
        data_collator=torch.utils.data.default_collate,
        processing_class=tokenizer,
        optimizers=(build_optimizer(model, recipe), None),
    )
    trainer.current_gradient_accumulation_steps = 1  # `train` sets this
    prepared, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    return TrlBaseline(trainer, prepared.train(), optimizer)
