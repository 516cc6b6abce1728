"""Writes the map of the package in CONTRIBUTING.md from what every folder says of itself.

python scripts/folder_map.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "CONTRIBUTING.md"
FOLDERS = (
    "common", "recipe", "models", "data", "parallel", "pipelining", "costs", "planning",
    "training", "balance", "extensions", "commands",
)  # fmt: skip
"""From the ground up: each imports those before it only."""
BEGIN = "<!-- map: written by scripts/folder_map.py -->"
END = "<!-- end of map -->"


def main() -> None:
    """Replaces the map in the file."""
    TARGET.write_text(with_map(TARGET.read_text()))
    print(f"wrote {TARGET}")


def with_map(page: str) -> str:
    """The page with an up-to-date map."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n```\n{chr(10).join(lines())}\n```\n\n{END}{rest.partition(END)[2]}"


def lines() -> Iterator[str]:
    """Lines of the map: a folder each, those inside others indented."""
    yield "torchmm/"
    for name in FOLDERS:
        folder = ROOT / "torchmm" / name
        yield f"  {name + '/':<19} {first_sentence(folder)}"
        for inner in sorted(p.parent for p in folder.glob("*/__init__.py")):
            yield f"    {inner.name + '/':<17} {first_sentence(inner)}"


def first_sentence(folder: Path) -> str:
    """The first line of a folder's docstring, without the full stop."""
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return doc.splitlines()[0].rstrip(".")


if __name__ == "__main__":
    main()
