"""Take screenshots of run page, run comparison and terminal for the documentation.

python scripts/screenshots.py outputs/a outputs/b      # into docs/images; requires chromium

The page of the first run is captured in light and dark mode.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
DARK, LIGHT = 0, 1
"""Values of the Chromium setting `preferredColorScheme`."""
COLUMNS = 100


def main() -> int:
    """Take all screenshots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dirs", type=Path, nargs=2, metavar="run_dir")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("requires chromium or google-chrome", file=sys.stderr)
        return 2
    run, images = arguments.run_dirs[0], arguments.images
    output = run_script("show_run.py", run)
    run_script("show_run.py", run, "--page")
    take_screenshot(browser, run / "index.html", images / "run_page.png", LIGHT, 1900)
    take_screenshot(browser, run / "index.html", images / "run_page_dark.png", DARK, 1300)
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "compare.html"
        run_script("compare_runs.py", *arguments.run_dirs, "--output", page)
        take_screenshot(browser, page, images / "compare_runs.png", LIGHT, 930)
    render_terminal(f"$ python scripts/show_run.py {run}\n{output}", images / "terminal.svg")
    return 0


def run_script(name: str, *arguments: Path | str) -> str:
    """Return the output of a script, with ANSI colors."""
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    ran = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE)
    return ran.stdout


def take_screenshot(browser: str, page: Path, image_file: Path, scheme: int, height: int) -> None:
    """Take a screenshot of the top of a page, 1200 pixels wide."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--virtual-time-budget=5000"]  # until the page is rendered
    command += [f"--window-size=1200,{height}", f"--screenshot={image_file.resolve()}"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", page.resolve().as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)
    print(image_file)


def render_terminal(text: str, image_file: Path) -> None:
    """Render text with ANSI colors as an image of a terminal."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text.from_ansi(text))
        console.save_svg(str(image_file), title="torchmm")
    print(image_file)


if __name__ == "__main__":
    sys.exit(main())
