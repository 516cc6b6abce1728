"""Write the tables of model types in docs/reference/model_tests.md from the results of tests.

python -m pytest -m proves --proofs=outputs/proofs.jsonl tests/unit/models tests/unit/data \\
    tests/unit/costs/test_real_flops.py tests/unit/parallel/test_compilation.py \\
    tests/distributed/test_*_tensor_parallel.py tests/distributed/test_context_parallel.py
python scripts/family_table.py outputs/proofs.jsonl

Results of several runs, with different versions of transformers, are merged. With --keep, the
results on the page remain and new results are added, for a few new tests or a new version.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, LlavaForConditionalGeneration
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchmm.models.families.composites.registry import COMPOSITES
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.hf.pair_classes import is_exported_as_llava

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "model_tests.md"
BEGIN = "<!-- table: written by scripts/family_table.py -->"
END = "<!-- end of table -->"
COLUMNS = {
    "equal": "parity",
    "packed": "packed",
    "stages": "stages",
    "tensor": "TP 2",
    "sequence": "TP 2 + SP",
    "context": "CP 2",
    "files": "files",
    "flops": "FLOPs",
    "compiled": "compiled",
    "text": "text",
    "images": "images",
    "tiles": "tiles",
    "clips": "videos",
    "sounds": "audio",
    "generation": "generation",
}
"""Head of the column for each result that tests report, in order."""
COLUMNS_BY_KIND = {
    "LLMs": (
        *("equal", "packed", "stages", "tensor", "sequence", "context", "files", "flops"),
        *("compiled", "generation"),
    ),
    "Encoders": ("equal", "packed", "stages", "tensor", "sequence", "files", "flops", "compiled"),
    "Multimodal models": (
        *("text", "images", "tiles", "clips", "sounds"),
        *("equal", "packed", "stages", "tensor", "context", "files", "compiled", "generation"),
    ),
}
TILED = ("llava_next", "llava_onevision", "internvl", "idefics3", "smolvlm", "gemma3")
"""Multimodal models whose image processors split images into tiles."""
TIMED = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "glm4v", "glm4v_moe", "glm46v"),
)
"""Multimodal models with videos. Other models process frames as images."""
NOT_APPLICABLE = "-"
"""Cell of a test that does not apply to a model."""


class FamilyResults(NamedTuple):
    """Test results of a model type, and the versions of transformers with parity."""

    what: set[str]
    versions: set[str]


def main() -> None:
    """Replace the tables on the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="output of pytest --proofs"
    )
    parser.add_argument("--keep", action="store_true", help="keep the results on the page")
    args = parser.parse_args()
    before, _, following = TARGET.read_text().partition(BEGIN)
    former, _, after = following.partition(END)
    results = read_results(args.files)
    if args.keep:
        for model_type, proofs in parse_rows(former):
            results[model_type].what.update(proofs.what)
            results[model_type].versions.update(proofs.versions)
    table = "\n".join(lines(results)).rstrip()
    TARGET.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
    print(f"wrote {TARGET}")


def read_results(files: list[Path]) -> Mapping[str, FamilyResults]:
    """Return the results by model_type."""
    results: dict[str, FamilyResults] = defaultdict(lambda: FamilyResults(set(), set()))
    for file in files:
        for line in file.read_text().splitlines():
            proof = json.loads(line)
            of = results[proof["model_type"]]
            of.what.add(proof["what"])
            if proof["what"] == "equal":
                of.versions.add(proof["transformers"])
    return results


def parse_rows(tables: str) -> Iterator[tuple[str, FamilyResults]]:
    """Yield model_type and results of each row of tables that `lines` wrote."""
    names = {head: name for name, head in COLUMNS.items()}
    heads: list[str] = []
    for line in tables.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in COLUMNS_BY_KIND:
            heads = cells
        elif len(cells) == len(heads) and not cells[0].startswith("-"):
            row = dict(zip(heads, cells, strict=True))
            what = {names[head] for head, cell in row.items() if cell == "yes"}
            versions = row.get("transformers", "").split(", ")
            yield cells[0], FamilyResults(what, {version for version in versions if version})


def lines(results: Mapping[str, FamilyResults]) -> Iterator[str]:
    """Yield the lines of one table per kind of model, without empty columns."""
    kinds: dict[str, Mapping[str, object]] = {
        "LLMs": LLM_FAMILIES,
        "Encoders": ENCODER_FAMILIES,
        "Multimodal models": COMPOSITES,
    }
    for kind, families in kinds.items():
        columns = COLUMNS_BY_KIND[kind]
        classes = export_classes(kind)
        heads = [kind, *(COLUMNS[column] for column in columns), "exported as", "transformers"]
        rows = []
        for model_type in families:
            proofs = results.get(model_type, FamilyResults(set(), set()))
            missing = inapplicable_columns(model_type) if kind == "Multimodal models" else set()
            cells = [
                NOT_APPLICABLE if column in missing else "yes" if column in proofs.what else ""
                for column in columns
            ]
            versions = ", ".join(sorted(proofs.versions))
            rows.append([model_type, *cells, classes.get(model_type, ""), versions])
        filled = [any(column) for column in zip(*rows, strict=True)]
        yield _row(compress(heads, filled))
        yield "|---" * sum(filled) + "|"
        for row in rows:
            yield _row(compress(row, filled))
        yield ""


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def inapplicable_columns(model_type: str) -> set[str]:
    """Return the columns that do not apply to a multimodal model."""
    config = AutoConfig.for_model(model_type)
    columns = set() if model_type in TILED else {"tiles"}
    columns |= set() if model_type in TIMED else {"clips"}
    if not hasattr(config, "vision_config"):
        columns.add("images")
    return columns if hasattr(config, "audio_config") else columns | {"sounds"}


def export_classes(kind: str) -> Mapping[str, str]:
    """Return the Hugging Face class of an export by model_type.

    For encoders: the class of an export with a separate LLM.
    """
    if kind == "Multimodal models":
        return {model_type: family.kind.__name__ for model_type, family in COMPOSITES.items()}
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind == "LLMs" else _encoder_classes()


def _encoder_classes() -> dict[str, str]:
    """Return LLaVA, or the class of the encoder for exports as components."""
    classes = {}
    for model_type, family in ENCODER_FAMILIES.items():
        if is_exported_as_llava(family):
            classes[model_type] = LlavaForConditionalGeneration.__name__
            continue
        config = AutoConfig.for_model(model_type)
        with torch.device("meta"):
            tower = family.variant(config).build(config, torch.float32)
        classes[model_type] = type(tower).__name__
    return classes


if __name__ == "__main__":
    main()
