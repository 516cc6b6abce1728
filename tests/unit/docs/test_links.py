"""Tests of links: every link and mention refers to an existing file and heading.

Links to the web are not opened, because tests must not require a network.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Target of a Markdown link or an HTML attribute, without the title.
LINK = re.compile(r"""\]\(\s*<?([^)\s>]+)|(?:href|src)="([^"]+)\"""")
MENTION = re.compile(r"docs/[\w/]+\.(?:md|png|svg)\b")
EXTERNAL_PAGES = {
    "docs/Finetune_Custom_Data.md",
    "docs/source/features/vit_data_parallel_balancing.md",
    "docs/zh/features/encoder_dp_balance.md",
}
"""Pages of other projects."""
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2", re.MULTILINE | re.DOTALL)


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [ROOT / name for name in listing.stdout.splitlines()]
    return [file for file in files if file.is_file()]


def anchors(text: str) -> set[str]:
    """Return the anchors of headings as on GitHub.

    Anchors are lower case, without punctuation, with `-` for spaces, and numbered if repeated.
    """
    counts: dict[str, int] = {}
    names = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in HEADING.findall(CODE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        count = counts.get(name, 0)
        counts[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def broken(file: Path, text: str) -> Iterator[str]:
    for pair in LINK.findall(re.sub(r"`[^`\n]*`", "", CODE.sub("", text))):
        target = "".join(pair)
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        linked_file = (file.parent / path).resolve() if path else file
        if not linked_file.exists():
            yield f"{target}: no such file"
        elif anchor and linked_file.suffix == ".md":
            linked_text = text if linked_file == file else linked_file.read_text()
            if anchor not in anchors(linked_text):
                yield f"{target}: no such heading"


def test_every_link_has_a_target():
    problems = {
        f"{page.relative_to(ROOT)}: {problem}"
        for page in tracked("*.md")
        for problem in broken(page, page.read_text())
    }
    assert not problems, "\n".join(sorted(problems))


def test_mentioned_pages_and_images_exist():
    """Check comments, docstrings, messages and recipes."""
    problems = {
        f"{file.relative_to(ROOT)}: {mention}"
        for file in tracked("*.py", "*.toml", "*.sh", "*.yaml", "*.md")
        for mention in MENTION.findall(file.read_text())
        if not (ROOT / mention).exists() and mention not in EXTERNAL_PAGES
        if file.name not in ("test_links.py", "CHANGELOG.md")
    }
    assert not problems, "\n".join(sorted(problems))


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("[a](target.md)", ""),
        ("[a](target.md#a-b)", ""),
        ("[a](#own)", ""),
        ("[a](https://x.y/gone.md)", ""),
        ("`[a](gone.md)`", ""),
        ("```\n[a](gone.md)\n```", ""),
        ("[a](gone.md)", "gone.md: no such file"),
        ('<img src="gone.png">', "gone.png: no such file"),
        ("[a](target.md#c)", "target.md#c: no such heading"),
        ("[a](#b)", "#b: no such heading"),
    ],
)
def test_broken_links_are_detected(tmp_path, link, problem):
    (tmp_path / "target.md").write_text("# A, `B`\n")
    page = tmp_path / "page.md"
    page.write_text("")
    assert "".join(broken(page, f"# Own\n{link}\n")) == problem
