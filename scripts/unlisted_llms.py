"""Writes into docs/unlisted_llms.md which causal LMs of transformers train without being listed.

python scripts/unlisted_llms.py            # all of them; about a minute
python scripts/unlisted_llms.py olmo phi   # prints what became of some

Each model type goes through the proof that a recipe with it goes through, with the default config
of its class."""

import argparse
import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from torchmm.common.errors import ConfigError
from torchmm.models.families.llms.structural import mechanisms
from torchmm.models.families.llms.table import LLM_FAMILIES
from torchmm.models.registry import LLM_FILES
from torchmm.models.unlisted import Proof, prove

TARGET = Path(__file__).parents[1] / "docs" / "unlisted_llms.md"
BEGIN = "<!-- unlisted: written by scripts/unlisted_llms.py -->"
END = "<!-- end of unlisted -->"
REASONS = {
    "no list of layers": "no list of layers as long as the config says, or parts of several kinds",
    "are not beside": "embeddings and layers in separate parts (BERT's form)",
    "parts with weights besides": "further parts with weights around the layers",
    "comparisons with": "results differ",
    "small layers does": "no small copy of the default config",
    "small copy": "no small copy of the default config",
    "Hugging Face's model by itself": "the default config does not run in Hugging Face's own model",
    "building": "cannot be built",
    "fails": "its forward does not take packed samples, or stages",
}
"""What a refusal contains -> how the page sums it up; the first that fits."""


class Outcome(NamedTuple):
    """What the proof of a model type gave: one or the other."""

    proof: Proof | None
    refusal: str


def survey(names: list[str]) -> dict[str, Outcome]:
    """The outcome by model type, with the default config of each."""
    outcomes = {}
    for name in names:
        try:
            config = CONFIG_MAPPING[name]()
            outcomes[name] = Outcome(prove(config, LLM_FILES), "")
        except ConfigError as error:
            outcomes[name] = Outcome(None, "; ".join(error.problems))
        except Exception as error:  # raised by their classes; counted among the refused
            outcomes[name] = Outcome(None, f"small copy: {' '.join(str(error).split())}")
    return outcomes


def causal_lms() -> list[str]:
    """All that the table does not list."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in LLM_FAMILIES]


def section(outcomes: dict[str, Outcome]) -> str:
    """What the page says of them."""
    passed = {name: outcome.proof for name, outcome in outcomes.items() if outcome.proof}
    read = [name for name, proof in passed.items() if not proof.unreadable]
    unread = [name for name, proof in passed.items() if proof.unreadable]
    refused = defaultdict(list)
    for name, outcome in outcomes.items():
        if not outcome.proof:
            refused[sum_up(outcome.refusal)].append(_with_mechanisms(name))
    lines = [
        f"Of the {len(outcomes)} other causal LMs of transformers, {len(passed)} pass with the "
        "default config of their class.",
        "",
        f"- weights read too ({len(read)}): {', '.join(read)}",
        f"- from random weights only, as their files have other names ({len(unread)}): "
        f"{', '.join(unread)}",
        "",
        "| refused because | `model_type` |",
        "|---|---|",
        *(f"| {reason} | {', '.join(names)} |" for reason, names in sorted(refused.items())),
    ]
    return "\n".join(lines)


def sum_up(refusal: str) -> str:
    """A refusal in the page's words."""
    return next((words for mark, words in REASONS.items() if mark in refusal), refusal)


def _with_mechanisms(name: str) -> str:
    try:
        found = mechanisms(CONFIG_MAPPING[name]())
    except Exception:  # raised by their classes, which is counted already
        found = []
    return f"{name} ({', '.join(found)})" if found else name


def written(page: str) -> str:
    """The section that a page has now."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    """Prints outcomes, or writes them all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", help="model types; none: all, into the page")
    types = parser.parse_args().types
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    outcomes = survey(types or causal_lms())
    for name, (proof, refusal) in outcomes.items():
        print(name, f"passes, {proof.worst:.1e} {proof.unreadable}" if proof else refusal)
    if not types:
        page = TARGET.read_text()
        pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
        new = f"{BEGIN}\n\n{section(outcomes)}\n\n{END}"
        TARGET.write_text(re.sub(pattern, lambda _: new, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
