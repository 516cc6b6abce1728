"""Verify models that are not registered: packing and splitting, before training.

A small random copy must return the same values in torchmm as the unmodified Hugging Face model with
eager attention, which processes one sample or image at a time. The verification takes seconds on
the CPU and runs in each process.

- Causal LMs (`llms.py`): separate and packed samples, the complete model and one pipeline stage per
  layer. Logits, loss and the gradients of all weights are compared.
- Image encoders (`encoders.py`): single images and batches, the complete tower and one stage per
  layer. Features and the gradients of all weights are compared.

If weights are loaded, files that Hugging Face saves for the copy are loaded like real files and
must be bitwise identical.

The copy does not verify tensor parallelism (which is rejected), and numbers that occur only with
real sizes. Module names are not sufficient, because they do not determine the operations between
modules (a second stream of activations between layers, positions that are added to embeddings).
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as logging_of_transformers

from torchmm.common.batch import IGNORE_TARGET, EncoderInputs, Microbatch, MicrobatchMeta
from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.extensions.auto_models import encoders as towers
from torchmm.extensions.auto_models.encoder_structure import (
    detect_encoder_structure,
    example_pixels,
    hidden_states_of,
)
from torchmm.extensions.auto_models.encoders import DetectedEncoderFamily
from torchmm.extensions.auto_models.llms import detect_llm_family, small_llm_copy_config
from torchmm.models.encoders import EncoderModule, EncoderSpec
from torchmm.models.families.encoders.family import patches_per_row
from torchmm.models.families.introspection import TOLERANCE, randomize, run_external
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.text_conventions import TextConventions
from torchmm.models.hf.load import load_weights
from torchmm.models.layered import StageRange, WeightFiles
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import MultimodalModel

_SINGLE_SAMPLE = [21]
_PACKED_SAMPLES = [5, 9, 9, 4, 2]
_IMAGES = 3
_WIDTH = 24
"""Number of output features of an encoder."""
_logger = logging.getLogger(__name__)


def register_llm(config: PreTrainedConfig, files: WeightFiles) -> LlmFamily:
    """Return the family of a causal LM that is not registered, after its verification.

    Args:
        config: Config of the LLM.
        files: Names in its weight files. Without a source, loading them is not verified.

    Raises:
        ConfigError: The model has a different structure, or a comparison failed. The error has the
            difference.
    """
    settings = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return _register_llm(settings, config.model_type, files)


@lru_cache
def _register_llm(settings: str, model_type: str, files: WeightFiles) -> LlmFamily:
    proof = compare_llm(AutoConfig.for_model(**json.loads(settings)), files)
    compared = "logits, loss and all gradients, of single samples and packed samples"
    _report(proof, files, model_type, compared)
    return proof.family


Family = TypeVar("Family")


class ParityResult(NamedTuple, Generic[Family]):
    """Result of a verification."""

    family: Family
    worst: float
    """Largest relative difference."""
    unreadable: str
    """Why weight files cannot be loaded, or "" if they can."""


def compare_llm(config: PreTrainedConfig, files: WeightFiles) -> ParityResult[LlmFamily]:
    """Build a small copy of a model in torchmm and in Hugging Face, and compare the results.

    Raises:
        ConfigError: As for `register_llm`, except for files.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        small = run_external("a small copy of its config", small_llm_copy_config, config)
        hf_model = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        family = detect_llm_family(hf_model)
        if isinstance(family, list):
            raise ConfigError(family)
        randomize(hf_model)
        module = run_external(
            "building the packed model", LlmModule, small, family, torch.float32, files
        )
        module.backbone.load_state_dict(hf_model.state_dict())
        differences: dict[str, float] = {}
        for packing, lengths in (("alone", _SINGLE_SAMPLE), ("packed", _PACKED_SAMPLES)):
            batch = _batch(lengths)
            expected = run_external("the Hugging Face model", _hf_results, hf_model, batch)
            for split_name, run in (
                ("whole", _unsplit_results),
                ("one stage per layer", _stage_results),
            ):
                name = f"samples {packing}, {split_name}"
                differences |= _compare(name, run_external(name, run, module, batch), expected)
        return ParityResult(
            family, _check_tolerance(differences), _weight_file_problem(hf_model, module)
        )


