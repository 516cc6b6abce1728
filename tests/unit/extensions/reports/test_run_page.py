"""The HTML report of a run: content, damaged state files, and rendering in a browser."""

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import tomli_w
from PIL import Image
from rich.console import Console

from torchmm.commands import compare_runs, show_run
from torchmm.commands.compare_runs import print_comparison
from torchmm.extensions.evaluation.sample_plots import write_thumbnail
from torchmm.extensions.reports.page import html_pages
from torchmm.extensions.reports.page.html_pages import (
    PageSink,
    render_comparison_page,
    render_run_page,
    write_run_page,
)
from torchmm.extensions.reports.page.run_contents import MAX_POINTS, downsample_curve, read_run
from torchmm.extensions.reports.page.sections import compare_metrics, recipe_differences
from torchmm.training.shutdown import Status, write_status

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a run", 0.01)


def write_run(folder: Path, lr: float) -> Path:
    folder.mkdir()
    lines = []
    for step in range(1, 21):
        record = {"step": step, "loss": 5.0 / step, "step_ms": 10.0, "slowest_rank": step % 2,
                  "straggler_fraction": 0.25, "peak_memory_bytes": 2**30, "mfu": None, "lr": lr,
                  "validation_loss": 1.5 if step % 10 == 0 else None}  # fmt: skip
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 21, "lo')
    recipe = {"name": folder.name, "optimizer": {"lr": lr}, "training": {"steps": 40}}
    (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-1.log").write_text("2026-11-25 rank 1 WARNING captions[3]: damaged\n")
    name = write_thumbnail(folder / "samples", "../odd/source", 3, Image.new("RGB", (400, 300)))
    sample = {"source": "../odd/source", "index": 3, "prompt": "", "picture": name}
    samples = [
        sample | {"step": 10, "truth": "A boat.", "generated": EVIL},
        sample | {"step": 20, "truth": "A boat.", "generated": " A boat."},
    ]
    (folder / "samples.json").write_text(json.dumps(samples))
    (folder / "timeline").mkdir()
    svg_head = (
        '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="90" height="30">'
    )
    (folder / "timeline" / "step-5.svg").write_text(svg_head + "<rect width='9' height='9'/></svg>")
    ranks = [{"measured_bytes": 3 * 2**30, "predicted_bytes": 2 * 2**30},
             {"measured_bytes": 5 * 2**29, "predicted_bytes": None}]  # fmt: skip
    memory = {"step": 5, "device": "cuda", "ranks": ranks}
    (folder / "memory.json").write_text(json.dumps(memory))
    write_status(folder, Status("done", 20, 0, 0))
    return folder


def test_report_contains_run_files(run_dir: Path) -> None:
    page = write_run_page(run_dir).read_text()
    assert "data:image/png;base64," in page and "captions[3]: damaged" in page
    assert "step 20: 1 of 1 generated texts match" in page and "optimizer.lr" in page
    assert '"points":[[1,5.0],' in page and '"validation"' in page and '"MFU"' not in page
    assert "<td>3.00 GiB</td><td>2.00 GiB</td><td>150%</td>" in page
    assert "<td>2.50 GiB</td><td></td><td></td>" in page
    assert "<svg" not in page and page.count("data:image/svg+xml;base64,") == 1
    assert "'" + str(run_dir) + "'" in page.replace("&#x27;", "'")  # commands quote the space


def test_report_escapes_data(run_dir: Path) -> None:
    (run_dir / "recipe.toml").write_text(tomli_w.dumps({"name": EVIL}))
    page = render_run_page(read_run(run_dir))
    assert "<script>document" not in page and "<img src=x" not in page
    assert "&lt;script&gt;document" in page


SECRET = "a line of another file"


def test_report_runs_no_script_of_files(run_dir: Path) -> None:
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)">{EVIL}</svg>{EVIL}'
    (run_dir / "timeline" / "step-6.svg").write_text(svg)
    (run_dir / "timeline" / "step-7<img src=x onerror=alert(1)>.svg").write_text(svg)
    samples = json.loads((run_dir / "samples.json").read_text())
    odd = [samples[0] | {key: EVIL} for key in ("index", "step", "source", "picture", "prompt")]
    (run_dir / "samples.json").write_text(json.dumps([*samples, *odd]))
    page = render_run_page(read_run(run_dir))
    script = (Path(html_pages.__file__).parent / "charts.js").read_text()
    assert page.count("<script>") == 1 and f"<script>{script}</script>" in page
    assert "<svg" not in page and "<img src=x" not in page and "alert(1)&gt;" in page
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in page and "default-src 'none'" in page
    assert "samples.json: entry 2 is skipped" in page


