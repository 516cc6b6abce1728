"""scripts/generate.py: accepted inputs, rejected arguments, and equality of question formats."""

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
from torchmm.recipe.model_section import COMPONENTS_FILE, FreezeConfig, ModelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.training.export.checkpoint import export_checkpoint
from torchmm.training.pipeline import Pipeline

SCRIPT = Path(__file__).parents[4] / "scripts" / "generate.py"
SAMPLED = ["--temperature", "1.5", "--max-new-tokens", "8"]
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
                parameter.mul_(5)  # make the output depend on the prompt
    export_hf(model, directory, AutoTokenizer.from_pretrained(tokenizer))
    return directory


def _write_images(folder: Path) -> list[Path]:
    images = [folder / "red.png", folder / "blue.jpg"]
    for image in images:
        Image.new("RGB", (40, 30), image.stem).save(image)
    return images


@pytest.mark.parametrize("connector", ["mlp", "pixel_shuffle_mlp"])
def test_generate_prints_one_line_per_image(connector, tmp_path, real_data, train_server):
    _export(tmp_path / "hf", real_data / "tokenizer", connector)
    assert (tmp_path / "hf" / COMPONENTS_FILE).exists() == (connector == "pixel_shuffle_mlp")
    images = _write_images(tmp_path)
    arguments = [tmp_path / "hf", *images, "--max-new-tokens", "3"]
    codes, output = train_server.run(arguments, tmp_path / "log", script=SCRIPT)
    assert codes == [0], output
    lines = [line for line in output.splitlines() if line.startswith(str(tmp_path))]
    assert [line.split(":")[0] for line in lines] == [str(p) for p in images]


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
    """Return a function that runs the script on the run directory and returns the printed lines."""

    def with_arguments(
        *arguments: object, model: Path = exported.parent, code: int = 0, inputs: Sequence[str] = ()
    ) -> list[str]:
        lines = iter(inputs)

        def line(_: str) -> str:
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", line)
        argv = ["generate.py", model, *arguments]
        monkeypatch.setattr("sys.argv", [str(argument) for argument in argv])
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


def test_prompts_apply_to_each_file_or_all_files(run: Run, tmp_path: Path) -> None:
    images = _write_images(tmp_path)
    arguments = ["--prompt", "a", "--prompt", "the color", *SAMPLED, "--json"]
    each = [json.loads(line) for line in run(*images, *arguments)]
    assert [actual["asked"] for actual in each] == [
        f"{p} {w}" for p in images for w in arguments[1:4:2]
    ]
    one = run(images[1], *arguments, "--batch-size", 1)
    assert len(one) == 2
    joint = [json.loads(line) for line in run(*images, *arguments, "--all-files")]
    assert [actual["asked"] for actual in joint] == [
        f"{images[0]} {images[1]} {w}" for w in arguments[1:4:2]
    ]


def test_generated_text_depends_on_seed_only(run: Run) -> None:
    arguments = ["--prompt", "one", "--prompt", "two of", "--prompt", "three", *SAMPLED]
    batched = run(*arguments, "--seed", 3)
    assert [line.split(":")[0] for line in batched] == ["one", "two of", "three"]
    assert run(*arguments, "--seed", 3, "--batch-size", 2) == batched
    assert run(*arguments, "--seed", 4) != batched


def test_stream_prints_same_text(run: Run) -> None:
    arguments = ["--prompt", "one", *SAMPLED]
    [full] = run(*arguments)
    assert "\n".join(run(*arguments, "--stream")) == full.removeprefix("one: ")


