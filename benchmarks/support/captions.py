"""Image-caption samples for benchmarks: the prepared dataset, or similar synthetic samples."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

DATA = Path(__file__).parents[2] / "data"
IMAGE_TOKEN = "<image>"

_WORDS = 2000
_SYNTHETIC_SAMPLES = 711
"""Number of samples in the real training set."""


@dataclass(frozen=True)
class Captions:
    """Samples and their tokenizer."""

    records: list[dict]
    """Records with the columns image ({"bytes": ...}) and text, as `torchmm.data` reads them."""
    tokenizer: PreTrainedTokenizerBase
    source: str
    """Description of the dataset for the report."""

    def of_one_length(self) -> Captions:
        """Return the samples whose captions have the most frequent number of tokens."""
        counts = [len(self.tokenizer(r["text"]).input_ids) for r in self.records]
        commonest, _ = Counter(counts).most_common(1)[0]
        kept = [r for r, count in zip(self.records, counts, strict=True) if count == commonest]
        return Captions(kept, self.tokenizer, self.source)

    def write_parquet(self, file: Path) -> None:
        """Write the records; a record's position is its index in the file."""
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self.records), file)


def load_captions(seed: int, data: Path = DATA) -> Captions:
    """Return the training set `tuxpaint_stamps`, or synthetic samples if it is not prepared."""
    files = sorted((data / "tuxpaint_stamps" / "train").glob("*.parquet"))
    if not files or not (data / "tokenizer").is_dir():
        return _synthesize(seed)
    tables = [pyarrow.parquet.read_table(f, columns=["image", "text"]) for f in files]
    records = pyarrow.concat_tables(tables).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer", trust_remote_code=False)
    return Captions(records, tokenizer, f"tuxpaint_stamps, {len(records)} real samples")


def _synthesize(seed: int) -> Captions:
    """Return noise images with random words. Caption lengths are log-normal as in real data."""
    random = np.random.default_rng(seed)
    records = []
    for _ in range(_SYNTHETIC_SAMPLES):
        pixels = random.integers(0, 256, (64, 64, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        length = int(np.clip(np.rint(random.lognormal(np.log(4), 0.75)), 1, 64))
        words = random.integers(0, _WORDS, length)
        records.append({
            "image": {"bytes": file.getvalue()},
            "text": " ".join(f"w{word}" for word in words),
        })  # fmt: skip
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    vocabulary = [*special.values(), IMAGE_TOKEN, *(f"w{i}" for i in range(_WORDS))]
    words_only = Tokenizer(WordLevel({w: i for i, w in enumerate(vocabulary)}, "<unk>"))
    words_only.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_only, extra_special_tokens=[IMAGE_TOKEN], **special
    )
    source = f"synthetic, {len(records)} samples, caption tokens log-normal (median 4, sigma 0.75)"
    return Captions(records, tokenizer, source)