@pytest.mark.parametrize("name", ["/{}", "../../{}", "../{}", "link.png", "pipe.png", "text.png"])
def test_report_includes_no_outside_file(run_dir: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8), "red").save(secret)
    (run_dir / "samples" / "link.png").symlink_to(secret)
    os.mkfifo(run_dir / "samples" / "pipe.png")
    (run_dir / "samples" / "text.png").write_text(SECRET)
    sample = {"source": "s", "index": 0, "step": 1, "truth": "", "generated": "A boat."}
    place = str(secret) if name == "/{}" else name.format(secret.name)
    (run_dir / "samples.json").write_text(json.dumps([sample | {"picture": place}]))
    page = render_run_page(read_run(run_dir))
    assert "data:image/png" not in page and "is skipped" in page
    for text in (SECRET.encode(), secret.read_bytes()):
        assert base64.b64encode(text).decode() not in page


@pytest.mark.parametrize("file", ["logs/rank-0.log", "timeline/step-9.svg", "recipe.toml"])
def test_report_follows_no_outside_link(run_dir: Path, tmp_path: Path, file: str) -> None:
    (tmp_path / "secret").write_text(f'name = "{SECRET}" # <svg')
    (run_dir / file).unlink(missing_ok=True)
    (run_dir / file).symlink_to(tmp_path / "secret")
    page = render_run_page(read_run(run_dir))
    assert SECRET not in page and f"{file}&#x27; is skipped" in page
    assert page.count("data:image/svg+xml") == 1


