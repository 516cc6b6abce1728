"""Causal LMs that no table lists: proof that one may be packed and cut, before it is trained.

A small random copy (`families/llms/structural.py`) does what training does: samples alone and
packed together, the whole model and a pipeline stage for every layer. Logits, loss and the
gradients of all weights have to equal those of the plain Hugging Face model with eager attention,
which sees one sample at a time and knows nothing of ours. This takes seconds, on the CPU, in each
process by itself.

If weights are to be read, files that Hugging Face writes for the copy are read as real ones would
be, and have to give the same bits.

What the copy cannot show is not proven: tensor parallelism (which is refused), and numbers that
only appear with real sizes. Rejected: trusting the names of a class's parts, which says nothing
about what its forward does between them (a second stream of activations from layer to layer,
positions that are added to embeddings)."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as logging_of_transformers

from torchmm.common.batch import IGNORE_TARGET, Microbatch, MicrobatchMeta
from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.llms.structural import copy_config, find_form
from torchmm.models.families.text import TextConventions
from torchmm.models.hf.load import load_weights
from torchmm.models.layered import StageRange, WeightFiles
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import MultimodalModel

TOLERANCE = 1e-5
"""Largest relative difference of float32 results that are the same in exact arithmetic."""
_ALONE = [21]
_PACKED = [5, 9, 9, 4, 2]
_logger = logging.getLogger(__name__)


def adopt(config: PreTrainedConfig, files: WeightFiles) -> LlmFamily:
    """The family of a causal LM that no table lists, after the proof.

    Args:
        files: what its files are called; without a source, reading them is not part of the proof.

    Raises:
        ConfigError: what the model lacks, or which comparison failed, and by how much.
    """
    settings = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return _adopt(settings, config.model_type, files)


@lru_cache
def _adopt(settings: str, model_type: str, files: WeightFiles) -> LlmFamily:
    proof = prove(AutoConfig.for_model(**json.loads(settings)), files)
    if files.source is not None and proof.unreadable:
        raise ConfigError(f"its files cannot be read: {proof.unreadable}")
    _logger.warning(
        "model_type %r is not listed. A small random copy of it was compared with Hugging Face's "
        "own model with eager attention: logits, loss and all gradients, of samples alone and "
        "packed, whole and with a pipeline stage for every layer, differ by at most %.1e. Tensor "
        "parallelism was not compared and is refused.",
        model_type,
        proof.worst,
    )
    return proof.family


class Proof(NamedTuple):
    """What a comparison gave."""

    family: LlmFamily
    worst: float
    """Largest relative difference."""
    unreadable: str
    """Why files cannot be read; "": they can."""


def prove(config: PreTrainedConfig, files: WeightFiles) -> Proof:
    """Builds a small copy of a model, and the same with Hugging Face's means alone, and compares.

    Raises:
        ConfigError: as for `adopt`, except for files.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        small = _saying("a small copy of its config", copy_config, config)
        plain = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        family = find_form(plain)
        if isinstance(family, list):
            raise ConfigError(family)
        _randomize(plain)
        ours = _saying("building it packed", LlmModule, small, family, torch.float32, files)
        ours.backbone.load_state_dict(plain.state_dict())
        differences: dict[str, float] = {}
        for packing, lengths in (("alone", _ALONE), ("packed", _PACKED)):
            batch = _batch(lengths)
            expected = _saying("Hugging Face's model by itself", _plain_results, plain, batch)
            for cut, run in (("whole", _whole_results), ("a stage per layer", _stage_results)):
                found = _saying(f"samples {packing}, {cut}", run, ours, batch)
                for what, difference in _compare(found, expected).items():
                    differences[f"{what} of samples {packing}, {cut}"] = difference
        wrong = {name: value for name, value in differences.items() if not value < TOLERANCE}
        if wrong:
            name = max(wrong, key=lambda key: wrong[key])
            raise ConfigError(
                f"{len(wrong)} of {len(differences)} comparisons with Hugging Face's own model "
                f"fail; the worst: {name} differs by {wrong[name]:.1e}, relative"
            )
        return Proof(family, max(differences.values()), _unreadable(plain, ours))


