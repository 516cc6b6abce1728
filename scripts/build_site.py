"""Build the documentation as a site with search, in outputs/site.

pip install -e '.[docs]'
python scripts/build_site.py            # outputs/site/index.html
python scripts/build_site.py --pages    # only collect the pages; no packages required

Pages link to recipes, results, scripts and tests, which lie outside docs/. So all that is linked is
gathered into one folder first, where it lies as in the tree: links then hold on the site as they do
in a checkout, and no page is written twice. Rejected: a generator that rewrites links, as each
generator does that in its own way.

Zensical is the successor of Material for MkDocs, by its authors; `zensical.toml` is its file.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "outputs" / "site_pages"
LINK = re.compile(r"\]\(\s*<?([^)\s>#]+)")
# Text that a browser shows but no site generator takes for a page.
SHOWN = {".py", ".toml", ".sh", ".yaml", ".json", ".txt"}


def gather(target: Path = PAGES) -> list[Path]:
    """Copies README.md and all that it leads to; returns what was copied, relative to the tree."""
    shutil.rmtree(target, ignore_errors=True)
    found: list[Path] = []
    waiting = [ROOT / name for name in ("README.md", "CHANGELOG.md")]
    waiting += sorted((ROOT / "docs").rglob("*.md"))
    seen = set(waiting)
    while waiting:
        file = waiting.pop()
        place = target / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
        found.append(file.relative_to(ROOT))
        if file.suffix != ".md":
            continue
        text = file.read_text()
        for link in LINK.findall(text):
            linked = (file.parent / link).resolve()
            if linked.is_file() and linked.is_relative_to(ROOT) and linked not in seen:
                seen.add(linked)
                waiting.append(linked)
    return found


def main() -> int:
    """Gathers the pages, then runs the generator."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pages", action="store_true", help="collect the pages and exit")
    arguments = parser.parse_args()
    print(f"{len(gather())} files in {PAGES}")
    if arguments.pages:
        return 0
    program = Path(sys.executable).with_name("zensical")
    command = [str(program), "build", "--strict", "--clean", "--config-file", "zensical.toml"]
    if not program.exists():
        print("zensical is not installed: pip install -e '.[docs]'", file=sys.stderr)
        return 2
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
