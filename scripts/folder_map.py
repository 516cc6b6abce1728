"""Write the map of the package and the tables of extensions into CONTRIBUTING.md, from docstrings.

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
TABLES_BEGIN = "<!-- tables: written by scripts/folder_map.py -->"
TABLES_END = "<!-- end of tables -->"


def main() -> None:
    """Write both blocks."""
    TARGET.write_text(with_map(TARGET.read_text()))
    print(f"wrote {TARGET}")


def with_map(page: str) -> str:
    """Return the page with an up-to-date map and list of tables."""
    page = _replace_block(page, BEGIN, END, "\n".join(lines()))
    return _replace_block(page, TABLES_BEGIN, TABLES_END, tables())


def _replace_block(page: str, begin: str, end_marker: str, text: str) -> str:
    before, _, after = page.partition(begin)
    return f"{before}{begin}\n\n```\n{text}\n```\n\n{end_marker}{after.partition(end_marker)[2]}"


def tables() -> str:
    """Return the list of tables from the docstring of `torchmm/common/extensions.py`."""
    module = ast.parse((ROOT / "torchmm" / "common" / "extensions.py").read_text())
    _, _, listed = (ast.get_docstring(module) or "").partition("Tables (")
    return "\n".join(line.strip() for line in listed.splitlines() if line.startswith("    "))


def lines() -> Iterator[str]:
    """Yield the lines of the map: one per folder, with inner folders indented."""
    yield "torchmm/"
    for name in FOLDERS:
        folder = ROOT / "torchmm" / name
        yield f"  {name + '/':<19} {first_sentence(folder)}"
        for inner in sorted(p.parent for p in folder.glob("*/__init__.py")):
            yield f"    {inner.name + '/':<17} {first_sentence(inner)}"


def first_sentence(folder: Path) -> str:
    """Return the first line of the docstring of a folder, without the period."""
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return doc.splitlines()[0].rstrip(".")


if __name__ == "__main__":
    main()
