"""Writes the table of families in docs/models.md from what tests have proved.

python -m pytest --proofs=outputs/proofs.jsonl tests/unit/models tests/unit/data \\
    tests/unit/balance/test_real_flops.py tests/distributed/test_*_tensor_parallel.py
python scripts/family_table.py outputs/proofs.jsonl

Several files, of runs with other versions of transformers, make one table.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchmm.models.families.composites.table import COMPOSITES
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.table import LLM_FAMILIES

TARGET = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN = "<!-- table: written by scripts/family_table.py -->"
END = "<!-- end of table -->"
COLUMNS = {
    "equal": "equal",
    "packed": "packed",
    "stages": "stages",
    "tensor": "TP 2",
    "sequence": "TP 2 + SP",
    "files": "files",
    "flops": "FLOPs",
    "compiled": "compiled",
    "tiles": "tiles",
    "clips": "clips",
    "sounds": "sounds",
    "generation": "same text from the export",
}
"""What is proved, by its name in tests, in order."""
COLUMNS_OF = {
    "LLMs": (
        *("equal", "packed", "stages", "tensor", "sequence", "files", "flops", "compiled"),
        "generation",
    ),
    "Encoders": ("equal", "packed", "stages", "tensor", "sequence", "files", "flops", "compiled"),
    "Composites": (
        *("equal", "packed", "stages", "tensor", "files", "tiles", "clips", "sounds"),
        "generation",
    ),
}


class Proofs(NamedTuple):
    """What was proved of one family, and the versions of transformers with which it is equal."""

    what: set[str]
    versions: set[str]


def main() -> None:
    """Replaces the table in the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of pytest --proofs")
    args = parser.parse_args()
    before, _, rest = TARGET.read_text().partition(BEGIN)
    table = "\n".join(lines(read(args.files)))
    TARGET.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}")
    print(f"wrote {TARGET}")


def read(files: list[Path]) -> Mapping[str, Proofs]:
    """By model_type."""
    found: dict[str, Proofs] = defaultdict(lambda: Proofs(set(), set()))
    for file in files:
        for line in file.read_text().splitlines():
            proof = json.loads(line)
            of = found[proof["model_type"]]
            of.what.add(proof["what"])
            if proof["what"] == "equal":
                of.versions.add(proof["transformers"])
    return found


def lines(found: Mapping[str, Proofs]) -> Iterator[str]:
    """Of the tables, one for each kind of module; columns without an entry are left out."""
    kinds: dict[str, Mapping[str, object]] = {
        "LLMs": LLM_FAMILIES,
        "Encoders": ENCODER_FAMILIES,
        "Composites": COMPOSITES,
    }
    for kind, families in kinds.items():
        columns = COLUMNS_OF[kind]
        classes = export_classes(kind)
        heads = [kind, *(COLUMNS[column] for column in columns), "exported as", "transformers"]
        rows = []
        for model_type in families:
            proofs = found.get(model_type, Proofs(set(), set()))
            cells = ["yes" if column in proofs.what else "" for column in columns]
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


def export_classes(kind: str) -> Mapping[str, str]:
    """Hugging Face's classes by model_type, which open what a run leaves; an encoder's depends on
    the model it is in."""
    if kind == "Composites":
        return {model_type: family.kind.__name__ for model_type, family in COMPOSITES.items()}
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind == "LLMs" else {}


if __name__ == "__main__":
    main()
