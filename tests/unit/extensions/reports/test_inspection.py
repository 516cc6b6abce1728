"""The data inspection matches the data that a run reads."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from data_cases import CLIP, NAFLEX, QWEN, png, write_jsonl
from tiny_recipe import QUICKSTART

from torchmm.data.record_formats.sample import Record, SampleOptions
from torchmm.data.sources.reader import SampleReader
from torchmm.extensions.reports.inspection.encoder_images import displayed_images
from torchmm.extensions.reports.inspection.findings import split_token_spans
from torchmm.recipe.data_section import DataConfig

ROOT = Path(__file__).parents[4]
INSPECT = runpy.run_path(str(ROOT / "scripts/inspect_data.py"))["main"]


@pytest.mark.parametrize(
    ("spec", "width", "height"), [(CLIP, 16, 16), (NAFLEX, 32, 24), (QWEN, 16, 24)]
)
def test_prepared_image_is_shown_without_loss(tokenizer, text_spec, spec, width, height):
    reader = SampleReader(DataConfig(), 64, text_spec, {"vision": spec}, tokenizer)
    file = png(width, height)  # a size that no processor changes
    sample = reader.read(Record({"image": file, "text": "a dog"}))
    original, prepared = displayed_images(reader, file, sample.images[0])
    assert prepared.size == (width, height)
    assert np.abs(np.asarray(original, int) - np.asarray(prepared, int)).max() <= 1


def test_token_runs_show_loss_mask(tokenizer, text_spec):
    reader = SampleReader(DataConfig(), 64, text_spec, {"vision": CLIP}, tokenizer)
    options = SampleOptions(prompt="picture of ")
    record = Record({"image": png(16, 16), "text": "a red dog"}, options=options)
    sample = reader.read(record)
    runs = split_token_spans(sample.text, [i.tokens for i in sample.images], tokenizer)
    assert [(r.text, r.loss, r.image) for r in runs] == [
        ("<s>", False, None), ("", False, 0), ("picture of ", False, None),
        ("a red dog</s>", True, None),
    ]  # fmt: skip
    assert sum(r.tokens for r in runs) == len(sample.text.ids)


@pytest.fixture
def inspect(tmp_path, tokenizer):
    """Return a function that runs the script and returns its exit code and the HTML page."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def run(rows, *arguments):
        file = write_jsonl(tmp_path / "rows.jsonl", rows)
        code = INSPECT(
            [
                *("--config", str(QUICKSTART), "--out", str(tmp_path / "page"), *arguments),
                f'--data.sources=[{{path="{file}", name="mine"}}]',
                "--data.validation=[]",
                *("--model.tokenizer", str(tmp_path / "tokenizer")),
                *("--training.sequence_length", "24"),
            ]
        )
        page = tmp_path / "page/index.html"
        return code, page.read_text() if page.exists() else ""

    return run


def rows(tmp_path, count):
    (tmp_path / "a.png").write_bytes(png(40, 30))
    return [{"image": "a.png", "text": "a red dog"} for _ in range(count)]


def test_inspection_shows_samples_and_rejected_records(inspect, tmp_path, capsys):
    chat = [{"role": "user", "content": "two <b>?"}, {"role": "assistant", "content": "red"}]
    good = [*rows(tmp_path, 3), {"messages": chat}, {"text": "dogs in the sun " * 20}]
    bad = [{"image": "b.png", "text": "a"}, {"image": "c.png", "text": "a"}, {"words": 1}]
    code, page = inspect([*good, *bad])
    assert code == 0
    printed = capsys.readouterr().out
    assert "8 (of 8 records), 3 rejected" in printed and "caption x4, messages x1" in printed
    assert "20.0% of samples" in printed  # the last text is longer than the sequence length
    assert "words" in printed and "b.png" in printed and "rows.jsonl:8" in printed
    line = next(line for line in printed.splitlines() if "rows.jsonl:8" in line)
    assert line.count("rows.jsonl") == 1 and "[7]" not in line
    assert '<span class="loss">a red dog&lt;/s&gt;</span>' in page
    assert "two &lt;b&gt;?" in page and "<b>?" not in page
    assert page.count("data:image/png;base64,") == 6  # before and after preprocessing
    assert "<td>2</td>" in page  # two missing files have one reason


