"""Image counts and text lengths of real interleaved documents, for benchmarks without data.

`gimp_help_documents.json` has the text lengths and images of every training page of the manual that
`scripts/prepare_data.py gimp_help` prepares, without text and pixels. It was written by

    python scripts/prepare_data.py gimp_help smollm2_135m
    python benchmarks/documents.py data
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet
from transformers import AutoTokenizer

from torchmm.common.files import read_prepared_manifest
from torchmm.data.steps.packing import pack_all

FILE = Path(__file__).with_name("gimp_help_documents.json")
OPEN_PACKS = 32
IMAGE = 0
"""Marker of an image in a document; other numbers are tokens of a run of text."""


class Sample(NamedTuple):
    """Document in a microbatch, truncated to fit."""

    images: int
    tokens: int
    """Text and images."""


class Documents(NamedTuple):
    """Pages in the order of the dataset."""

    source: str
    """Name, version, license and tokenizer, for reports."""
    pages: list[list[int]]


def load_documents() -> Documents:
    """Return the committed pages."""
    content = json.loads(FILE.read_text())
    return Documents(content["source"], content["documents"])


def pack_documents(
    documents: Documents, tokens: int, image_tokens: int, shorten: int = 1, seed: int = 0
) -> list[list[Sample]]:
    """Return all pages in random order, packed into microbatches as in training.

    Args:
        tokens: Tokens per microbatch.
        image_tokens: Tokens per image.
        shorten: Divisor of text lengths, for microbatches that are scaled down.
    """
    pages = list(documents.pages)
    random.Random(seed).shuffle(pages)
    cut = [truncate(page, tokens, image_tokens, shorten) for page in pages]
    samples = [sample for sample in cut if sample.tokens]
    packs = pack_all([sample.tokens for sample in samples], tokens, OPEN_PACKS, flush=False)
    return [[samples[i] for i in pack] for pack in packs]


def truncate(page: Sequence[int], limit: int, image_tokens: int, shorten: int) -> Sample:
    """Return the longest prefix of a page that fits, without partial images.

    `torchmm.data.media.text` truncates in the same way.

    """
    images = length = 0
    for run in page:
        size = image_tokens if run == IMAGE else -(-run // shorten)
        if length + size > limit:
            return Sample(images, length if run == IMAGE else limit)
        length += size
        images += run == IMAGE
    return Sample(images, length)


def main() -> None:
    """Write the file of pages from prepared data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="directory of the data from prepare_data.py")
    data = parser.parse_args().data
    manifest = read_prepared_manifest(data)["gimp_help"]
    tokenizer = AutoTokenizer.from_pretrained(data / "smollm2_135m", trust_remote_code=False)
    pages = []
    for file in sorted((data / "gimp_help" / "train").glob("*.parquet")):
        texts = pyarrow.parquet.read_table(file, columns=["texts"])["texts"].to_pylist()
        pages += [[IMAGE if t is None else len(tokenizer(t).input_ids) for t in p] for p in texts]
    package = manifest["packages"][0]
    source = (
        f"{package['name']} {package['version']} (Debian; {manifest['license']}), training pages, "
        "text lengths in tokens of SmolLM2"
    )
    lines = ",\n".join(json.dumps(page) for page in pages)
    FILE.write_text(f'{{"source": {json.dumps(source)},\n"documents": [\n{lines}\n]}}\n')
    print(f"wrote {FILE}: {len(pages)} pages, {sum(p.count(IMAGE) for p in pages)} images")


if __name__ == "__main__":
    main()