def register_encoder(
    config: PreTrainedConfig, files: WeightFiles, processor: dict[str, Any]
) -> DetectedEncoderFamily:
    """Return the family of an image encoder that is not registered, after its verification.

    Args:
        config: Config of the encoder.
        files: Names in its weight files. Without a source, loading them is not verified.
        processor: Settings of its image processor, in its files and the recipe.

    Raises:
        ConfigError: The image processor is unknown, or as for `register_llm`.
    """
    settings = json.dumps(config.to_dict(), sort_keys=True, default=str)
    name = towers.resolve_processor_class(config, processor)
    return _register_encoder(settings, config.model_type, files, name)


@lru_cache
def _register_encoder(
    settings: str, model_type: str, files: WeightFiles, processor_class: str
) -> DetectedEncoderFamily:
    config = AutoConfig.for_model(**json.loads(settings))
    proof = compare_encoder(config, files, processor_class)
    compared = "features and all gradients, of single images and batches"
    _report(proof, files, model_type, compared)
    return proof.family


def _report(proof: ParityResult[Any], files: WeightFiles, model_type: str, compared: str) -> None:
    """Log the result of a comparison.

    Raises:
        ConfigError: The weight files cannot be read.
    """
    if files.source is not None and proof.unreadable:
        raise ConfigError(f"its files cannot be read: {proof.unreadable}")
    _logger.warning(
        "model_type %r is not registered. In a small random copy of it, compared with the "
        "Hugging Face model with eager attention, %s differ by at most %.1e, both in one "
        "stage and with one pipeline stage per layer. Tensor parallelism was not compared "
        "and is not supported.",
        model_type,
        compared,
        proof.worst,
    )


