"""transformers, PEFT and TRL: open exports, and use them on a chat as their documents say.

python with_transformers.py JOBS ANSWERS    (both JSON; one process, a model after the other)
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
    """Messages, with the picture in them."""
    if job["picture"] is None:
        said: list[dict[str, Any]] = [{"role": "user", "content": job["question"]}]
        return [*said, {"role": "assistant", "content": job["answer"]}] if answered else said
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": Image.open(job["picture"]).convert("RGB")},
        {"type": "text", "text": job["question"]},
    ]
    said = [{"role": "user", "content": parts}]
    reply = {"role": "assistant", "content": [{"type": "text", "text": job["answer"]}]}
    return [*said, reply] if answered else said


def opened(job: dict) -> tuple[Any, Any]:
    """Model, and processor or tokenizer, by the automatic classes."""
    seen = job["picture"] is not None
    kind = AutoModelForImageTextToText if seen else AutoModelForCausalLM
    model = kind.from_pretrained(job["directory"], attn_implementation="eager")
    processor = (AutoProcessor if seen else AutoTokenizer).from_pretrained(job["directory"])
    return model, processor


def prepared(job: dict, processor: Any, answered: bool) -> Any:
    """Inputs that the processor makes of the chat."""
    return processor.apply_chat_template(
        chat_of(job, answered),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=not answered,
    )


def open_by_classes(job: dict) -> dict:
    """Ids and loss of the chat, and the text after its question."""
    model, processor = opened(job)
    inputs = prepared(job, processor, answered=True)
    targets = torch.tensor([[-100, *job["targets"][:-1]]])
    found: dict[str, Any] = {"class": type(model).__name__, "ids": inputs["input_ids"][0].tolist()}
    if targets.shape == inputs["input_ids"].shape:
        with torch.no_grad():
            found["loss"] = model(**inputs, labels=targets).loss.item()
    prompt = prepared(job, processor, answered=False)
    written = model.generate(**prompt, **_likeliest(job))[0].tolist()
    length = prompt["input_ids"].shape[1]
    return {**found, "prompt_ids": written[:length], "tokens": written[length:]}


def _likeliest(job: dict) -> dict[str, Any]:
    unwritten = [] if job["unwritten"] is None else [job["unwritten"]]
    settings: dict[str, Any] = {"do_sample": False, "suppress_tokens": unwritten or None}
    count = job["count"]
    return settings | {"max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None}


def by_pipeline(job: dict) -> dict:
    """The text that a pipeline writes after the question."""
    task = "text-generation" if job["picture"] is None else "image-text-to-text"
    pipe = pipeline(task, model=job["directory"], device="cpu")
    pipe.model.set_attn_implementation("eager")
    pipe.model.generation_config.eos_token_id = None
    settings = _likeliest(job)
    if task == "text-generation":
        (found,) = pipe(chat_of(job, answered=False), return_full_text=False, **settings)
    else:
        (found,) = pipe(
            text=chat_of(job, answered=False), return_full_text=False, generate_kwargs=settings
        )
    return {"text": found["generated_text"]}


def by_trl(job: dict) -> dict:
    """The loss of one step of its trainer for supervised fine-tuning."""
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
    """LoRA on the export: the loss is that of the export, until an adapter learns."""
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
    """An adapter that a run exported, on the model that it began with."""
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
    """All jobs; what fails is an answer, too."""
    answers: dict[str, dict[str, dict]] = {}
    uses = sys.argv[3:] or list(USES)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        for use in uses:
            try:
                found = USES[use](job)
            except Exception as error:  # of a foreign program: the test says it
                found = {"error": f"{type(error).__name__}: {error}"}
            answers.setdefault(use, {})[job["family"]] = found
    versions = {name: version(name) for name in ("transformers", "peft", "trl")}
    Path(sys.argv[2]).write_text(json.dumps({"versions": versions, "answers": answers}))


if __name__ == "__main__":
    main()
