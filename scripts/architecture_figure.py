"""Draw the figure of the core, its extensions and the nine concepts.

    python scripts/architecture_figure.py        # writes docs/images/architecture.svg

Folders of extensions are read from the package, so that the figure lists all of them.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "images" / "architecture.svg"
CORE = (
    (("training", "loop, hooks, metrics, checkpoints, exports"),),
    (("planning", "recipe to sizes, layouts, plans"), ("costs", "FLOPs and bytes from sizes")),
    (("pipelining", "plans as data: schedules, checks, runtime"),),
    (("parallel", "meshes, FSDP2, tensor parallelism, messages"),),
    (("models", "Hugging Face modules in layers"), ("data", "samples to packed microbatches")),
    (("recipe", "schema and checks, without torch"), ("common", "types, files, errors, log")),
)
"""Folders of the core from top to bottom, with their contents. Each row imports lower rows only."""
CONCEPTS = (
    ("Recipe", "recipe/recipe.py"),
    ("LayeredModule", "models/layered.py"),
    ("StageLayout", "pipelining/plan/graph.py"),
    ("Microbatch", "common/batch.py"),
    ("Planner", "planning/planner.py"),
    ("PipelinePlan", "pipelining/plan/plan.py"),
    ("Runtime", "pipelining/run/runtime.py"),
    ("Hook", "training/hooks/hook.py"),
    ("Metrics", "training/metrics.py"),
)
"""Concepts in the order in which a batch uses them, with the file that defines each."""
WIDTH, HEIGHT = 940, 520
CORE_COLOR, EXTENSION_COLOR, CONCEPT_COLOR = "#dbe6f5", "#e3f0df", "#f6ead7"


def main() -> None:
    """Write the figure."""
    TARGET.write_text(render())
    print(f"wrote {TARGET.relative_to(ROOT)}")


def render() -> str:
    """Return the figure as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 Z" fill="#555"/></marker></defs>',
        *_box(20, 14, 900, 34, "#eeeeee", "commands/", "the program torchmm: train, plan, export"),
        _text(20, 74, "Core", bold=True),
        _text(600, 74, "Extensions", bold=True),
        *_core(),
        *_extensions(),
        *_arrows(),
        _text(20, 408, "Nine concepts, in the order in which a batch meets them", bold=True),
        *_concepts(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _core() -> Iterator[str]:
    for row, folders in enumerate(CORE):
        width = (440 - 8 * (len(folders) - 1)) / len(folders)
        for column, (name, contents) in enumerate(folders):
            x = 20 + column * (width + 8)
            yield from _box(x, 84 + row * 50, width, 44, CORE_COLOR, f"{name}/", contents)


def _extensions() -> Iterator[str]:
    """Yield boxes of the folders in balance/, and one for each extension of extensions/."""
    names = (["balance"], ["extensions"])
    for top, height, (folder,) in ((84, 138, names[0]), (230, 148, names[1])):
        inner = sorted(f.parent.name for f in (ROOT / "torchmm" / folder).glob("*/__init__.py"))
        yield (
            f'<rect x="600" y="{top}" width="320" height="{height}" rx="3" '
            'fill="none" stroke="#555"/>'
        )
        yield _text(610, top + 18, f"{folder}/", bold=True)
        for number, name in enumerate(inner):
            x, y = 610 + number % 3 * 102, top + 28 + number // 3 * 36
            yield (
                f'<rect x="{x}" y="{y}" width="97" height="30" rx="3" '
                f'fill="{EXTENSION_COLOR}" stroke="#555"/>'
            )
            yield _text(x + 48.5, y + 19, name, size=12, middle=True)


def _arrows() -> Iterator[str]:
    line = 'stroke="#555" fill="none" marker-end="url(#head)"'
    yield f'<path d="M596 170 L468 170" {line}/>'
    yield _text(532, 162, "imports", size=12, middle=True)
    yield f'<path d="M464 270 L592 270" {line} stroke-dasharray="5 4"/>'
    yield _text(532, 262, "tables: loads by name", size=12, middle=True)


def _concepts() -> Iterator[str]:
    for number, (name, file) in enumerate(CONCEPTS):
        x, y = 20 + number % 5 * 182, 418 + number // 5 * 50
        yield from _box(x, y, 172, 42, CONCEPT_COLOR, name, file)
        if number + 1 < len(CONCEPTS) and number % 5 < 4:
            yield f'<path d="M{x + 172} {y + 21} L{x + 181} {y + 21}" stroke="#555"/>'


def _box(
    x: float, y: float, width: float, height: float, color: str, name: str, contents: str
) -> Iterator[str]:
    """Yield a box with a name in bold and its contents below."""
    yield (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" '
        f'fill="{color}" stroke="#555"/>'
    )
    yield _text(x + 10, y + height / 2 - 3, name, bold=True)
    yield _text(x + 10, y + height / 2 + 13, contents, size=11)


def _text(
    x: float, y: float, text: str, *, bold: bool = False, size: int = 13, middle: bool = False
) -> str:
    style = ' font-weight="bold"' if bold else ""
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text x="{x}" y="{y}" font-size="{size}"{style}{anchor}>{text}</text>'


if __name__ == "__main__":
    main()
