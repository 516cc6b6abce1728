"""What an exported model writes for held-out samples.

    texts = write_texts(Export.read(Path("outputs/mine/hf")), data, training, settings)

Prompts are those of training: the loader's token ids, not a template's. Hugging Face's `generate`
continues them, many at a time, with pixels of the export's own processor; so what is scored is what
others will load. Exports that have no Hugging Face class, and samples with sounds or clips, are
continued by torchmm's own generation, as in a run.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from torchmm.common.batch import Microbatch
from torchmm.common.errors import ConfigError
from torchmm.data.build import build_loader
from torchmm.data.loader import Loader
from torchmm.data.tokenizer import read_tokenizer
from torchmm.extensions.evaluation.samples import (
    GeneratedText,
    generate_samples,
    generated_text,
    held_out_prompts,
    scored_sources,
    with_references,
)
from torchmm.extensions.evaluation.text.prompts import Prompt
from torchmm.models.families.composites.table import COMPOSITES
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.registry import build_model
from torchmm.parallel.mesh import build_mesh, select_device, start_process_group
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.model_section import PARTS_FILE, FreezeConfig, LlmConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import TrainingConfig
from torchmm.training.pipeline import whole_pipeline


@dataclass(frozen=True)
class Export:
    """A directory that a run or `scripts/export.py` has written.

    Attributes:
        model: `[model]` of a recipe that goes on from it.
        tokenizer: its directory.
        kind: Hugging Face's class of the whole; None: there is none.
    """

    directory: Path
    model: ModelConfig
    tokenizer: Path
    kind: str | None

    @classmethod
    def read(cls, directory: Path) -> Export:
        """Return the contents of an export, without weights.

        Raises:
            ConfigError: The directory is not an export.
        """
        model = ModelConfig(source=str(directory))
        if not model.is_composite:
            return cls(directory, model, directory / "llm", None)
        config = directory / "config.json"
        if not config.is_file():
            raise ConfigError(
                f"{directory} is no export: it has neither config.json nor {PARTS_FILE}; a run "
                "writes one at its end, `torchmm export` writes one of a checkpoint"
            )
        settings = json.loads(config.read_text())
        (kind,) = settings["architectures"]
        if settings["model_type"] not in COMPOSITES:
            model = ModelConfig(llm=LlmConfig(source=str(directory)))
        return cls(directory, model, directory, kind)


class Writing(NamedTuple):
    """How much is written.

    Attributes:
        samples: that texts are written for, at most.
        max_new_tokens: of a text.
        batch_size: samples that are continued together.
    """

    samples: int
    max_new_tokens: int = 32
    batch_size: int = 8


def write_texts(
    export: Export, data: DataConfig, training: TrainingConfig, writing: Writing
) -> list[GeneratedText]:
    """Texts for the first samples of `data.validation`, in the order of a run's validation;
    of sources without scores for those with pictures or sounds. Starts a process group of this
    process alone.

    Raises:
        ConfigError, DataError: the export or a source cannot be read, or do not fit.
    """
    tokenizer = read_tokenizer(f"tokenizer of {export.tokenizer}", export.tokenizer)
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
    scored = scored_sources(data.validation)
    prompts = list(held_out_prompts(loader, writing.samples, scored))
    images = all(encoder.family.modality == "image" for encoder in model.encoder_modules())
    clips = any(image.duration_ms for prompt in prompts for image in prompt.sample.images)
    if export.kind is None or clips or not images:
        texts = _by_torchmm(model, prompts, tokenizer, writing.max_new_tokens)
    else:
        texts = _by_hugging_face(export, prompts, loader, tokenizer, writing)
    return with_references(texts, loader)


def _by_hugging_face(
    export: Export,
    prompts: Sequence[Prompt],
    loader: Loader,
    tokenizer: PreTrainedTokenizerBase,
    writing: Writing,
) -> list[GeneratedText]:
    """In the order of the prompts; those with pictures and those without are never together."""
    device = select_device("auto")
    kind: Any = getattr(transformers, str(export.kind))
    model = kind.from_pretrained(export.directory, dtype="auto").to(device).eval()
    ends = _ends(model.generation_config, tokenizer)
    ends = ends.union(*(prompt.own_ends(tokenizer) for prompt in prompts))
    found: dict[int, GeneratedText] = {}
    for shows in (True, False):
        places = [i for i, prompt in enumerate(prompts) if bool(prompt.row.encoders) == shows]
        pictures_of = _image_processor(export.directory) if shows and places else None
        for first in range(0, len(places), writing.batch_size):
            now = places[first : first + writing.batch_size]
            together = [prompts[place] for place in now]
            inputs = _padded([prompt.row for prompt in together], _padding(tokenizer, ends))
            if pictures_of is not None:
                samples = [prompt.sample for prompt in together]
                pictures = [loader.images(sample.source, sample.index) for sample in samples]
                inputs |= pictures_of(images=pictures, return_tensors="pt")
            written = _continued(model, inputs, tokenizer, ends, writing.max_new_tokens)
            for place, prompt, new_ids in zip(now, together, written, strict=True):
                found[place] = generated_text(prompt, new_ids, tokenizer)
    return [found[place] for place in range(len(prompts))]


@torch.no_grad()
def _continued(
    model: Any,
    inputs: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    ends: set[int],
    max_new_tokens: int,
) -> list[list[int]]:
    """New tokens of every row, up to the one that ends it."""
    known = inspect.signature(model.forward).parameters
    moved = {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
        if name in known
    }
    written = model.generate(
        **moved,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=sorted(ends),
        pad_token_id=_padding(tokenizer, ends),
    )
    rows = written[:, inputs["input_ids"].shape[1] :].tolist()
    return [list(takewhile(lambda token: token not in ends, row)) for row in rows]


def _padding(tokenizer: PreTrainedTokenizerBase, ends: set[int]) -> int:
    own = tokenizer.pad_token_id
    return max(ends) if own is None else int(own)


def _image_processor(directory: Path) -> Any:
    """That on Pillow, as training's, where there is one: others need torchvision."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        file = directory / name
        table = json.loads(file.read_text()) if file.is_file() else {}
        kind = table.get("image_processor", table).get("image_processor_type", "")
        found = getattr(transformers, f"{kind.removesuffix('Fast').removesuffix('Pil')}Pil", None)
        if kind and found is not None:
            return found.from_pretrained(directory)
    return AutoImageProcessor.from_pretrained(directory)


def _padded(prompts: Sequence[Microbatch], pad: int) -> dict[str, Tensor]:
    """Token ids, to the right; which of them are there, and which are placeholders of images, by
    both of the names that models have for this."""
    longest = max(len(prompt.input_ids_T) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad)
    there = torch.zeros_like(ids)
    images = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt.input_ids_T)
        ids[row, start:] = prompt.input_ids_T
        there[row, start:] = 1
        for encoder in prompt.encoders.values():
            images[row, start + encoder.positions_K] = 1
    types = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), images)
    return {"input_ids": ids, "attention_mask": there, **types}


def _ends(generation: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end a text."""
    given = generation.eos_token_id
    ends = set(given) if isinstance(given, list) else {given}
    return (ends | {tokenizer.eos_token_id}) - {None}


def _by_torchmm(
    model: MultimodalModel,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
) -> list[GeneratedText]:
    device = select_device("auto")
    start_process_group(ParallelConfig(), device)
    mesh = build_mesh(ParallelConfig(), device)
    materialize(model, device)
    init_weights(model, seed=0, skip=load_weights(model))
    pipeline = whole_pipeline(model.eval(), mesh, torch.float32)
    return generate_samples(pipeline, prompts, tokenizer, mesh, max_new_tokens)
