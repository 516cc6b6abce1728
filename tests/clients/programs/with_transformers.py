"""Open exports with transformers, PEFT and TRL, and use them on a chat as documented.

python with_transformers.py JOBS ANSWERS    (both JSON; one process for all models)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    pipeline,
)
from trl import SFTConfig, SFTTrainer


def chat_of(job: dict, answered: bool) -> list[dict[str, Any]]:
    """Return messages with the image in them."""
    if job["picture"] is None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": job["question"]}]
        return (
            [*messages, {"role": "assistant", "content": job["answer"]}] if answered else messages
        )
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": Image.open(job["picture"]).convert("RGB")},
        {"type": "text", "text": job["question"]},
    ]
    messages = [{"role": "user", "content": parts}]
    reply = {"role": "assistant", "content": [{"type": "text", "text": job["answer"]}]}
    return [*messages, reply] if answered else messages


def opened(job: dict) -> tuple[Any, Any]:
    """Return model, and processor or tokenizer, of the automatic classes."""
    has_image = job["picture"] is not None
    kind = AutoModelForImageTextToText if has_image else AutoModelForCausalLM
    model = kind.from_pretrained(job["directory"], attn_implementation="eager")
    processor = (AutoProcessor if has_image else AutoTokenizer).from_pretrained(job["directory"])
    return model, processor


def prepared(job: dict, processor: Any, answered: bool) -> Any:
    """Return the inputs that the processor makes of the chat."""
    return processor.apply_chat_template(
        chat_of(job, answered),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=not answered,
    )


def open_by_classes(job: dict) -> dict:
    """Return ids and loss of the chat, and the text after its question."""
    model, processor = opened(job)
    inputs = prepared(job, processor, answered=True)
    targets = torch.tensor([[-100, *job["targets"][:-1]]])
    result: dict[str, Any] = {"class": type(model).__name__, "ids": inputs["input_ids"][0].tolist()}
    if targets.shape == inputs["input_ids"].shape:
        with torch.no_grad():
            result["loss"] = model(**inputs, labels=targets).loss.item()
    prompt = prepared(job, processor, answered=False)
    written = model.generate(**prompt, **_greedy_settings(job))[0].tolist()
    length = prompt["input_ids"].shape[1]
    return {**result, "prompt_ids": written[:length], "tokens": written[length:]}


def _greedy_settings(job: dict) -> dict[str, Any]:
    unwritten = [] if job["unwritten"] is None else [job["unwritten"]]
    settings: dict[str, Any] = {"do_sample": False, "suppress_tokens": unwritten or None}
    count = job["count"]
    return settings | {"max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None}


def by_pipeline(job: dict) -> dict:
    """Return the text that a pipeline generates after the question."""
    task = "text-generation" if job["picture"] is None else "image-text-to-text"
    pipe = pipeline(task, model=job["directory"], device="cpu")
    pipe.model.set_attn_implementation("eager")
    pipe.model.generation_config.eos_token_id = None
    settings = _greedy_settings(job)
    if task == "text-generation":
        (result,) = pipe(chat_of(job, answered=False), return_full_text=False, **settings)
    else:
        (result,) = pipe(
            text=chat_of(job, answered=False), return_full_text=False, generate_kwargs=settings
        )
    return {"text": result["generated_text"]}


def by_trl(job: dict) -> dict:
    """Return the loss of one step of the trainer for supervised fine-tuning."""
    model, processor = opened(job)
    row: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": job["question"]},
            {"role": "assistant", "content": job["answer"]},
        ]
    }
    if job["picture"] is not None:
        row["images"] = [Image.open(job["picture"]).convert("RGB")]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    experts = hasattr(model.config.get_text_config(), "router_aux_loss_coef")
    with tempfile.TemporaryDirectory() as scratch:
        settings = SFTConfig(
            output_dir=scratch,
            max_steps=1,
            per_device_train_batch_size=1,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            assistant_only_loss=True,
            router_aux_loss_coef=0.0 if experts else None,
            max_length=None,
            save_strategy="no",
            learning_rate=1e-3,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = SFTTrainer(
            model=model,
            args=settings,
            train_dataset=datasets.Dataset.from_list([row]),
            processing_class=processor,
        )
        trainer.train()
    moved = sum(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    return {"loss": trainer.state.log_history[0]["loss"], "moved": moved}


def by_peft(job: dict) -> dict:
    """Add LoRA to the export and return its initial loss, which is that of the export."""
    model, processor = opened(job)
    inputs = prepared(job, processor, answered=True)
    targets = torch.tensor([[-100, *job["targets"][:-1]]])
    llm = r".*language_model.*|.*text_model.*|model\.layers.*"
    settings = LoraConfig(r=2, target_modules=rf"({llm})[qv]_proj")
    adapted = get_peft_model(model, settings)
    loss = adapted(**inputs, labels=targets).loss
    loss.backward()
    learning = [name for name, p in adapted.named_parameters() if p.grad is not None]
    adapters = sum(".lora_" in name for name in learning)
    return {"loss": loss.item(), "adapters": adapters, "learning": len(learning)}


def with_our_adapter(job: dict) -> dict:
    """Return the loss with an adapter of a training run on its base model."""
    if "adapter" not in job:
        return {}
    model, processor = opened(job)
    adapted = PeftModel.from_pretrained(model, job["adapter"])
    inputs = prepared(job, processor, answered=True)
    targets = torch.tensor([[-100, *job["targets"][:-1]]])
    with torch.no_grad():
        return {"loss": adapted(**inputs, labels=targets).loss.item()}


USES: dict[str, Callable[[dict], dict]] = {
    "transformers": open_by_classes,
    "pipeline": by_pipeline,
    "trl": by_trl,
    "peft": by_peft,
    "adapter": with_our_adapter,
}


def main() -> None:
    """Run all jobs. Errors are part of the answers."""
    answers: dict[str, dict[str, dict]] = {}
    uses = sys.argv[3:] or list(USES)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        for use in uses:
            try:
                result = USES[use](job)
            except Exception as error:  # of another program; the test reports it
                result = {"error": f"{type(error).__name__}: {error}"}
            answers.setdefault(use, {})[job["family"]] = result
    versions = {name: version(name) for name in ("transformers", "peft", "trl")}
    Path(sys.argv[2]).write_text(json.dumps({"versions": versions, "answers": answers}))


if __name__ == "__main__":
    main()