def test_progress_is_shown_until_first_token(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also that no progress is shown afterwards."""
    console_output = io.StringIO()
    monkeypatch.setattr(generate, "make_console", lambda **_: Console(file=console_output))
    monkeypatch.setattr(log, "QUIET_S", 0.02)
    monkeypatch.setattr(log, "POLL_S", 0.01)
    logits = Pipeline.next_token_logits

    def slow(*arguments: Any) -> Any:
        time.sleep(0.2)
        return logits(*arguments)

    monkeypatch.setattr(Pipeline, "next_token_logits", slow)
    arguments_of_run = ["--max-new-tokens", "4"]
    for arguments in (["--prompt", "one", "--stream"], ["--chat"]):
        run(*arguments, *arguments_of_run, inputs=["one"])
        assert "reading prompts: 0 s" in console_output.getvalue()
        assert "writing" not in console_output.getvalue()
        console_output.truncate(0)
    run("--prompt", "one", *arguments_of_run)
    assert (
        "writing: " in console_output.getvalue()
        and "reading prompts" not in console_output.getvalue()
    )


def test_question_formats_generate_same_text(run: Run, tmp_path: Path) -> None:
    image, _ = _write_images(tmp_path)
    [by_template] = run(image, "--prompt", "What is it?", "--template", *SAMPLED, "--json")
    text = json.loads(by_template)["text"]
    content = [{"type": "image", "image": image.name}, {"type": "text", "text": "What is it?"}]
    question = {"role": "user", "content": content}
    (tmp_path / "one.json").write_text(json.dumps([question]))
    chats = [
        {"messages": [question, {"role": "assistant", "content": "Old."}]},
        {
            "image": image.name,
            "conversations": [{"from": "human", "value": "<image>What is it?"}],
        },
    ]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    [single] = run("--chats", tmp_path / "one.json", *SAMPLED, "--json")
    assert json.loads(single)["text"] == text
    first, second = (json.loads(line) for line in run("--chats", tmp_path / "two.jsonl", "--json"))
    assert first["text"] == second["text"]  # greedy decoding of the same prompt
    inputs = [f"/file {image}", "What is it?", "/end"]
    assert "\n".join(run("--chat", *SAMPLED, inputs=inputs)) == text


def test_chat_includes_earlier_responses(run: Run) -> None:
    inputs = ["Hello", "And now?"]
    continued = run("--chat", *SAMPLED, inputs=inputs)
    restarted = run("--chat", *SAMPLED, inputs=[inputs[0], "/new", inputs[1]])
    assert continued[0] == restarted[0] and continued != restarted


def test_checkpoint_generates_same_text_as_export(
    run: Run, real_data: Path, tmp_path: Path
) -> None:
    """Check adapters, which the export has merged."""
    config = _config("mlp").model_copy(update={"tokenizer": str(real_data / "tokenizer")})
    table = {"model": config.model_dump(), "adapters": {"adapter": {"modules": ["llm"], "rank": 2}}}
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
    arguments = [*_write_images(tmp_path), "--prompt", "one", *SAMPLED]
    expected = run(*arguments, model=tmp_path / "hf")
    assert run(*arguments, model=run_dir) == expected
    assert run(*arguments, model=run_dir / "checkpoints" / "step-3") == expected
    assert run(*arguments) != expected


@pytest.mark.parametrize(("target", "suffix"), [("latents", "png"), ("videos", "gif")])
def test_images_are_generated_from_prompts(
    target: str, suffix: str, run: Run, real_data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("diffusers")
    config = latent_config() if target == "latents" else generator_config(encoder=None)
    table = config.model_dump() | {"tokenizer": str(real_data / "tokenizer")}
    table["llm"]["config"]["vocab_size"] = 4096
    table["generator"]["frames"] = 3 if target == "videos" else 1
    recipe = Recipe.model_validate({"model": table})
    model = recipe_model(recipe)
    materialize(model, "cpu")
    init_weights(model, 0)
    randomize(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    run_dir = tmp_path / "run"
    with make_manager(run_dir, table=recipe.model_dump(mode="json"), async_save=False) as saver:
        saver.save(3, model, optimizer, {})
    arguments = ["--prompt", "one", "--prompt", "two", "--denoising-steps", 2, "--generate-images"]

    def generate_files(name: str, *more: object) -> list[bytes]:
        lines = run(*arguments, tmp_path / name, *more, model=run_dir)
        files = [tmp_path / name / f"{number}.{suffix}" for number in range(2)]
        assert lines == [f"one: {files[0]}", f"two: {files[1]}"]
        for file in files:
            with Image.open(file) as image:
                assert image.size == (16, 16)
                assert getattr(image, "n_frames", 1) == (3 if target == "videos" else 1)
        return [file.read_bytes() for file in files]

    first = generate_files("first")
    assert generate_files("again") == first and first[0] != first[1]
    assert not set(generate_files("other", "--seed", 4)) & set(first)


def test_generate_opens_text_only_export(run: Run, tmp_path: Path, real_data: Path) -> None:
    export = _export(tmp_path / "run" / "hf", real_data / "tokenizer", encoders={})
    for model in (export, export.parent):
        lines = run("--prompt", "one", "--max-new-tokens", "3", model=model)
        assert len(lines) == 1 and lines[0].startswith("one: ")


def test_files_have_type_of_their_suffix(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.PNG", "b.wav", "c.mp4", "d.flac")]
    for file in files:
        file.touch()
    image, audio, video, flac = map(str, files)
    record = make_request(files, "What?").record
    named = {"images": [image], "audios": [audio, flac], "videos": [video]}
    assert record == {**named, "prompt": "What?", "completion": "?"}
    types = [part["type"] for part in content_parts(files, "What?")]
    assert types == ["image", "audio", "video", "audio", "text"]


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
        (["--prompt", "one", "--generate-images", "images"], "this model has no generator"),
        (["--chat", "--generate-images", "images"], "requires text prompts"),
    ],
)
def test_invalid_arguments_are_rejected(run: Run, arguments: list[str], problem: str) -> None:
    unreadable = ("no text in the loss in the first 16", "no such file", "absent.json")
    code = 3 if problem.startswith(unreadable) else 2
    assert problem in "\n".join(run(*arguments, code=code))
