"""Runs with new tokens: equal in all layouts, resumed in others, and exported to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from tiny_recipe import records
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.slow
NEW = [f"<loc_{index}>" for index in range(3)]
LLM = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard": (2, {"shard": 2}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "context": (2, {"llm": {"context": 2}}),
}
ADAPTERS = {"low": {"modules": ["llm"], "rank": 4, "alpha": 8.0}}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [f"A number {n % 4} {NEW[n % 3]} of words{NEW[n % 2]}." for n in range(40)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def base(tmp_path_factory, real_data):
    """Return a function that saves a pretrained model without the new tokens."""

    def save(*, tied: bool, spare_rows: int = 0) -> Path:
        tokenizer = AutoTokenizer.from_pretrained(real_data / "tokenizer")
        torch.manual_seed(0)
        rows = len(tokenizer) + spare_rows
        config = LlamaConfig(**LLM, vocab_size=rows, tie_word_embeddings=tied)
        directory = tmp_path_factory.mktemp("base")
        LlamaForCausalLM(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory

    return save


@pytest.fixture(scope="module")
def train(tmp_path_factory, texts, train_server):
    """Return a function that trains, and returns the directory of the run."""
    parent = tmp_path_factory.mktemp("runs")

    def run(name: str, source: Path, ranks: int = 1, **sections: Any) -> Path:
        recipe = {
            "name": name,
            "output_dir": str(parent),
            "model": {"llm": {"source": str(source)}, "new_tokens": NEW},
            "data": {
                "workers": 0,
                "index_cache_dir": str(parent / "index"),
                "sources": [{"path": str(texts)}],
            },
            "training": {
                "steps": 3,
                "global_batch_size": 4,
                "sequence_length": 64,
                **sections.pop("training", {}),
            },
            "optimizer": {"lr": 2e-3, "eps": 1e-3, "lr_schedule": "constant", "weight_decay": 0.1},
            "checkpoint": {"interval": 1, "export_hf": True},
            **sections,
        }
        file = parent / f"{name}.toml"
        file.write_text(tomli_w.dumps(recipe))
        log = parent / f"log-{len(list(parent.iterdir()))}"
        codes, output = train_server.run(["--config", file], log, ranks)
        assert codes == [0] * ranks, output
        return parent / name

    return run


def weights_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "hf" / "model.safetensors")


def assert_equal(found: Path, expected: Path) -> None:
    for ours, theirs in zip(records(found), records(expected), strict=True):
        for metric in ("loss", "grad_norm"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-5)
    actual = weights_of(found)
    for name, value in weights_of(expected).items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adapters", [{}, ADAPTERS])
@pytest.mark.parametrize(
    "layouts",
    [("tensor", "pipeline"), pytest.param(("shard", "context"), marks=pytest.mark.campaign)],
    ids=" and ".join,
)
def test_new_tokens_are_equal_in_layouts(train, base, layouts, tied, adapters):
    source = base(tied=tied)
    name = f"{'tied' if tied else 'untied'}{'-low' if adapters else ''}-{layouts[0]}"
    single = train(name, source, adapters=adapters)
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    known = len(before["lm_head.weight"])
    after = weights_of(single)
    assert len(after["model.embed_tokens.weight"]) == known + len(NEW)
    for weight in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        is_frozen = torch.equal(after[weight][:known], before[weight])
        assert is_frozen == bool(adapters), weight
        mean = before[weight].mean(0)
        assert (after[weight][known:] - mean).norm(dim=1).min() > 1e-3
    for layout in layouts:
        ranks, sizes = LAYOUTS[layout]
        assert_equal(
            train(f"{name}-{layout}", source, ranks, adapters=adapters, parallel=sizes), single
        )
    if adapters:
        assert not (single / "adapters").exists()


def test_padded_vocabulary_is_used_first(train, base):
    source = base(tied=False, spare_rows=13)
    single = train("spare", source, adapters=ADAPTERS)
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()["lm_head.weight"]
    after = weights_of(single)["lm_head.weight"]
    assert after.shape == before.shape
    changed = (after != before).any(1).nonzero().flatten().tolist()
    known = len(before) - 13
    assert changed == [known, known + 1, known + 2]
    assert_equal(
        train("spare-tensor", source, 2, adapters=ADAPTERS, parallel={"tensor": 2}), single
    )


def test_checkpoint_resumes_in_other_layout(train, base):
    source = base(tied=True)
    whole = train("whole", source, adapters=ADAPTERS, training={"steps": 4})
    train("parts", source, 2, adapters=ADAPTERS, training={"steps": 2}, parallel={"tensor": 2})
    parts = train(
        "parts", source, 2, adapters=ADAPTERS, training={"steps": 4}, parallel={"shard": 2}
    )
    assert [record["step"] for record in records(parts)] == [1, 2, 3, 4]
    assert_equal(parts, whole)


def test_transformers_generates_new_tokens(train, base, texts, tmp_path):
    run_dir = train(
        "generate",
        base(tied=False),
        training={"steps": 150},
        data={"workers": 0, "sources": [{"path": str(texts)}]},
        optimizer={"lr": 1e-2, "lr_schedule": "constant"},
        checkpoint={"export_hf": True},
    )
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    assert model.config.vocab_size == len(tokenizer)
    lines = [json.loads(line)["text"] for line in texts.read_text().splitlines()[:2]]
    for line in lines:
        prompt = tokenizer(line.partition(" <loc")[0], return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(output[0], skip_special_tokens=True)
        assert any(token in text for token in NEW), text
