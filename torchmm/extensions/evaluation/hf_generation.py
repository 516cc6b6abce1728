"""Generate text with an exported model for held-out samples, to score it.

    texts = generate_held_out_text(Export.read(Path("outputs/mine/hf")), data, training,
    samples=100)

Prompts are the token ids of training, without an additional chat template. The Hugging Face
`generate` continues them in batches, with pixels of the image processor of the export. The scores
are therefore those of the model that other programs load. If an export has no Hugging Face class,
or if samples have audio or video, torchmm generates the text as it does during a run.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from torchmm.common.batch import Microbatch
from torchmm.data.build import build_loader
from torchmm.data.loader import Loader
from torchmm.extensions.evaluation.samples import GeneratedText, generated_text, held_out_prompts
from torchmm.extensions.evaluation.text.generate import generate_texts
from torchmm.extensions.evaluation.text.load_model import (
    ExportedModel,
    end_tokens,
    load_text_generator,
)
from torchmm.extensions.evaluation.text.prompts import Prompt, batch_prompts
from torchmm.extensions.evaluation.text.sampling import Sampling
from torchmm.models.build import build_model
from torchmm.parallel.mesh import select_device
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.model_section import FreezeConfig
from torchmm.recipe.training_section import TrainingConfig

MAX_BATCH_TOKENS = 8192
"""Maximum number of prompt tokens in one batch of the torchmm generation."""


def generate_held_out_text(
    export: ExportedModel,
    data: DataConfig,
    training: TrainingConfig,
    *,
    samples: int,
    max_new_tokens: int = 32,
    batch_size: int = 8,
) -> list[GeneratedText]:
    """Return text for the first samples of `data.validation`, in validation order.

    Samples without images, audio and video are included if their source sets `metrics`. May start a
    process group with one process.

    Args:
        export: Export to evaluate.
        data: Recipe section `[data]`.
        training: Recipe section `[training]`.
        samples: Maximum number of samples.
        max_new_tokens: Maximum number of generated tokens per sample.
        batch_size: Number of samples in one batch.

    Raises:
        ConfigError, DataError: The export or a source cannot be read, or they do not match.
    """
    tokenizer = export.read_tokenizer()
    model = build_model(export.model, FreezeConfig())
    loader = build_loader(
        data.model_copy(update={"workers": 0}),
        training.model_copy(update={"microbatch_size": 1}),
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
        validation=True,
        **model.sample_specs(tokenizer),
    )
    prompts = list(held_out_prompts(loader, samples, data.validation))
    images = all(encoder.family.modality == "image" for encoder in model.encoder_modules())
    has_video = any(image.duration_ms for prompt in prompts for image in prompt.sample.images)
    if export.kind is None or has_video or not images:
        writer = load_text_generator(export.directory)
        batches = batch_prompts(prompts, batch_size, MAX_BATCH_TOKENS)
        pairs = generate_texts(
            writer.pipeline, batches, tokenizer, writer.mesh, Sampling(max_new_tokens), writer.ends
        )
        written = [ids for _, ids in pairs]
    else:
        written = _generate_with_hugging_face(
            export, prompts, loader, tokenizer, max_new_tokens, batch_size
        )
    return [
        generated_text(prompt, ids, tokenizer, loader)
        for prompt, ids in zip(prompts, written, strict=True)
    ]


@torch.no_grad()
def _generate_with_hugging_face(
    export: ExportedModel,
    prompts: Sequence[Prompt],
    loader: Loader,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    batch_size: int,
) -> list[list[int]]:
    """Return the new tokens of each prompt, without the token that ends the text."""
    model_class: Any = getattr(transformers, str(export.kind))
    model = model_class.from_pretrained(export.directory, dtype="auto")
    model = model.to(select_device("auto")).eval()
    end_ids = set(end_tokens(model.generation_config, tokenizer))
    end_ids = end_ids.union(*(prompt.sample_end_tokens(tokenizer) for prompt in prompts))
    pad = max(end_ids) if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    accepted = inspect.signature(model.forward).parameters
    generated: dict[int, list[int]] = {}
    # A batch has either only prompts with images or only prompts without images.
    for has_images in (True, False):
        numbers = [n for n, prompt in enumerate(prompts) if bool(prompt.row.encoders) == has_images]
        processor = _image_processor(export.directory) if has_images and numbers else None
        for first in range(0, len(numbers), batch_size):
            batch = numbers[first : first + batch_size]
            inputs = _padded([prompts[n].row for n in batch], pad)
            if processor is not None:
                shown = [prompts[n].sample for n in batch]
                images = [loader.images(sample.source, sample.index) for sample in shown]
                inputs |= processor(images=images, return_tensors="pt")
            moved = {
                name: value.to(model.device, model.dtype if value.is_floating_point() else None)
                for name, value in inputs.items()
                if name in accepted
            }
            ids = model.generate(
                **moved,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                eos_token_id=sorted(end_ids),
                pad_token_id=pad,
            )
            new_ids = ids[:, inputs["input_ids"].shape[1] :].tolist()
            for number, token_ids in zip(batch, new_ids, strict=True):
                generated[number] = list(takewhile(lambda token: token not in end_ids, token_ids))
    return [generated[number] for number in range(len(prompts))]


def _image_processor(directory: Path) -> Any:
    """Return the image processor of an export.

    It uses Pillow, as in training, if the class exists. Other processors require torchvision.
    """
    for name in ("processor_config.json", "preprocessor_config.json"):
        file = directory / name
        table = json.loads(file.read_text()) if file.is_file() else {}
        kind = table.get("image_processor", table).get("image_processor_type", "")
        processor_class = getattr(
            transformers, f"{kind.removesuffix('Fast').removesuffix('Pil')}Pil", None
        )
        if kind and processor_class is not None:
            return processor_class.from_pretrained(directory)
    return AutoImageProcessor.from_pretrained(directory)


def _padded(prompts: Sequence[Microbatch], pad: int) -> dict[str, Tensor]:
    """Return left-padded token ids, the attention mask and the mask of image placeholders.

    The mask of image placeholders has both names that models use for it.
    """
    longest = max(len(prompt.input_ids_T) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    images = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt.input_ids_T)
        ids[row, start:] = prompt.input_ids_T
        mask[row, start:] = 1
        for encoder in prompt.encoders.values():
            images[row, start + encoder.positions_K] = 1
    types = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), images)
    return {"input_ids": ids, "attention_mask": mask, **types}