def compare_encoder(
    config: PreTrainedConfig, files: WeightFiles, processor_class: str
) -> ParityResult[DetectedEncoderFamily]:
    """Build a small copy of an encoder in torchmm and in Hugging Face, and compare the results.

    Raises:
        ConfigError: As for `register_encoder`, except for files.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        small = run_external("a small copy of its config", towers.small_encoder_config, config)
        hf_model = towers.build_encoder_model(small, torch.float32, "eager")
        form = run_external(
            "the Hugging Face model", detect_encoder_structure, hf_model, processor_class
        )
        randomize(hf_model)
        family = DetectedEncoderFamily(form)
        spec = EncoderSpec(
            "encoder", family, small, "", {}, None, _WIDTH, torch.float32, connector="linear"
        )
        files = replace(files, renames=(*family.renames, *files.renames))
        module = run_external("building the model", EncoderModule, spec, files)
        module.tower.load_state_dict(hf_model.state_dict(), strict=False)
        if problem := run_external(
            "the modules before its layers", towers.patch_order_problem, family, module.tower
        ):
            raise ConfigError(problem)
        differences: dict[str, float] = {}
        rows = patches_per_row(small)
        for count, packing in ((1, "alone"), (_IMAGES, "together")):
            pixels = example_pixels(small, count)
            inputs = EncoderInputs(pixels, [(1, rows, rows)] * count, torch.empty(0))
            expected = run_external(
                "the Hugging Face model", _hf_features, hf_model, module, pixels
            )
            for split_name, run in (
                ("whole", _unsplit_features),
                ("one stage per layer", _stage_features),
            ):
                name = f"images {packing}, {split_name}"
                differences |= _compare(name, run_external(name, run, module, inputs), expected)
        family.is_llava_compatible = _is_llava_compatible(
            hf_model, family, example_pixels(small, 1)
        )
        return ParityResult(
            family, _check_tolerance(differences), _weight_file_problem(hf_model, module)
        )


@torch.no_grad()
def _is_llava_compatible(
    hf_model: PreTrainedModel, family: DetectedEncoderFamily, pixels: Tensor
) -> bool:
    """Return True if LLaVA can use the tower.

    `AutoModel` must build the tower. Its hidden states must be the outputs of its layers, with at
    most a class token in addition to patches.
    """
    if family.form.num_prefix_tokens > 1 or type(hf_model.config) not in MODEL_MAPPING:
        return False
    if MODEL_MAPPING[type(hf_model.config)] is not type(hf_model):
        return False
    returned: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _, inputs, out: returned.append(hidden_states_of(out)))
        for layer in hf_model.get_submodule(family.layers).children()
    ]
    hidden_states = hf_model(pixels, output_hidden_states=True, return_dict=True).hidden_states
    for handle in handles:
        handle.remove()
    same = hidden_states is not None and len(hidden_states) == len(returned) + 1
    return same and all(map(torch.equal, hidden_states[1:], returned))


def _check_tolerance(differences: dict[str, float]) -> float:
    """Return the largest difference. Raise an error if it is too large."""
    wrong = {name: value for name, value in differences.items() if not value < TOLERANCE}
    if wrong:
        name = max(wrong, key=lambda key: wrong[key])
        raise ConfigError(
            f"{len(wrong)} of {len(differences)} comparisons with the Hugging Face model "
            f"fail. The largest relative difference is {wrong[name]:.1e}, in {name}"
        )
    return max(differences.values())


def _weight_file_problem(hf_model: PreTrainedModel, module: LlmModule | EncoderModule) -> str:
    """Return why files that Hugging Face saves are not read correctly, or "" if they are."""
    with tempfile.TemporaryDirectory() as directory:
        bars = logging_of_transformers.is_progress_bar_enabled()
        logging_of_transformers.disable_progress_bar()
        read = module.build_without_adapters()
        read.weights = replace(module.weights, source=directory)
        try:
            hf_model.save_pretrained(directory)
            for value in read.state_dict().values():
                value.zero_()
            if isinstance(read, LlmModule):
                model = MultimodalModel(read, {}, TextConventions(""))
            else:  # a model requires an LLM
                config = LlamaConfig(
                    hidden_size=8,
                    intermediate_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=1,
                    vocab_size=8,
                )
                llm = LlmModule(config, LlmFamily(), torch.float32, WeightFiles())
                model = MultimodalModel(llm, {read.name: read}, TextConventions(""))
            load_weights(model)
        except (CheckpointError, RuntimeError, ValueError, NotImplementedError) as error:
            return " ".join(str(error).split()).replace(directory, "DIRECTORY")[:300]
        finally:
            if bars:
                logging_of_transformers.enable_progress_bar()
    expected = hf_model.state_dict()
    hf_module = read.backbone if isinstance(read, LlmModule) else read.tower
    loaded = hf_module.state_dict()
    wrong = [name for name, value in loaded.items() if not value.equal(expected[name])]
    return f"{', '.join(wrong[:3])} would be read with different values" if wrong else ""


Results = dict[str, Tensor]


def _batch(lengths: list[int]) -> Microbatch:
    ids = torch.randint(3, 60, (sum(lengths),))
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    targets = torch.roll(ids, -1)
    for start, stop in pairwise(starts):
        targets[start] = IGNORE_TARGET
        targets[stop - 1] = IGNORE_TARGET
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Microbatch(ids, targets, positions, starts, {}, MicrobatchMeta((), sum(lengths)))


def _hf_results(hf_model: nn.Module, batch: Microbatch) -> Results:
    hf_model.zero_grad()
    logits = torch.cat(
        [
            hf_model(batch.input_ids_T[None, start:stop], use_cache=False).logits[0]
            for start, stop in pairwise(batch.cu_seqlens)
        ]
    )
    target_positions = batch.target_positions_L
    loss = functional.cross_entropy(
        logits[target_positions], batch.targets_T[target_positions], reduction="sum"
    )
    loss.backward()
    return {
        "logits": logits[target_positions].detach(),
        "loss": loss.detach(),
        **_gradients(hf_model),
    }


def _gradients(model: nn.Module, prefix: str = "") -> Results:
    """Return gradients by Hugging Face names, of parameters whose names start with `prefix`."""
    return {
        f"gradient of {_hf_parameter_name(name)}": torch.zeros_like(p)
        if p.grad is None
        else p.grad.clone()
        for name, p in model.named_parameters()
        if name.startswith(prefix)
    }


def _hf_parameter_name(name: str) -> str:
    return name.removeprefix("backbone.").removeprefix("tower.")


def _unsplit_results(module: LlmModule, batch: Microbatch) -> Results:
    module.zero_grad()
    logits = module.logits(batch, {}, batch.target_positions_L).detach()
    loss = module(batch, {})
    loss.backward()
    return {"logits": logits, "loss": loss.detach(), **_gradients(module)}


def _stage_results(module: LlmModule, batch: Microbatch) -> Results:
    hidden, gradients = _run_stages(
        module, lambda stage, stage_input: stage(batch, stage_input), {}
    )
    return {"loss": hidden, **gradients}


def _hf_features(hf_model: PreTrainedModel, module: EncoderModule, pixels: Tensor) -> Results:
    """Return the outputs of the last layer and of the connector, for each image separately."""
    hf_model.zero_grad()
    module.zero_grad()
    returned: list[Tensor] = []
    last = hf_model.get_submodule(module.family.layers)[-1]
    handle = last.register_forward_hook(lambda _, inputs, out: returned.append(out))
    for image in pixels:
        hf_model(image[None])
    handle.remove()
    before = module.family.num_prefix_tokens(hf_model.config)
    hidden = [x[0] if isinstance(x, tuple) else x for x in returned]
    features = torch.cat([module.connector(x[0, before:]) for x in hidden])
    _loss_of(features).backward()
    known_names = {
        f"gradient of {name.removeprefix('tower.')}" for name, _ in module.named_parameters()
    }
    all_gradients = _gradients(hf_model)
    # Modules without effect on features are not part of the torchmm module, and have no gradients.
    compared = {
        name: grad for name, grad in all_gradients.items() if name in known_names or grad.any()
    }
    return {"features": features.detach(), **compared, **_gradients(module, "connector.")}


def _loss_of(features: Tensor) -> Tensor:
    """Return a scalar with a different gradient for every feature."""
    return (features * torch.linspace(0.5, 1.5, features.numel()).view_as(features)).square().sum()


def _unsplit_features(module: EncoderModule, inputs: EncoderInputs) -> Results:
    module.zero_grad()
    features = module(inputs)
    _loss_of(features).backward()
    return {"features": features.detach(), **_gradients(module)}


def _stage_features(module: EncoderModule, inputs: EncoderInputs) -> Results:
    features, gradients = _run_stages(
        module, lambda stage, stage_input: stage(inputs, stage_input), None
    )
    return {"features": features, **gradients}


def _run_stages(
    module: LlmModule | EncoderModule, run: Callable[[Any, Any], Any], hidden: Any
) -> tuple[Tensor, Results]:
    """Return the output of the last of one stage per layer, and the accumulated gradients."""
    last = len(module.layers) - 1
    gradients: Results = {}
    stages = []
    for i in range(last + 1):
        stage = module.build_without_adapters()
        stage.reduce_to_stages([StageRange(i, i + 1, i == 0, i == last)])
        values = {n: p.detach().clone() for n, p in module.state_dict().items()}
        stage.load_state_dict(values, strict=False, assign=True)
        stage.requires_grad_()
        hidden = run(stage, hidden)
        stages.append(stage)
    assert isinstance(hidden, Tensor)
    (hidden if isinstance(module, LlmModule) else _loss_of(hidden)).backward()
    for stage in stages:
        copies = {_hf_parameter_name(copy): first for copy, first in stage.tied_replicas().items()}
        for name, grad in _gradients(stage).items():
            original = copies.get(name.removeprefix("gradient of "))
            key = name if original is None else f"gradient of {_hf_parameter_name(original)}"
            gradients[key] = gradients.get(key, 0) + grad
    return hidden.detach(), gradients


def _compare(inputs: str, actual: Results, expected: Results) -> dict[str, float]:
    """Return relative differences by name of the result and of its inputs.

    Gradients that are zero in exact arithmetic are noise on both sides.
    """
    largest = max(g.norm().item() for n, g in expected.items() if n.startswith("gradient"))
    differences = {}
    for name, value in actual.items():
        norm = expected[name].norm().item()
        gradient = name.startswith("gradient")
        floor = 1e-2 * largest if gradient and norm < 1e-6 * largest else 1e-12
        difference = ((value - expected[name]).norm() / max(norm, floor)).item()
        differences[f"{name} of {inputs}"] = difference
    absent = [name for name in expected if name not in actual and name != "logits"]
    return differences | {f"{name} of {inputs}": float("inf") for name in absent}
