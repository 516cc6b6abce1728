"""Build the documentation as a site with search, in outputs/site.

pip install -e '.[docs]'
python scripts/build_site.py            # outputs/site/index.html
python scripts/build_site.py --pages    # only collect the pages; no packages required

Pages link to recipes, results, scripts and tests outside docs/. All linked files are first copied
into one folder with the directory tree of the repository, so that links are valid on the site and
in a checkout. Site generators that rewrite links are not used, because each of them rewrites links
differently.

Zensical is the successor of Material for MkDocs, by the same authors. `zensical.toml` configures
it.
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
# Text files that browsers display and that site generators do not treat as pages.
SHOWN = {".py", ".toml", ".sh", ".yaml", ".json", ".txt"}


def copy_pages(target: Path = PAGES) -> list[Path]:
    """Copy README.md and all files that it links to, directly or not. Return the copied files."""
    shutil.rmtree(target, ignore_errors=True)
    copied: list[Path] = []
    waiting = [ROOT / name for name in ("README.md", "CHANGELOG.md")]
    waiting += sorted((ROOT / "docs").rglob("*.md"))
    visited = set(waiting)
    while waiting:
        file = waiting.pop()
        destination = target / file.relative_to(ROOT)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, destination)
        copied.append(file.relative_to(ROOT))
        if file.suffix != ".md":
            continue
        text = file.read_text()
        for link in LINK.findall(text):
            linked = (file.parent / link).resolve()
            if linked.is_file() and linked.is_relative_to(ROOT) and linked not in visited:
                visited.add(linked)
                waiting.append(linked)
    return copied


def main() -> int:
    """Gather the pages, then run the site generator."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pages", action="store_true", help="collect the pages and exit")
    arguments = parser.parse_args()
    print(f"{len(copy_pages())} files in {PAGES}")
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