def test_inspection_limit_samples_full_source(inspect, tmp_path, capsys):
    texts = [{"text": f"dogs {number}"} for number in range(100)]
    _, page = inspect(texts, "--limit", "3", "--samples", "3")
    assert "3 (of 100 records)" in capsys.readouterr().out
    assert [f"dogs {n}&lt;/s&gt;" in page for n in (0, 1, 49, 99)] == [True, False, True, True]


def test_inspection_of_unusable_source_fails(inspect, capsys):
    code, page = inspect([{"words": 1}])
    assert code == 3 and not page
    assert "none of its 1 records that were read is usable" in capsys.readouterr().err


def test_inspection_names_missing_paths_before_reading(tmp_path, capsys):
    sources = f'--data.sources=[{{path="{tmp_path / "none"}"}}]'
    words = ["--config", str(QUICKSTART), "--out", str(tmp_path / "page")]
    assert INSPECT([*words, sources, "--data.validation=[]"]) == 2
    printed = capsys.readouterr().err
    assert "data.sources[0].path" in printed and "no such file or directory" in printed
    assert "loading torch" not in printed and not (tmp_path / "page").exists()


def test_inspection_counts_match_tokenizer(inspect, tmp_path, tokenizer, capsys):
    inspect(rows(tmp_path, 2))
    printed = capsys.readouterr().out
    loss_tokens = len(tokenizer("a red dog").input_ids) + 1  # text and end token
    other_tokens = 1 + 16  # <s> and placeholders of the quickstart encoder
    assert (
        f"{loss_tokens / (loss_tokens + other_tokens):.1%}" in printed
        and f"most {loss_tokens + other_tokens}" in printed
    )
    assert "mean 1.00, max 1, 16 tokens each" in printed


def test_inspection_counts_filtered_and_dropped_content(inspect, tmp_path, capsys):
    long = "dogs in the sun " * 20
    prompt = [{"role": "user", "content": long}, {"role": "assistant", "content": "red"}]
    _, page = inspect([*rows(tmp_path, 2), {"text": long}, {"messages": prompt}])
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 (of 4 records), 0 rejected" in printed
    limit = "no text in the loss within training.sequence_length"
    assert f"filtered 1 (25.0%): {limit}" in printed and limit in page
    assert "filtered: " in printed and "rows.jsonl:4" in printed
    assert "mine[3]" not in printed and "raise it, or shorten the prompt" in printed
    dropped = "1 samples truncated at training.sequence_length (33.3%)"
    assert dropped in printed and dropped in page


def test_inspection_estimates_epochs_like_runs(inspect, tmp_path, capsys):
    """Inspect 60 samples of 22 tokens: one per sequence of 24, four sequences per step."""
    many = rows(tmp_path, 60)
    code, _ = inspect(many, "--training.steps=2000", "--training.global_batch_size=4")
    printed = " ".join(capsys.readouterr().out.split())
    assert code == 0 and "one epoch of the training data is about 15 steps" in printed
    assert "warning: the run reads its training data 133 times" in printed
    inspect(many, "--training.epochs=2", "--training.global_batch_size=4")
    assert "training.epochs = 2: about 30 steps" in capsys.readouterr().out


def test_inspection_reports_each_record_once(inspect, tmp_path, capsys):
    long = {"text": "a", "prompt": "red dog " * 40, "completion": "x"}
    code, _ = inspect([*rows(tmp_path, 3), {"image": "b.png", "text": "c"}, long])
    out = " ".join(capsys.readouterr().out.split())
    assert code == 0 and "training.sequence_length = 24" in out and "16,777,216" not in out
    assert out.count("rows.jsonl:4") == 1 and "mine[3]" not in out


@pytest.mark.parametrize(
    ("fraction", "answer"), [("0.5", "allow this number"), ("0.1", "end a run")]
)
def test_inspection_decodes_and_checks_limits(fraction, answer, inspect, tmp_path, capsys):
    actual = rows(tmp_path, 3)
    full = png(400, 300)
    (tmp_path / "half.png").write_bytes(full[: len(full) // 2])
    actual.append({"image": "half.png", "text": "a dog"})
    inspect(actual, "--samples", "1")
    assert "are corrupt" not in capsys.readouterr().out
    inspect(actual, "--samples", "1", "--decode", "--data.max_corrupt_fraction", fraction)
    out = " ".join(capsys.readouterr().out.split())
    assert "about 1 of 4 samples are corrupt (25.0%)" in out and answer in out
    assert "rows.jsonl:4: image cannot be decoded" in out