def _unreadable(plain: PreTrainedModel, ours: LlmModule) -> str:
    """Why what Hugging Face writes is not read as it was; "": it is."""
    with tempfile.TemporaryDirectory() as directory:
        bars = logging_of_transformers.is_progress_bar_enabled()
        logging_of_transformers.disable_progress_bar()
        try:
            plain.save_pretrained(directory)
            files = replace(ours.weights, source=directory)
            read = LlmModule(ours.config, ours.family, torch.float32, files)
            for value in read.state_dict().values():
                value.zero_()
            load_weights(MultimodalModel(read, {}, TextConventions("")))
        except (CheckpointError, RuntimeError, ValueError, NotImplementedError) as error:
            return " ".join(str(error).split()).replace(directory, "DIRECTORY")[:300]
        finally:
            if bars:
                logging_of_transformers.enable_progress_bar()
    expected = plain.state_dict()
    found = read.backbone.state_dict()
    wrong = [name for name, value in found.items() if not value.equal(expected[name])]
    return f"{', '.join(wrong[:3])} would be read with other values" if wrong else ""


Results = dict[str, Tensor]


Result = TypeVar("Result")


def _saying(what: str, run: Callable[..., Result], *arguments: Any) -> Result:
    """Runs foreign code on a model that nobody has tried: whatever it raises is said by name."""
    try:
        return run(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{what} fails: {type(error).__name__}: {reason}") from error


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Moves all weights off their initial values: zero biases and unit norms hide mistakes."""
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.add_(torch.randn_like(value), alpha=0.1)


def _batch(lengths: list[int]) -> Microbatch:
    ids = torch.randint(3, 60, (sum(lengths),))
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    targets = torch.roll(ids, -1)
    for start, stop in pairwise(starts):
        targets[start] = IGNORE_TARGET
        targets[stop - 1] = IGNORE_TARGET
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Microbatch(ids, targets, positions, starts, {}, MicrobatchMeta((), sum(lengths)))


def _plain_results(plain: nn.Module, batch: Microbatch) -> Results:
    plain.zero_grad()
    logits = torch.cat(
        [
            plain(batch.input_ids_T[None, start:stop], use_cache=False).logits[0]
            for start, stop in pairwise(batch.cu_seqlens)
        ]
    )
    kept = batch.target_positions_L
    loss = functional.cross_entropy(logits[kept], batch.targets_T[kept], reduction="sum")
    loss.backward()
    return {"logits": logits[kept].detach(), "loss": loss.detach(), **_gradients(plain)}


def _gradients(model: nn.Module) -> Results:
    return {
        f"gradient of {name}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def _whole_results(ours: LlmModule, batch: Microbatch) -> Results:
    ours.zero_grad()
    logits = ours.logits(batch, {}, batch.target_positions_L).detach()
    loss = ours(batch, {})
    loss.backward()
    return {"logits": logits, "loss": loss.detach(), **_gradients(ours.backbone)}


def _stage_results(ours: LlmModule, batch: Microbatch) -> Results:
    last = len(ours.layers) - 1
    hidden: dict[str, Tensor] | Tensor = {}
    gradients: Results = {}
    stages = []
    for i in range(last + 1):
        stage = ours.rebuild()
        stage.keep_stages([StageRange(i, i + 1, i == 0, i == last)])
        values = {n: p.detach().clone() for n, p in ours.state_dict().items()}
        stage.load_state_dict(values, strict=False, assign=True)
        stage.requires_grad_()
        hidden = stage(batch, hidden)
        stages.append(stage)
    assert isinstance(hidden, Tensor)
    hidden.backward()
    for stage in stages:
        copies = {n.removeprefix("backbone."): f for n, f in stage.tied_copies().items()}
        for name, grad in _gradients(stage.backbone).items():
            original = copies.get(name.removeprefix("gradient of "))
            key = name if original is None else f"gradient of {original.removeprefix('backbone.')}"
            gradients[key] = gradients.get(key, 0) + grad
    return {"loss": hidden.detach(), **gradients}


def _compare(found: Results, expected: Results) -> dict[str, float]:
    """Relative differences; gradients that are zero in exact arithmetic are noise on both sides."""
    largest = max(g.norm().item() for n, g in expected.items() if n.startswith("gradient"))
    differences = {}
    for name, value in found.items():
        norm = expected[name].norm().item()
        gradient = name.startswith("gradient")
        floor = 1e-2 * largest if gradient and norm < 1e-6 * largest else 1e-12
        differences[name] = ((value - expected[name]).norm() / max(norm, floor)).item()
    absent = [name for name in expected if name not in found and name != "logits"]
    return differences | dict.fromkeys(absent, float("inf"))
