"""Load a trained model of a run, a checkpoint or an export to generate text on one device.

writer = load_text_generator(Path("outputs/mine"))
for text in writer.write(requests, sampling): ...
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from torchmm.common.errors import LIBRARY_ERRORS, CheckpointError, ConfigError, describe_error
from torchmm.common.log import report_progress
from torchmm.data.sources.open import contains_chats
from torchmm.data.tokenizer import load_tokenizer, read_tokenizer
from torchmm.extensions.evaluation.text.generate import OnTokens, generate_texts
from torchmm.extensions.evaluation.text.prompts import Request, batch_prompts, read_prompts
from torchmm.extensions.evaluation.text.sampling import Sampling
from torchmm.models.build import build_model
from torchmm.models.families.composites.registry import COMPOSITES
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.mesh import ParallelMesh, build_mesh, select_device, start_process_group
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.model_section import COMPONENTS_FILE, FreezeConfig, LlmConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.checkpoint.manifest import checkpoints_at, find_problems
from torchmm.training.export.checkpoint import CheckpointWeights, read_checkpoint_recipe
from torchmm.training.export.model_files import is_chat_model
from torchmm.training.pipeline import Pipeline, unsplit_pipeline


@dataclass(frozen=True)
class ExportedModel:
    """Model and tokenizer of an export, without weights."""

    directory: Path
    model: ModelConfig
    """Recipe section `[model]` that continues from the export."""
    tokenizer: Path
    kind: str | None
    """Hugging Face class of the model. None without a class."""

    @classmethod
    def read(cls, directory: Path) -> ExportedModel:
        """Return the description of an export.

        Raises:
            ConfigError: The directory is not an export.
        """
        model = ModelConfig(source=str(directory))
        if not model.is_composite:
            return cls(directory, model, directory / "llm", None)
        config = directory / "config.json"
        if not config.is_file():
            raise ConfigError(
                f"{directory} is not an export: it has neither config.json nor {COMPONENTS_FILE}. "
                "A run exports its model at the end, and `torchmm export` exports a "
                "checkpoint"
            )
        settings = json.loads(config.read_text())
        (kind,) = settings["architectures"]
        if settings["model_type"] not in COMPOSITES:
            model = ModelConfig(llm=LlmConfig(source=str(directory)))
        return cls(directory, model, directory, kind)

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the export."""
        return read_tokenizer(f"tokenizer of {self.tokenizer}", self.tokenizer)


def is_export(directory: Path) -> bool:
    """Return True if a directory is an export."""
    try:
        ExportedModel.read(directory)
    except ConfigError:
        return False
    return True


def end_tokens(
    generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Return the tokens that end any text.

    Args:
        generation: Generation config of an export.
        tokenizer: Tokenizer of the model.
    """
    configured: Any = None if generation is None else generation.eos_token_id
    end_ids = set(configured) if isinstance(configured, list) else {configured}
    return frozenset((end_ids | {tokenizer.eos_token_id}) - {None})


@dataclass(frozen=True)
class TextGenerator:
    """A trained model on one device, with its tokenizer."""

    model: MultimodalModel
    pipeline: Pipeline
    tokenizer: PreTrainedTokenizerBase
    mesh: ParallelMesh
    ends: frozenset[int]
    """Tokens that end any text."""

    def write(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        together: int = 1,
        max_prompt_tokens: int = 4096,
        on_tokens: OnTokens | None = None,
    ) -> Iterator[str]:
        """Yield the generated text in the order of the requests.

        Args:
            requests: Requests to continue.
            sampling: Decoding settings.
            together: Number of requests in one batch.
            max_prompt_tokens: Maximum length of a prompt.
            on_tokens: Called with new tokens, which have numbers relative to the batch.

        Raises:
            ConfigError, DataError: A request cannot be read.
        """
        with report_progress("preparing prompts"):
            prompts = read_prompts(requests, self.model, self.tokenizer, max_prompt_tokens)
        batches = batch_prompts(prompts, together, together * max_prompt_tokens)
        for _, ids in generate_texts(
            self.pipeline, batches, self.tokenizer, self.mesh, sampling, self.ends, on_tokens
        ):
            yield str(self.tokenizer.decode(ids, skip_special_tokens=True))


def load_text_generator(
    path: Path, dtype: torch.dtype = torch.float32, averaged: bool = False
) -> TextGenerator:
    """Load a model and start a process group with one process.

    Args:
        path: Export, checkpoint or run. A run uses its newest checkpoint, or its export if it has
            no checkpoint.
        dtype: Compute dtype.
        averaged: Whether to use the averaged weights of a checkpoint.

    Raises:
        ConfigError, CheckpointError: The path has no model, or the model cannot be read.
    """
    device = select_device("auto")
    exported = [candidate for candidate in (path, path / "hf") if is_export(candidate)]
    checkpoints = [] if exported[:1] == [path] else checkpoints_at(path)
    generation: GenerationConfig | None = None
    if checkpoints:
        model, tokenizer = _from_checkpoint(checkpoints[0], device, dtype, averaged)
    elif exported:
        directory = exported[0]
        if averaged:
            raise ConfigError(
                f"{directory} is an export with fixed weights; use a checkpoint, or an export "
                "of averaged weights"
            )
        export = ExportedModel.read(directory)
        tokenizer = export.read_tokenizer()
        model = build_model(export.model, FreezeConfig(), dtype)
        materialize(model, device)
        init_weights(model, seed=0, skip=load_weights(model))
        if (directory / "generation_config.json").is_file():
            try:
                generation = GenerationConfig.from_pretrained(directory)
            except (OSError, *LIBRARY_ERRORS) as error:
                raise ConfigError(
                    f"{directory / 'generation_config.json'} cannot be read "
                    f"({describe_error(error)}); correct or remove the file"
                ) from error
    else:
        raise ConfigError(
            f"{path} is not a run, checkpoint or export: it has neither config.json nor checkpoints"
        )
    start_process_group(ParallelConfig(), device)
    mesh = build_mesh(ParallelConfig(), device)
    pipeline = unsplit_pipeline(model.eval(), mesh, dtype)
    return TextGenerator(model, pipeline, tokenizer, mesh, end_tokens(generation, tokenizer))


def is_chat_checkpoint(path: Path) -> bool:
    """Return True if the model at a path was trained only on chats.

    Args:
        path: Export, checkpoint or run, as in `load_text_generator`.
    """
    if is_export(path):
        return is_chat_model(path)
    if checkpoints := checkpoints_at(path):
        data = read_checkpoint_recipe(checkpoints[0]).data
        return {contains_chats(source, data) for source in data.sources} == {True}
    return is_chat_model(path / "hf")


@torch.no_grad()
def _from_checkpoint(
    path: Path, device: torch.device, dtype: torch.dtype, averaged: bool
) -> tuple[MultimodalModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer of a checkpoint.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    if problems := find_problems(path):
        raise CheckpointError(f"{path} is corrupt: {'; '.join(problems[:3])}")
    recipe = read_checkpoint_recipe(path)
    model = recipe_model(recipe, dtype)
    tokenizer = load_tokenizer(recipe.model)
    materialize(model, device)
    filled = set()
    prefixes = {module: prefix for prefix, module in model.named_modality_modules()}
    with tempfile.TemporaryDirectory() as scratch:
        gather = CheckpointWeights(path, Path(scratch), averaged)
        for module, name, value in gather(model, lambda _: True):
            module.state_dict()[name].copy_(value)
            filled.add(f"{prefixes[module]}.{name}")
    init_weights(model, seed=0, skip=filled)
    return model, tokenizer
