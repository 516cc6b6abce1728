"""Run one step of TRL's DPOTrainer on preference pairs, with an export as the reference model.

python with_dpo.py JOBS ANSWERS    (both JSON)
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import DPOConfig, DPOTrainer


def opened(directory: str) -> Any:
    """Return the model of an export."""
    return AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")


def message(role: str, text: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": text}]}]


def row(pair: dict) -> dict[str, Any]:
    """Return a pair as a row of TRL, with an image in the prompt."""
    prompt = message("user", pair["question"])
    prompt[0]["content"].insert(0, {"type": "image", "text": None})
    return {
        "images": [Image.open(pair["image"]).convert("RGB")],
        "prompt": prompt,
        "chosen": message("assistant", pair["chosen"]),
        "rejected": message("assistant", pair["rejected"]),
    }


def step(job: dict) -> dict:
    """Return loss, gradient norm and rewards of the first step."""
    rows = [row(pair) for pair in job["pairs"]]
    with tempfile.TemporaryDirectory() as scratch:
        settings = DPOConfig(
            output_dir=scratch,
            max_steps=1,
            per_device_train_batch_size=len(rows),
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=None,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            beta=job["beta"],
            loss_type=[job["loss_type"]],
        )
        trainer = DPOTrainer(
            model=opened(job["directory"]),
            ref_model=opened(job["reference"]),
            args=settings,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=AutoProcessor.from_pretrained(job["directory"]),
        )
        trainer.train()
    log = trainer.state.log_history[0]
    names = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/accuracies")
    return {name: float(log[name]) for name in names}


def main() -> None:
    """Run all jobs. Errors are part of the answers."""
    answers: dict[str, dict] = {}
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            answers[job["family"]] = step(job)
        except Exception as error:  # of another program; the test reports it
            answers[job["family"]] = {"error": f"{type(error).__name__}: {error}"}
    result = {"versions": {"trl": version("trl")}, "answers": {"dpo": answers}}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