def test_run_with_linked_metrics_is_rejected(
    run_dir: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    (run_dir / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    (run_dir / "metrics.jsonl").symlink_to(tmp_path / "metrics.jsonl")
    with pytest.raises(FileNotFoundError, match="is a link to a file outside"):
        read_run(run_dir)
    for script, arguments in ((show_run, []), (show_run, ["--page"]), (compare_runs, [run_dir])):
        monkeypatch.setattr(sys, "argv", ["script", str(run_dir), *map(str, arguments)])
        assert script.main() == 2
        assert "is a link to a file outside" in capsys.readouterr().err


ODD_VALUES = [None, True, -1, 1e999, 10**400, "x", [], [[1]], {}, {"a": {"b": 1}}]


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: repr(value)[:20])
def test_report_skips_values_of_wrong_type(
    run_dir: Path, value: object, monkeypatch, capsys
) -> None:
    record = {
        "step": 21,
        "loss": 1.0,
        "slowest_rank": 0,
        "straggler_fraction": 0.5,
        "scores": {"a": 1},
    }
    sample = json.loads((run_dir / "samples.json").read_text())[0] | {"references": ["a"]}
    memory = {"step": 1, "device": "cpu", "ranks": [{"measured_bytes": 1, "predicted_bytes": 1}]}
    status = {"state": "done", "step": 1, "rank": 0, "exit_code": 0, "message": ""}
    evaluation = {"export": "hf", "step": 1, "scores": {"a": 1.0}, "samples": {"a": 1}}
    recipe = {"name": "a", "training": {"steps": 2}, "optimizer": {"lr": 0.1}}
    odd = lambda table: [{**table, key: value} for key in table] + [value]  # noqa: E731
    files = {
        "metrics.jsonl": [*odd(record), {**record, "scores": {"a": value}}],
        "samples.json": [odd(sample), *odd(sample)],
        "memory.json": [*odd(memory), *({**memory, "ranks": [v]} for v in odd(memory["ranks"][0]))],
        "STATUS.json": odd(status),
        "evaluations.jsonl": [*odd(evaluation), {**evaluation, "scores": {"a": value}}],
    }
    monkeypatch.setattr(sys, "argv", ["show_run.py", str(run_dir)])
    for name, contents in files.items():
        original = (run_dir / name).read_bytes() if (run_dir / name).exists() else b""
        for content in contents:
            line = json.dumps(content).encode() + b"\n"
            (run_dir / name).write_bytes(original + line if name.endswith("jsonl") else line)
            assert "Curves" in render_run_page(read_run(run_dir))
            assert show_run.main() == 0
        (run_dir / name).write_bytes(original)
    if isinstance(value, (bool, int, str, list, dict)) and value not in (10**400, [[1]]):
        for table in odd(recipe)[:-1]:
            (run_dir / "recipe.toml").write_text(tomli_w.dumps(table))
            assert "Curves" in render_run_page(read_run(run_dir))
            assert render_comparison_page([read_run(run_dir)] * 2)
    capsys.readouterr()


@pytest.mark.parametrize("name", ["a; touch owned", "$(touch owned)", "-rf", "a\nb", "a'b"])
def test_report_commands_quote_directory(tmp_path: Path, monkeypatch, name: str) -> None:
    write_run(tmp_path / name, 0.01)
    monkeypatch.chdir(tmp_path)
    page = render_run_page(read_run(Path(name)))
    commands = [
        unescape(text) for text in re.findall(r"<pre>((?:torchrun|torchmm) .*?)</pre>", page, re.S)
    ]
    assert len(commands) == 6 and "read recipe.toml before you start it" in page
    for command in commands:
        arguments = [word.removesuffix("/recipe.toml") for word in shlex.split(command)]
        assert (f"./{name}" if name.startswith("-") else name) in arguments


MARKUP = "[/b]x [red]y :boom:"


def test_tables_print_names_with_markup(run_dir: Path, monkeypatch, capsys) -> None:
    sample = {"source": MARKUP, "index": 0, "step": 1, "truth": MARKUP, "generated": MARKUP}
    (run_dir / "samples.json").write_text(json.dumps([sample]))
    record = {"step": 22, "loss": 1.0, "scores": {MARKUP: 0.5}}
    (run_dir / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run_dir / "recipe.toml").write_text(tomli_w.dumps({"name": MARKUP}))
    monkeypatch.setattr(sys, "argv", ["show_run.py", str(run_dir)])
    assert show_run.main() == 0
    assert capsys.readouterr().out.count(MARKUP) == 4
    monkeypatch.chdir(run_dir)
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", str(run_dir), str(run_dir)])
    assert compare_runs.main() == 0
    assert MARKUP in capsys.readouterr().out


def test_every_console_comes_from_make_console() -> None:
    root = Path(__file__).parents[4]
    files = [root / "train.py"]
    for folder in ("torchmm", "scripts", "benchmarks"):
        files += (root / folder).rglob("*.py")
    actual = {f.name for f in files if re.search(r"\bConsole\(", f.read_text())}
    assert actual == {
        "log.py",
        "screenshots.py",
    }  # screenshots.py prints the output of other programs


@pytest.mark.parametrize(
    "file", ["recipe.toml", "samples.json", "memory.json", "STATUS.json", "evaluations.jsonl"]
)
@pytest.mark.parametrize("content", [None, b"", b"\xff{[", b"[1, 2]", b'{"a": 1}\n'])
def test_report_accepts_missing_or_damaged_files(
    run_dir: Path, file: str, content: bytes | None
) -> None:
    (run_dir / file).unlink(missing_ok=True)
    if content is not None:
        (run_dir / file).write_bytes(content)
    assert "Curves" in render_run_page(read_run(run_dir))


def test_folder_without_steps_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        read_run(tmp_path)


def test_downsampled_curve_preserves_extremes() -> None:
    points = [(step, float(step % 7)) for step in range(100_000)]
    points[43_210] = (43_210, 99.0)
    points[77_777] = (77_777, -99.0)
    sampled = downsample_curve(points)
    assert len(sampled) <= MAX_POINTS and sampled == sorted(sampled)
    assert {points[0], points[-1], points[43_210], points[77_777]} <= set(sampled)
    assert downsample_curve(points[:50]) == points[:50]


def test_report_is_rewritten_after_interval(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(html_pages.time, "monotonic", lambda: now[0])
    sink, page = PageSink(run_dir), run_dir / "index.html"
    actual = []
    for later_s in (0.0, 29.0, 2.0):
        page.unlink(missing_ok=True)
        now[0] += later_s
        sink.emit({})
        actual.append(page.exists())
    assert actual == [True, False, True]


@pytest.mark.parametrize(("state", "renews"), [("running", "30"), ("done", "0")])
def test_only_report_of_active_run_reloads(run_dir: Path, state: str, renews: str) -> None:
    (run_dir / "STATUS.json").unlink()
    write_status(run_dir, Status(state, 20, 0))  # type: ignore[arg-type]
    assert f'data-renew-s="{renews}"' in render_run_page(read_run(run_dir))


def test_time_remaining_is_time_of_missing_steps(run_dir: Path) -> None:
    recipe = {"name": "long", "training": {"steps": 60_000 + 360_100}}
    (run_dir / "recipe.toml").write_text(tomli_w.dumps(recipe))
    write_status(run_dir, Status("running", 60_000, 0))
    assert "<dt>time remaining</dt><dd>1:00:01</dd>" in render_run_page(read_run(run_dir))
    write_status(run_dir, Status("done", 20, 0, 0))
    assert "time remaining" not in render_run_page(read_run(run_dir))


def test_comparison_shows_runs_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [read_run(write_run(tmp_path / name, lr)) for name, lr in (("a", 0.01), ("b", 0.02))]
    assert recipe_differences(runs) == {"name": ["a", "b"], "optimizer.lr": ["0.01", "0.02"]}
    figures = compare_metrics(runs)
    assert (
        figures["last loss"] == ["0.2500"] * 2 and figures["best validation loss"] == ["1.5000"] * 2
    )
    assert figures["peak memory"] == ["1.00 GiB"] * 2 and "MFU (median)" not in figures
    page = render_comparison_page(runs)
    assert '"name":"a: training"' in page and '"name":"b: validation"' in page
    print_comparison(Console(width=100), runs)
    assert "optimizer.lr" in capsys.readouterr().out


def render_page(page: str, folder: Path) -> tuple[str, str]:
    """Return the DOM that a browser builds from a page, and the console errors."""
    file = folder / "page.html"
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
def test_browser_renders_charts_without_errors(run_dir: Path, tmp_path: Path) -> None:
    page = render_run_page(read_run(run_dir))
    dom, errors = render_page(page, tmp_path)
    charts = page.count('<figure class="chart">')
    assert not errors and charts == 5
    assert dom.count('class="curve"') + dom.count("<circle") >= charts
    assert "owned" not in dom.partition("</title>")[0]
    _, errors = render_page(page.replace('"points":[[1,', '"points":[[oops,', 1), tmp_path)
    assert "SyntaxError" in errors  # the check detects errors
    dom, errors = render_page(page.replace("</body>", f"{EVIL}</body>"), tmp_path)
    assert "Content Security Policy" in errors and "<title>owned" not in dom
