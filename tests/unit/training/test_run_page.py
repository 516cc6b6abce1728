"""The page of a run: what is in it, of what state files may be in, and in a real browser."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import tomli_w
from PIL import Image
from rich.console import Console

from scripts.compare_runs import print_comparison
from torchmm.training.ending import Status, write_status
from torchmm.training.page import pages
from torchmm.training.page.contents import MOST_POINTS, read_run, thinned
from torchmm.training.page.pages import PageSink, comparison_page, run_page, write_run_page
from torchmm.training.page.sections import comparison, recipe_differences
from torchmm.training.report import keep_thumbnail

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return made_run(tmp_path / "a run", 0.01)


def made_run(folder: Path, lr: float) -> Path:
    folder.mkdir()
    lines = []
    for step in range(1, 21):
        record = {"step": step, "loss": 5.0 / step, "step_ms": 10.0, "slowest_rank": step % 2,
                  "straggler_share": 0.25, "peak_memory_bytes": 2**30, "mfu": None, "lr": lr,
                  "validation_loss": 1.5 if step % 10 == 0 else None}  # fmt: skip
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 21, "lo')
    recipe = {"name": folder.name, "optimizer": {"lr": lr}, "training": {"steps": 40}}
    (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-1.log").write_text("2026-11-25 rank 1 WARNING captions[3]: torn\n")
    name = keep_thumbnail(folder / "samples", "../odd/source", 3, Image.new("RGB", (400, 300)))
    sample = {"source": "../odd/source", "index": 3, "prompt": "", "picture": name}
    samples = [
        sample | {"step": 10, "truth": "A boat.", "generated": EVIL},
        sample | {"step": 20, "truth": "A boat.", "generated": " A boat."},
    ]
    (folder / "samples.json").write_text(json.dumps(samples))
    (folder / "timeline").mkdir()
    picture = '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="90" height="30">'
    (folder / "timeline" / "step-5.svg").write_text(picture + "<rect width='9' height='9'/></svg>")
    ranks = [{"measured_bytes": 3 * 2**30, "predicted_bytes": 2 * 2**30},
             {"measured_bytes": 5 * 2**29, "predicted_bytes": None}]  # fmt: skip
    memory = {"step": 5, "device": "cuda", "ranks": ranks}
    (folder / "memory.json").write_text(json.dumps(memory))
    write_status(folder, Status("done", 20, 0, 0))
    return folder


def test_a_page_has_what_the_files_say(run_dir: Path) -> None:
    page = write_run_page(run_dir).read_text()
    assert "data:image/png;base64," in page and "captions[3]: torn" in page
    assert "step 20: 1 of 1 are written exactly" in page and "optimizer.lr" in page
    assert '"points":[[1,5.0],' in page and '"held out"' in page and '"MFU"' not in page
    assert "<td>3.00 GiB</td><td>2.00 GiB</td><td>150%</td>" in page
    assert "<td>2.50 GiB</td><td></td><td></td>" in page
    assert page.count("<svg") == 1  # the pipeline; curves are drawn by the browser
    assert "'" + str(run_dir) + "'" in page.replace("&#x27;", "'")  # commands quote the space


def test_nothing_of_the_data_is_code(run_dir: Path) -> None:
    (run_dir / "recipe.toml").write_text(tomli_w.dumps({"name": EVIL}))
    page = run_page(read_run(run_dir))
    assert "<script>document" not in page and "<img src=x" not in page
    assert "&lt;script&gt;document" in page


@pytest.mark.parametrize(
    "file", ["recipe.toml", "samples.json", "memory.json", "STATUS.json", "evaluations.jsonl"]
)
@pytest.mark.parametrize("content", [None, b"", b"\xff{[", b"[1, 2]", b'{"a": 1}\n'])
def test_files_may_be_missing_or_torn(run_dir: Path, file: str, content: bytes | None) -> None:
    (run_dir / file).unlink(missing_ok=True)
    if content is not None:
        (run_dir / file).write_bytes(content)
    assert "Curves" in run_page(read_run(run_dir))


def test_a_folder_without_steps_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        read_run(tmp_path)


def test_extremes_of_long_curves_stay() -> None:
    points = [(step, float(step % 7)) for step in range(100_000)]
    points[43_210] = (43_210, 99.0)
    points[77_777] = (77_777, -99.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS and kept == sorted(kept)
    assert {points[0], points[-1], points[43_210], points[77_777]} <= set(kept)
    assert thinned(points[:50]) == points[:50]


def test_a_page_is_renewed_after_a_while(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pages.time, "monotonic", lambda: now[0])
    sink, page = PageSink(run_dir), run_dir / "index.html"
    found = []
    for later_s in (0.0, 29.0, 2.0):
        page.unlink(missing_ok=True)
        now[0] += later_s
        sink.emit({})
        found.append(page.exists())
    assert found == [True, False, True]


@pytest.mark.parametrize(("state", "renews"), [("running", "30"), ("done", "0")])
def test_only_the_page_of_a_run_that_goes_on_is_loaded_again(
    run_dir: Path, state: str, renews: str
) -> None:
    (run_dir / "STATUS.json").unlink()
    write_status(run_dir, Status(state, 20, 0))  # type: ignore[arg-type]
    assert f'data-renew-s="{renews}"' in run_page(read_run(run_dir))


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [read_run(made_run(tmp_path / name, lr)) for name, lr in (("a", 0.01), ("b", 0.02))]
    assert recipe_differences(runs) == {"name": ["a", "b"], "optimizer.lr": ["0.01", "0.02"]}
    figures = comparison(runs)
    assert (
        figures["last loss"] == ["0.2500"] * 2 and figures["best held-out loss"] == ["1.5000"] * 2
    )
    assert figures["peak memory"] == ["1.00 GiB"] * 2 and "MFU (median)" not in figures
    page = comparison_page(runs)
    assert '"name":"a: training"' in page and '"name":"b: held out"' in page
    print_comparison(Console(width=100), runs)
    assert "optimizer.lr" in capsys.readouterr().out


def looked_at(page: str, folder: Path) -> tuple[str, str]:
    """(what the browser makes of a page, what its scripts complain about)."""
    file = folder / "looked at.html"
    file.write_text(page)
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=3000", "--dump-dom",
         file.as_uri()],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    return done.stdout, "".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_browser_draws_all_charts_without_errors(run_dir: Path, tmp_path: Path) -> None:
    page = run_page(read_run(run_dir))
    made, complaints = looked_at(page, tmp_path)
    charts = page.count('<figure class="chart">')
    assert not complaints and charts == 5
    assert made.count('class="curve"') + made.count("<circle") >= charts
    assert "owned" not in made.partition("</title>")[0]
    assert 'viewBox="0 0 90 30"' in made  # the pipeline's picture, which can be zoomed
    _, complaints = looked_at(page.replace('"points":[[1,', '"points":[[oops,', 1), tmp_path)
    assert "SyntaxError" in complaints  # control
