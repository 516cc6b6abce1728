"""Published data formats, written from test images, with train.py and the data inspector."""

import io
import json
import runpy
import shutil
from pathlib import Path

import datasets
import pytest
from chat_templates import QWEN3
from PIL import Image
from tiny_recipe import ROOT, arguments, records

pytestmark = pytest.mark.slow
INSPECT = runpy.run_path(str(ROOT / "scripts/inspect_data.py"))["main"]
SAMPLES = 24
STEPS = {
    "training.steps": 2,
    "training.global_batch_size": 4,
    "optimizer.warmup_steps": 1,
    "validation.interval": 0,
    "validation.num_samples": 0,
}
CHAT = [
    {"role": "user", "content": "What is this?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "look", "arguments": '{"times": 2}'}}
        ],
    },
    {"role": "tool", "name": "look", "content": "it moves"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks again",
        "parameters": {"type": "object", "properties": {"times": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def published(tmp_path_factory, real_data) -> Path:
    """Write the same images as LLaVA JSON, Cauldron parquet and agent chats."""
    root = tmp_path_factory.mktemp("published")
    files = sorted((real_data / "tuxpaint_stamps/train").glob("*.parquet"))
    table = datasets.load_dataset("parquet", data_files=[str(f) for f in files], split="train")
    rows = table.with_format("arrow")[:SAMPLES].to_pylist()
    conversations, pairs, chats = [], [], []
    for number, row in enumerate(rows):
        name = f"{number}.png"
        Image.open(io.BytesIO(row["image"]["bytes"])).save(root / name)
        messages = [("human", "<image>\nDescribe it."), ("gpt", row["text"])]
        turns = [{"from": who, "value": text} for who, text in messages]
        conversations.append({"id": str(number), "image": name, "conversations": turns})
        pair = {"user": "Describe it.", "assistant": row["text"], "source": "stamps"}
        pairs.append({"images": [row["image"]], "texts": [pair]})
        answer = {"role": "assistant", "content": row["text"]}
        chats.append({"messages": [*CHAT, answer], "tools": [TOOL]})
    (root / "llava.json").write_text(json.dumps(conversations))
    datasets.Dataset.from_list(pairs).to_parquet(root / "cauldron.parquet")
    (root / "agent.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    shutil.copytree(real_data / "tokenizer", root / "agent_tokenizer")
    (root / "agent_tokenizer/chat_template.jinja").write_text(QWEN3)
    return root


@pytest.fixture
def train(tmp_path, published, real_data, train_server):
    """Return a function that trains a recipe on a published file for two steps."""

    def run(name, file, *changes, recipe=None):
        values = {**STEPS, "name": name, "output_dir": tmp_path, "data.workers": 0}
        values |= {"data.index_cache_dir": tmp_path / "index", "parallel.pipeline": 1}
        command = (
            ["--config", str(ROOT / recipe), "--data.validation=[]"]
            if recipe
            else arguments(tmp_path / name, real_data, data__validation="[]")
        )
        command += [f"--{key}={value}" for key, value in values.items()]
        command += [f'--data.sources=[{{path="{published / file}"}}]', *changes]
        codes, output = train_server.run(command, tmp_path / f"{name}-log")
        assert codes == [0], output
        assert [record["step"] for record in records(tmp_path / name)] == [1, 2]
        return tmp_path / name, output

    return run


def test_llava_stages_train_on_llava_json(train, real_data):
    tokenizer = f"--model.tokenizer={real_data / 'tokenizer'}"
    export = "--checkpoint.export_hf=true"
    llm, _ = train("llm", "llava.json", tokenizer, export, recipe="recipes/tiny/llava_llm.toml")
    source = f"--model.llm.source={llm / 'hf'}"
    first, log = train(
        "first", "llava.json", tokenizer, export, source, recipe="recipes/tiny/llava_connector.toml"
    )
    assert f"llava.json {SAMPLES}; 0 corrupt" in log
    assert "1.00 images, tiles, frames or audio clips per sample" in log
    source = f"--model.source={first / 'hf'}"
    second, _ = train("second", "llava.json", tokenizer, source, recipe="recipes/tiny/llava.toml")
    losses = [records(run)[-1]["loss"] for run in (llm, first, second)]
    assert all(0 < loss < 10 for loss in losses)


def test_cauldron_parquet_trains(train):
    _, log = train("cauldron", "cauldron.parquet")
    assert f"cauldron.parquet {SAMPLES}; 0 corrupt" in log


def test_agent_chats_train_on_calls_and_answers(train, published, tmp_path):
    tokenizer = f"--model.tokenizer={published / 'agent_tokenizer'}"
    length = "--training.sequence_length=1024"
    directory, _ = train("agent", "agent.jsonl", tokenizer, length)
    recipe = directory / "recipe.toml"
    assert INSPECT(["--config", str(recipe), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page/index.html").read_text()
    targets = page.split('<span class="loss">')[2:]  # the first one is the legend
    calls, answers = targets[::2], targets[1::2]
    assert all(call.split("</span>")[0].count("&quot;look&quot;") == 1 for call in calls)
    assert not any("it moves" in text.split("</span>")[0] for text in targets)
    assert len(calls) == len(answers) > 1
