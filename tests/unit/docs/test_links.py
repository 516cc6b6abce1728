"""Every link of every page leads to a file and, behind `#`, to a heading; and so do plain mentions.

Addresses of the web are not opened: a test must not need the network.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Of a Markdown link or an HTML attribute; a title behind the target is cut off.
LINK = re.compile(r"""\]\(\s*<?([^)\s>]+)|(?:href|src)="([^"]+)\"""")
MENTION = re.compile(r"docs/[\w/]+\.(?:md|png|svg)\b")
OTHERS = {
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
    """As GitHub names headings: lower case, without punctuation, `-` for spaces, numbered."""
    found: dict[str, int] = {}
    names = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in HEADING.findall(CODE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        seen = found.get(name, 0)
        found[name] = seen + 1
        names.add(f"{name}-{seen}" if seen else name)
    return names


def broken(file: Path, text: str) -> Iterator[str]:
    for pair in LINK.findall(re.sub(r"`[^`\n]*`", "", CODE.sub("", text))):
        target = "".join(pair)
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (file.parent / path).resolve() if path else file
        if not place.exists():
            yield f"{target}: there is no such file"
        elif anchor and place.suffix == ".md":
            inside = text if place == file else place.read_text()
            if anchor not in anchors(inside):
                yield f"{target}: there is no such heading"


def test_every_link_leads_somewhere():
    found = {
        f"{page.relative_to(ROOT)}: {problem}"
        for page in tracked("*.md")
        for problem in broken(page, page.read_text())
    }
    assert not found, "\n".join(sorted(found))


def test_every_page_and_picture_that_is_mentioned_exists():
    """In comments, docstrings, messages and recipes."""
    found = {
        f"{file.relative_to(ROOT)}: {mention}"
        for file in tracked("*.py", "*.toml", "*.sh", "*.yaml", "*.md")
        for mention in MENTION.findall(file.read_text())
        if not (ROOT / mention).exists() and mention not in OTHERS
        if file.name not in ("test_links.py", "CHANGELOG.md")
    }
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("[a](there.md)", ""),
        ("[a](there.md#a-b)", ""),
        ("[a](#own)", ""),
        ("[a](https://x.y/gone.md)", ""),
        ("`[a](gone.md)`", ""),
        ("```\n[a](gone.md)\n```", ""),
        ("[a](gone.md)", "gone.md: there is no such file"),
        ('<img src="gone.png">', "gone.png: there is no such file"),
        ("[a](there.md#c)", "there.md#c: there is no such heading"),
        ("[a](#b)", "#b: there is no such heading"),
    ],
)
def test_what_leads_nowhere_is_found(tmp_path, link, problem):
    (tmp_path / "there.md").write_text("# A, `B`\n")
    page = tmp_path / "page.md"
    page.write_text("")
    assert "".join(broken(page, f"# Own\n{link}\n")) == problem
