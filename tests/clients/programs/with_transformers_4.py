"""Open exports with transformers 4 and compare logits with those of torchmm.

python with_transformers_4.py JOBS ANSWERS    (both JSON; one process for all models)
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer


def logits_error(job: dict) -> dict[str, Any]:
    """Return the relative error of the logits, or the class that this version does not have."""
    settings = json.loads((Path(job["directory"]) / "config.json").read_text())
    (name,) = settings["architectures"]
    kind = getattr(transformers, name, None)
    if kind is None:
        return {"missing": name}
    model, info = kind.from_pretrained(
        job["directory"], attn_implementation="eager", output_loading_info=True
    )
    accepted = inspect.signature(model.forward).parameters
    saved = torch.load(job["inputs"], weights_only=True)
    errors = []
    for sample, expected in zip(saved["samples"], saved["logits"], strict=True):
        inputs = {key: value for key, value in sample.items() if key in accepted}
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        errors.append(((logits - expected).norm() / expected.norm()).item())
    return {
        "error_of_logits": max(errors),
        "dtype": str(model.dtype),
        "missing_keys": sorted(info["missing_keys"]),
        "unexpected_keys": sorted(info["unexpected_keys"]),
    }


def token_ids(job: dict) -> dict[str, Any]:
    """Return the ids of texts and the special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(job["directory"])
    rendered = None
    if tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(job["messages"], tokenize=False)
    return {
        "ids": [tokenizer(text).input_ids for text in job["texts"]],
        "special": sorted(tokenizer.all_special_tokens),
        "eos": tokenizer.eos_token_id,
        "length": len(tokenizer),
        "rendered": rendered,
    }


def main() -> None:
    """Run all jobs. Errors are part of the answers."""
    answers: dict[str, dict] = {}
    for job in json.loads(Path(sys.argv[1]).read_text()):
        use = token_ids if "texts" in job else logits_error
        try:
            answers[job["family"]] = use(job)
        except Exception as error:  # of another program; the test reports it
            answers[job["family"]] = {"error": f"{type(error).__name__}: {error}"}
    versions = {"transformers": transformers.__version__}
    Path(sys.argv[2]).write_text(json.dumps({"versions": versions, "answers": answers}))


if __name__ == "__main__":
    main()
