"""Interleaved documents of text and screenshots from the user manual gimp-help-en."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import datasets

from torchmm.extensions.demo_data.manifest import new_directory, record_data_set
from torchmm.extensions.demo_data.packages import download_debian_package, extract_debian
from torchmm.extensions.demo_data.parquet_files import write_splits

PACKAGE = "gimp-help-en"
COPYRIGHT_PACKAGE = "gimp-help-common"
LICENSE = "GFDL-NIV-1.2+"
SKIPPED_CLASSES = {"navheader", "navfooter", "toc"}
BLOCKS = {"p", "div", "li", "dt", "dd", "tr", "h1", "h2", "h3", "h4", "h5", "br", "pre"}
VOID = {"img", "br", "hr", "meta", "link", "input", "col"}
FEATURES = datasets.Features(
    {
        "images": datasets.List(datasets.Image()),
        "texts": datasets.List(datasets.Value("string")),
        "file": datasets.Value("string"),
    }
)


def prepare(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/gimp_help: one interleaved sample per page, split by page.

    Args:
        output: Directory of all sets.
        packages: Directory of downloaded packages.
        options: None are known.
    """
    manual = download_debian_package(PACKAGE, packages)
    common = download_debian_package(COPYRIGHT_PACKAGE, packages)
    with tempfile.TemporaryDirectory() as unpacked:
        root = Path(unpacked)
        extract_debian(manual, root)
        extract_debian(common, root)
        rows = list(_rows(root / "usr/share/gimp/2.0/help/en"))
        with new_directory(output / "gimp_help") as directory:
            counts = write_splits(directory, rows, FEATURES)
            copyright_file = root / f"usr/share/doc/{COPYRIGHT_PACKAGE}/copyright"
            shutil.copy(copyright_file, directory / "COPYRIGHT")
    counts["images"] = sum(image is not None for row in rows for image in row["images"])
    details = {"options": options, "counts": counts}
    record_data_set(output, "gimp_help", [manual, common], LICENSE, details)


def _rows(pages: Path) -> Iterator[dict[str, Any]]:
    for page in sorted(pages.glob("*.html")):
        elements = page_elements(page.read_text("utf-8", errors="replace"))
        images: list[dict[str, Any] | None] = []
        texts: list[str | None] = []
        for kind, value in elements:
            if kind == "text":
                images.append(None)
                texts.append(value)
            elif (pages / value).is_file():
                images.append({"bytes": (pages / value).read_bytes(), "path": None})
                texts.append(None)
        if any(texts):
            yield {"images": images, "texts": texts, "file": page.name}


def page_elements(html: str) -> list[tuple[str, str]]:
    """Return ("text", paragraphs) and ("image", relative path) in reading order."""
    parser = _PageParser()
    parser.feed(html)
    parser.close()
    parser.end_text()
    return parser.elements


class _PageParser(HTMLParser):
    """Parser of text and images of the body, without navigation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, str]] = []
        self._text: list[str] = []
        self._in_body = False
        self._skipped_depth = 0
        """Number of open tags since the start of a skipped element, 0 outside skipped elements."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self._in_body = self._in_body or tag == "body"
        classes = set((attributes.get("class") or "").split())
        if self._skipped_depth or classes & SKIPPED_CLASSES:
            self._skipped_depth += tag not in VOID
        elif tag in BLOCKS:
            self._text.append("\n")
        elif tag == "img" and self._in_body:
            self.end_text()
            self.elements.append(("image", attributes.get("src") or ""))

    def handle_endtag(self, tag: str) -> None:
        if self._skipped_depth:
            self._skipped_depth -= tag not in VOID
        elif tag in BLOCKS:
            self._text.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_body and not self._skipped_depth:
            self._text.append(re.sub(r"\s+", " ", data))

    def end_text(self) -> None:
        lines = (" ".join(line.split()) for line in "".join(self._text).split("\n"))
        text = "\n".join(line for line in lines if line)
        self._text = []
        if text:
            self.elements.append(("text", text))
