"""scripts/generate.py: what it opens, what may be asked, and that layouts of questions agree."""

import importlib.util
import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import make_manager
from generator_cases import generator_config, latent_config
from model_cases import randomize
from PIL import Image
from rich.console import Console
from transformers import AutoTokenizer

from torchmm.commands import generate
from torchmm.common import log
from torchmm.extensions.evaluation.text.prompts import content_parts, make_request
from torchmm.models.build import build_model
from torchmm.models.hf.export import export_hf
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.model_section import PARTS_FILE, FreezeConfig, ModelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.training.export.checkpoint import export_checkpoint
from torchmm.training.pipeline import Pipeline

SCRIPT = Path(__file__).parents[4] / "scripts" / "generate.py"
DRAWN = ["--temperature", "1.5", "--max-new-tokens", "8"]
Run = Callable[..., list[str]]


def _config(connector: str) -> ModelConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    llm = {"model_type": "llama", "vocab_size": 4096, "num_attention_heads": 2, **sizes}
    vision = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, **sizes}
    encoder = {"config": {**vision, "num_attention_heads": 2}, "connector": connector}
    return ModelConfig.model_validate({"llm": {"config": llm}, "encoders": {"vision": encoder}})


def _export(directory: Path, tokenizer: Path, connector: str = "mlp", **changes: object) -> Path:
    config = _config(connector).model_copy(update=changes)
    model = build_model(config, FreezeConfig())
    materialize(model, "cpu")
    init_weights(model, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(5)  # so that texts depend on what comes before them
    export_hf(model, directory, AutoTokenizer.from_pretrained(tokenizer))
    return directory


def _pictures(folder: Path) -> list[Path]:
    pictures = [folder / "red.png", folder / "blue.jpg"]
    for picture in pictures:
        Image.new("RGB", (40, 30), picture.stem).save(picture)
    return pictures


@pytest.mark.parametrize("connector", ["mlp", "pixel_shuffle_mlp"])
def test_writes_a_line_per_image(connector, tmp_path, real_data, train_server):
    _export(tmp_path / "hf", real_data / "tokenizer", connector)
    assert (tmp_path / "hf" / PARTS_FILE).exists() == (connector == "pixel_shuffle_mlp")
    pictures = _pictures(tmp_path)
    arguments = [tmp_path / "hf", *pictures, "--max-new-tokens", "3"]
    codes, output = train_server.run(arguments, tmp_path / "log", script=SCRIPT)
    assert codes == [0], output
    lines = [line for line in output.splitlines() if line.startswith(str(tmp_path))]
    assert [line.split(":")[0] for line in lines] == [str(p) for p in pictures]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def exported(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _export(tmp_path_factory.mktemp("run") / "hf", real_data / "tokenizer")


@pytest.fixture
def run(script, exported, monkeypatch, capsys) -> Run:
    """Runs the script on the export's run directory; the lines that it prints."""

    def with_arguments(
        *arguments: object, model: Path = exported.parent, code: int = 0, said: Sequence[str] = ()
    ) -> list[str]:
        lines = iter(said)

        def line(_: str) -> str:
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", line)
        given = ["generate.py", model, *arguments]
        monkeypatch.setattr("sys.argv", [str(argument) for argument in given])
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        try:
            assert script.main() == code
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        captured = capsys.readouterr()
        return (captured.err if code else captured.out).splitlines()

    return with_arguments


def test_every_prompt_is_asked_of_every_file_or_of_all_together(run: Run, tmp_path: Path) -> None:
    pictures = _pictures(tmp_path)
    words = ["--prompt", "a", "--prompt", "the colour", *DRAWN, "--json"]
    each = [json.loads(line) for line in run(*pictures, *words)]
    assert [found["asked"] for found in each] == [
        f"{p} {w}" for p in pictures for w in words[1:4:2]
    ]
    one = run(pictures[1], *words, "--batch-size", 1)
    assert len(one) == 2
    together = [json.loads(line) for line in run(*pictures, *words, "--all-files")]
    assert [found["asked"] for found in together] == [
        f"{pictures[0]} {pictures[1]} {w}" for w in words[1:4:2]
    ]


def test_texts_depend_on_the_seed_and_not_on_how_many_are_written_at_a_time(run: Run) -> None:
    words = ["--prompt", "one", "--prompt", "two of", "--prompt", "three", *DRAWN]
    together = run(*words, "--seed", 3)
    assert [line.split(":")[0] for line in together] == ["one", "two of", "three"]
    assert run(*words, "--seed", 3, "--batch-size", 2) == together
    assert run(*words, "--seed", 4) != together


def test_a_stream_shows_what_is_otherwise_printed_at_the_end(run: Run) -> None:
    words = ["--prompt", "one", *DRAWN]
    [whole] = run(*words)
    assert "\n".join(run(*words, "--stream")) == whole.removeprefix("one: ")


def test_until_the_first_word_it_says_that_what_was_asked_is_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then nothing else between the words."""
    told = io.StringIO()
    monkeypatch.setattr(generate, "make_console", lambda **_: Console(file=told))
    monkeypatch.setattr(log, "QUIET_S", 0.02)
    monkeypatch.setattr(log, "POLL_S", 0.01)
    logits = Pipeline.next_token_logits

    def slow(*arguments: Any) -> Any:
        time.sleep(0.2)
        return logits(*arguments)

    monkeypatch.setattr(Pipeline, "next_token_logits", slow)
    words = ["--max-new-tokens", "4"]
    for arguments in (["--prompt", "one", "--stream"], ["--chat"]):
        run(*arguments, *words, said=["one"])
        assert "reading prompts: 0 s" in told.getvalue()
        assert "writing" not in told.getvalue()
        told.truncate(0)
    run("--prompt", "one", *words)
    assert "writing: " in told.getvalue() and "reading prompts" not in told.getvalue()


def test_chats_are_asked_as_a_user_asks_and_as_one_talks(run: Run, tmp_path: Path) -> None:
    picture, _ = _pictures(tmp_path)
    [by_template] = run(picture, "--prompt", "What is it?", "--template", *DRAWN, "--json")
    text = json.loads(by_template)["text"]
    content = [{"type": "image", "image": picture.name}, {"type": "text", "text": "What is it?"}]
    asked = {"role": "user", "content": content}
    (tmp_path / "one.json").write_text(json.dumps([asked]))
    chats = [
        {"messages": [asked, {"role": "assistant", "content": "Old."}]},
        {
            "image": picture.name,
            "conversations": [{"from": "human", "value": "<image>What is it?"}],
        },
    ]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    [of_one] = run("--chats", tmp_path / "one.json", *DRAWN, "--json")
    assert json.loads(of_one)["text"] == text
    first, second = (json.loads(line) for line in run("--chats", tmp_path / "two.jsonl", "--json"))
    assert first["text"] == second["text"]  # the likeliest of the same prompt
    said = [f"/file {picture}", "What is it?", "/end"]
    assert "\n".join(run("--chat", *DRAWN, said=said)) == text


def test_answers_are_part_of_what_is_said_next(run: Run) -> None:
    said = ["Hello", "And now?"]
    whole = run("--chat", *DRAWN, said=said)
    anew = run("--chat", *DRAWN, said=[said[0], "/new", said[1]])
    assert whole[0] == anew[0] and whole != anew


def test_checkpoints_write_what_their_exports_write(
    run: Run, real_data: Path, tmp_path: Path
) -> None:
    """With adapters, which the export has merged."""
    config = _config("mlp").model_copy(update={"tokenizer": str(real_data / "tokenizer")})
    table = {"model": config.model_dump(), "adapters": {"own": {"modules": ["llm"], "rank": 2}}}
    recipe = Recipe.model_validate(table)
    model = recipe_model(recipe)
    materialize(model, "cpu")
    init_weights(model, 0)
    randomize(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    run_dir = tmp_path / "run"
    with make_manager(run_dir, table=recipe.model_dump(mode="json"), async_save=False) as saver:
        saver.save(3, model, optimizer, {})
    export_checkpoint(run_dir / "checkpoints" / "step-3", tmp_path / "hf")
    words = [*_pictures(tmp_path), "--prompt", "one", *DRAWN]
    wanted = run(*words, model=tmp_path / "hf")
    assert run(*words, model=run_dir) == wanted
    assert run(*words, model=run_dir / "checkpoints" / "step-3") == wanted
    assert run(*words) != wanted


@pytest.mark.parametrize(("drawing", "ends"), [("latents", "png"), ("clips", "gif")])
def test_pictures_are_drawn_for_words(
    drawing: str, ends: str, run: Run, real_data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("diffusers")
    config = latent_config() if drawing == "latents" else generator_config(encoder=None)
    table = config.model_dump() | {"tokenizer": str(real_data / "tokenizer")}
    table["llm"]["config"]["vocab_size"] = 4096
    table["generator"]["frames"] = 3 if drawing == "clips" else 1
    recipe = Recipe.model_validate({"model": table})
    model = recipe_model(recipe)
    materialize(model, "cpu")
    init_weights(model, 0)
    randomize(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    run_dir = tmp_path / "run"
    with make_manager(run_dir, table=recipe.model_dump(mode="json"), async_save=False) as saver:
        saver.save(3, model, optimizer, {})
    asked = ["--prompt", "one", "--prompt", "two", "--denoising-steps", 2, "--generate-images"]

    def drawn(name: str, *more: object) -> list[bytes]:
        lines = run(*asked, tmp_path / name, *more, model=run_dir)
        files = [tmp_path / name / f"{number}.{ends}" for number in range(2)]
        assert lines == [f"one: {files[0]}", f"two: {files[1]}"]
        for file in files:
            with Image.open(file) as picture:
                assert picture.size == (16, 16)
                assert getattr(picture, "n_frames", 1) == (3 if drawing == "clips" else 1)
        return [file.read_bytes() for file in files]

    first = drawn("first")
    assert drawn("again") == first and first[0] != first[1]
    assert not set(drawn("other", "--seed", 4)) & set(first)


def test_generate_opens_text_only_export(run: Run, tmp_path: Path, real_data: Path) -> None:
    export = _export(tmp_path / "run" / "hf", real_data / "tokenizer", encoders={})
    for model in (export, export.parent):
        lines = run("--prompt", "one", "--max-new-tokens", "3", model=model)
        assert len(lines) == 1 and lines[0].startswith("one: ")


def test_files_are_of_the_kind_that_their_names_say(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.PNG", "b.wav", "c.mp4", "d.flac")]
    for file in files:
        file.touch()
    picture, sound, clip, other = map(str, files)
    record = make_request(files, "What?").record
    named = {"images": [picture], "audios": [sound, other], "videos": [clip]}
    assert record == {**named, "prompt": "What?", "completion": "?"}
    kinds = [part["type"] for part in content_parts(files, "What?")]
    assert kinds == ["image", "audio", "video", "audio", "text"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nothing.png"], "no such file: nothing.png"),
        ([], "no prompt; pass"),
        (["--chats", "absent.json"], "absent.json"),
        (
            ["--prompt", "word " * 60, "--max-prompt-tokens", "16"],
            "no text in the loss in the first 16 tokens",
        ),
        (["--prompt", "one", "--ema"], "is an export with fixed weights"),
        (["--prompt", "one", "--generate-images", "pictures"], "this model has no generator"),
        (["--chat", "--generate-images", "pictures"], "requires text prompts"),
    ],
)
def test_what_cannot_be_asked_is_refused(run: Run, arguments: list[str], problem: str) -> None:
    unreadable = ("no text in the loss in the first 16", "no such file", "absent.json")
    code = 3 if problem.startswith(unreadable) else 2
    assert problem in "\n".join(run(*arguments, code=code))
