"""Write docs/reference/unlisted_models.md: models that train without being registered.

The table contains causal LMs and image encoders of transformers.

python scripts/unlisted_models.py            # all of them; about two minutes
python scripts/unlisted_models.py olmo vit   # print the results of some

Each model type passes through the same comparison as in a recipe, with the default config of its
class."""

import argparse
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from torchmm.common.errors import ConfigError
from torchmm.extensions.auto_models.encoders import encoder_class, resolve_processor_class
from torchmm.extensions.auto_models.parity import ParityResult, compare_encoder, compare_llm
from torchmm.models.build import ENCODER_FILES, LLM_FILES
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.introspection import find_mechanisms
from torchmm.models.families.llms.registry import LLM_FAMILIES

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "unlisted_models.md"
LLM_ERROR_SUMMARIES = {
    "list of": "no list of layers with the length in the config, or several components",
    "are not in the same module": "embeddings and layers in separate modules (as in BERT)",
    "layers, one norm and head": "additional modules with weights around the layers",
    "comparisons with": "results differ",
    "small layers does": "no small copy of the default config",
    "small copy": "no small copy of the default config",
    "the Hugging Face model": "the default config does not run in the Hugging Face model",
    "building": "cannot be built",
    "fails": "no support for packed samples or stages",
}
"""Maps text of an error to its summary on the page. The first match applies."""
ENCODER_ERROR_SUMMARIES = {
    "list of": "no list of layers, or several (stages of several widths)",
    "image_size and patch_size": "no images of a fixed size in its config",
    "not a square": "images that are not square",
    "besides hidden": "layers have inputs besides hidden states (positions, biases, masks)",
    "not a separate module": "an operation between pixels and layers that is not a module",
    "has more than one input": "a module before the layers has inputs besides pixels",
    "hidden states (": "patches are dropped or merged before the layers",
    "pixels of patch": "a position depends on several patches",
    "convolutions over pixels": "patches are computed by several convolutions, or by none",
    "is not the output of layer": "an operation between layers",
    "weights outside": "weights outside of embeddings and layers",
    "comparisons with": "results differ",
    "small layers does": "no small copy of the default config",
    "small copy": "no small copy of the default config",
    "no image encoder for": "no class for the encoder without the LLM",
    "the Hugging Face model": "the default config does not run with only pixels",
    "fails": "it cannot be built or split",
}
"""Maps text of an encoder error to its summary on the page."""


class ComparisonOutcome(NamedTuple):
    """Result of the comparison of a model type: a proof or an error."""

    parity: ParityResult[Any] | None
    error_text: str


class ModelType(NamedTuple):
    """Kind of model with a separate section on the page."""

    name: str
    compare: Callable[[PreTrainedConfig], ParityResult[Any]]
    reasons: dict[str, str]

    @property
    def begin(self) -> str:
        """Marker at the start of the section."""
        return f"<!-- {self.name}: written by scripts/unlisted_models.py -->"

    @property
    def end(self) -> str:
        """Marker at the end of the section."""
        return f"<!-- end of {self.name} -->"


def _prove_encoder(config: PreTrainedConfig) -> ParityResult[Any]:
    try:
        processor = resolve_processor_class(config, {})
    except ConfigError:  # which files usually name
        processor = "ViTImageProcessor"
    return compare_encoder(config, ENCODER_FILES, processor)


LLMS = ModelType("causal LMs", lambda config: compare_llm(config, LLM_FILES), LLM_ERROR_SUMMARIES)
ENCODERS = ModelType("image encoders", _prove_encoder, ENCODER_ERROR_SUMMARIES)


def compare_all(kind: ModelType, names: list[str]) -> dict[str, ComparisonOutcome]:
    """Return the outcome by model type, with the default config of each type."""
    outcomes = {}
    for name in names:
        try:
            outcomes[name] = ComparisonOutcome(kind.compare(CONFIG_MAPPING[name]()), "")
        except ConfigError as error:
            outcomes[name] = ComparisonOutcome(None, "; ".join(error.problems))
        except Exception as error:  # raised by their classes; reported as rejected
            outcomes[name] = ComparisonOutcome(None, f"small copy: {' '.join(str(error).split())}")
    return outcomes


def causal_lms() -> list[str]:
    """Return all causal LMs of transformers that are not registered."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in LLM_FAMILIES]


def image_encoders() -> list[str]:
    """Return all image encoders that are not registered and have no text model."""
    names = []
    for name in CONFIG_MAPPING:
        if name in ENCODER_FAMILIES or not (
            name in IMAGE_PROCESSOR_MAPPING_NAMES or re.search(r"vision|vit|dino", name)
        ):
            continue
        try:
            config = CONFIG_MAPPING[name]()
            encoder_class(config)
        except Exception:  # raised by their classes, or no tower for pixels
            continue
        if not config.sub_configs:
            names.append(name)
    return names


def section(kind: ModelType, outcomes: dict[str, ComparisonOutcome]) -> str:
    """Return the section of a kind of model."""
    passed = {name: outcome.parity for name, outcome in outcomes.items() if outcome.parity}
    read = [name for name, proof in passed.items() if not proof.unreadable]
    unread = [name for name, proof in passed.items() if proof.unreadable]
    refused = defaultdict(list)
    for name, outcome in outcomes.items():
        if not outcome.parity:
            refused[summarize_error(kind, outcome.error_text)].append(_describe_mechanisms(name))
    lines = [
        f"{len(passed)} of {len(outcomes)} {kind.name} that are not registered pass.",
        "",
        f"- also with pretrained weights ({len(read)}): {', '.join(read)}",
        f"- only with random weights, because their files use other names ({len(unread)}): "
        f"{', '.join(unread)}",
        "",
        "| reason | `model_type` |",
        "|---|---|",
        *(f"| {reason} | {', '.join(names)} |" for reason, names in sorted(refused.items())),
    ]
    return "\n".join(lines)


def summarize_error(kind: ModelType, refusal: str) -> str:
    """Return the summary of an error on the page."""
    return next(
        (summary for pattern, summary in kind.reasons.items() if pattern in refusal), refusal
    )


def _describe_mechanisms(name: str) -> str:
    try:
        mechanisms = find_mechanisms(CONFIG_MAPPING[name]())
    except Exception:  # raised by their classes, which is counted already
        mechanisms = []
    return f"{name} ({', '.join(mechanisms)})" if mechanisms else name


def present_section(kind: ModelType, page: str) -> str:
    """Return the present section of a page."""
    return page.partition(kind.begin)[2].partition(kind.end)[0].strip()


def main() -> None:
    """Print the outcomes, or write all of them to the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("types", nargs="*", help="model types (default: all, written to the page)")
    types = parser.parse_args().types
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    for kind, model_types in ((LLMS, causal_lms()), (ENCODERS, image_encoders())):
        outcomes = compare_all(
            kind, [n for n in types if n in model_types] if types else model_types
        )
        for name, (proof, refusal) in outcomes.items():
            print(name, f"passes, {proof.worst:.1e} {proof.unreadable}" if proof else refusal)
        if not types:
            page = TARGET.read_text()
            pattern = f"{re.escape(kind.begin)}.*{re.escape(kind.end)}"
            new = f"{kind.begin}\n\n{section(kind, outcomes)}\n\n{kind.end}"
            (old,) = re.findall(pattern, page, flags=re.DOTALL)
            TARGET.write_text(page.replace(old, new))


if __name__ == "__main__":
    main()
