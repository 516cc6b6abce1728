"""A trained model, to write with on this machine: from a run, a checkpoint or an export.

writer = open_writer(Path("outputs/mine"))
for texts in writer.write(requests, sampling): ...
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from torchmm.common.errors import LIBRARY_ERRORS, CheckpointError, ConfigError, describe_error
from torchmm.common.log import working
from torchmm.data.sources.open import has_chats
from torchmm.data.tokenizer import load_tokenizer, read_tokenizer
from torchmm.extensions.evaluation.exported import Export
from torchmm.extensions.evaluation.text.generate import OnTokens, generate_tokens
from torchmm.extensions.evaluation.text.prompts import Request, read_prompts
from torchmm.extensions.evaluation.text.sampling import Sampling
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.registry import build_model
from torchmm.parallel.mesh import ParallelMesh, build_mesh, select_device, start_process_group
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.model_section import FreezeConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.checkpoint.manifest import checkpoints_at, find_problems
from torchmm.training.exports.checkpoint import CheckpointWeights, recipe_of
from torchmm.training.exports.write import is_chat_model
from torchmm.training.pipeline import Pipeline, whole_pipeline


@dataclass(frozen=True)
class Writer:
    """A model on this machine's device, and what it takes to write with it."""

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
        """The texts, in the order of the requests.

        Args:
            together: texts that are written at the same time.
            on_tokens: gets tokens as they are written, numbered within those at the same time.

        Raises:
            ConfigError, DataError: a request cannot be read.
        """
        with working("preparing prompts"):
            prompts = read_prompts(requests, self.model, self.tokenizer, max_prompt_tokens)
        for first in range(0, len(prompts), together):
            now = prompts[first : first + together]
            rows = [prompt.row for prompt in now]
            ends = [self.ends | prompt.own_ends(self.tokenizer) for prompt in now]
            for ids in generate_tokens(
                self.pipeline, rows, self.mesh, sampling, ends, on_tokens, first
            ):
                yield str(self.tokenizer.decode(ids, skip_special_tokens=True))


def open_writer(path: Path, dtype: torch.dtype = torch.float32, averaged: bool = False) -> Writer:
    """Opens what lies at a path; starts a process group of this process alone.

    Args:
        path: of an export, a checkpoint or a run, whose newest checkpoint is taken, or its export
            if it has none.
        dtype: to compute in.
        averaged: whether weights are those averaged over steps, of a checkpoint that has them.

    Raises:
        ConfigError, CheckpointError: there is no model, or it cannot be read.
    """
    device = select_device("auto")
    exported = [place for place in (path, path / "hf") if _is_export(place)]
    checkpoints = [] if exported[:1] == [path] else checkpoints_at(path)
    if checkpoints:
        model, tokenizer = _from_checkpoint(checkpoints[0], device, dtype, averaged)
        ends: set[int] = set()
    elif exported:
        if averaged:
            raise ConfigError(
                f"{exported[0]} is an export, whose weights are what they are; name a checkpoint, "
                "or an export of averaged weights"
            )
        model, tokenizer, ends = _from_export(exported[0], device, dtype)
    else:
        raise ConfigError(
            f"{path} is no run, checkpoint or export: it has neither config.json nor checkpoints"
        )
    start_process_group(ParallelConfig(), device)
    mesh = build_mesh(ParallelConfig(), device)
    pipeline = whole_pipeline(model.eval(), mesh, dtype)
    every = ends | {tokenizer.eos_token_id}
    return Writer(model, pipeline, tokenizer, mesh, frozenset(every - {None}))


def answers_chats(path: Path) -> bool:
    """Return whether the model at a path was trained on chats only.

    Args:
        path: Export, checkpoint or run, as in `open_writer`.
    """
    if _is_export(path):
        return is_chat_model(path)
    if checkpoints := checkpoints_at(path):
        data = recipe_of(checkpoints[0]).data
        return {has_chats(source, data) for source in data.sources} == {True}
    return is_chat_model(path / "hf")


def _is_export(directory: Path) -> bool:
    try:
        Export.read(directory)
    except ConfigError:
        return False
    return True


def _from_export(
    directory: Path, device: torch.device, dtype: torch.dtype
) -> tuple[MultimodalModel, PreTrainedTokenizerBase, set[int]]:
    export = Export.read(directory)
    tokenizer = read_tokenizer(f"tokenizer of {export.tokenizer}", export.tokenizer)
    model = build_model(export.model, FreezeConfig(), dtype)
    materialize(model, device)
    init_weights(model, seed=0, skip=load_weights(model))
    ends: set[int] = set()
    if (directory / "generation_config.json").is_file():
        try:
            given: Any = GenerationConfig.from_pretrained(directory).eos_token_id
        except (OSError, *LIBRARY_ERRORS) as error:
            raise ConfigError(
                f"{directory / 'generation_config.json'} cannot be read ({describe_error(error)}); "
                "correct or remove the file"
            ) from error
        ends = set(given) if isinstance(given, list) else {given}
    return model, tokenizer, ends


@torch.no_grad()
def _from_checkpoint(
    path: Path, device: torch.device, dtype: torch.dtype, averaged: bool
) -> tuple[MultimodalModel, PreTrainedTokenizerBase]:
    if problems := find_problems(path):
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems[:3])}")
    recipe = recipe_of(path)
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
