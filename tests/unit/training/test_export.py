"""The script exports a checkpoint to the same files as the run."""

import contextlib
import fcntl
import json
import os
import re
import runpy
import shutil
import signal
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest
import torch
import transformers
import yaml
from chat_templates import TEMPLATES, with_template
from checkpoint_runs import make_manager
from huggingface_hub import RepoUrl
from model_cases import COMPOSITES, LLMS, composite_config, pair_config, randomize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.models.hf.adapter_files import save_adapters
from torchmm.models.hf.unfuse_experts import split_stacked_experts
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.model_section import LlmConfig, ModelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.training.export import atomic_directory
from torchmm.training.export import checkpoint as exporting
from torchmm.training.export.atomic_directory import (
    remove_unfinished,
    scratch_directory,
    write_directory_atomically,
)
from torchmm.training.export.checkpoint import (
    CheckpointWeights,
    _read_chunk_locations,
    export_checkpoint,
    read_checkpoint_recipe,
)
from torchmm.training.export.model_files import TrainingSummary, write_export

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "scripts/export.py"))
LORA = {"both": {"modules": ["llm"], "rank": 2}}


@pytest.fixture
def saved(tmp_path, real_data):
    """Return a function that saves a checkpoint and returns its model and its path."""

    def save(
        config: ModelConfig, *, change: Callable[[MultimodalModel], None] | None = None, **sections
    ) -> tuple[MultimodalModel, Path]:
        config = config.model_copy(update={"tokenizer": str(real_data / "tokenizer")})
        recipe = Recipe.model_validate({"model": config.model_dump(), **sections})
        model = recipe_model(recipe)
        materialize(model, "cpu")
        init_weights(model, 0)
        randomize(model)
        if change is not None:
            change(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        table = recipe.model_dump(mode="json")
        with make_manager(tmp_path / "run", table=table, async_save=False) as manager:
            manager.save(3, model, optimizer, {})
        return model, tmp_path / "run/checkpoints/step-3"

    return save


@pytest.fixture
def tokenizer(real_data):
    return AutoTokenizer.from_pretrained(real_data / "tokenizer")


def files(directory: Path) -> dict[str, bytes]:
    results = {str(p.relative_to(directory)): p for p in directory.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in results.items()}


def write(model: MultimodalModel, directory: Path, tokenizer, **settings) -> None:
    """Write the export as the run that saved the checkpoint."""
    recipe = read_checkpoint_recipe(directory.parent / "run/checkpoints/step-3")
    trained = TrainingSummary(recipe, 3, Path("none"))
    write_export(model, directory, tokenizer, trained, **settings)


CASES = {
    "tied": ModelConfig(llm=LlmConfig(config={**LLMS["llama"], "tie_word_embeddings": True})),
    "experts": ModelConfig(llm=LlmConfig(config=LLMS["qwen3_moe"])),
    "LLaVA": pair_config("qwen2", "clip"),
    "parts": pair_config("llama", "siglip2"),
    **{name: composite_config(name) for name in COMPOSITES if name in ("qwen2_5_vl", "gemma3")},
}


@pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
def test_exported_files_match_model_of_run(config, saved, tokenizer, tmp_path):
    model, checkpoint = saved(config)
    write(model, tmp_path / "theirs", tokenizer, shard_bytes=50_000)
    export_checkpoint(checkpoint, tmp_path / "ours", shard_bytes=50_000)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    assert any("-of-" in name for name in files(tmp_path / "ours"))
    assert {p.name for p in tmp_path.iterdir()} == {"run", "ours", "theirs"}


def test_adapters_are_exported_merged_or_separately(saved, tokenizer, tmp_path):
    model, checkpoint = saved(pair_config("llama", "clip"), adapters=LORA)
    write(model, tmp_path / "merged", tokenizer)
    save_adapters(model, tmp_path / "separate")
    export_checkpoint(checkpoint, tmp_path / "ours")
    export_checkpoint(checkpoint, tmp_path / "ours_separate", separate=True)
    assert files(tmp_path / "ours") == files(tmp_path / "merged")
    assert files(tmp_path / "ours_separate") == files(tmp_path / "separate")


def test_missing_averages_are_rejected(saved, tmp_path):
    """Check a missing average. `test_train_pipeline` checks exported averages."""
    _, checkpoint = saved(CASES["tied"])
    with pytest.raises(CheckpointError, match=r"step-3 has no averaged .* training.ema_decay"):
        export_checkpoint(checkpoint, tmp_path / "hf", averaged=True)
    assert not (tmp_path / "hf").exists()


def test_export_has_requested_dtype(saved, tmp_path):
    model, checkpoint = saved(CASES["tied"])
    export_checkpoint(checkpoint, tmp_path / "half", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "half/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    for name, value in model.llm.backbone.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16()), name


def test_export_has_end_tokens_of_run(saved, tokenizer, tmp_path):
    model, checkpoint = saved(CASES["LLaVA"])
    export_checkpoint(checkpoint, tmp_path / "hf")
    generation_config = GenerationConfig.from_pretrained(tmp_path / "hf")
    assert generation_config.eos_token_id == tokenizer.eos_token_id
    chat_tokenizer = with_template(tokenizer, TEMPLATES["chatml"])
    write(model, tmp_path / "chat", chat_tokenizer)
    answer_end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
    generation_config = GenerationConfig.from_pretrained(tmp_path / "chat")
    assert generation_config.eos_token_id == [tokenizer.eos_token_id, answer_end]
    config = AutoConfig.from_pretrained(tmp_path / "chat")
    assert config.text_config.eos_token_id == tokenizer.eos_token_id


def test_export_preserves_end_tokens_of_source(saved, tokenizer, tmp_path):
    _, checkpoint = saved(CASES["tied"])
    source = tmp_path / "source"
    export_checkpoint(checkpoint, source)
    generation = {"eos_token_id": [40, 41], "temperature": 0.7, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(generation))
    model, _ = saved(ModelConfig(llm=LlmConfig(source=str(source))))
    write(model, tmp_path / "hf", tokenizer)
    generation_config = GenerationConfig.from_pretrained(tmp_path / "hf")
    assert generation_config.eos_token_id == [40, 41, tokenizer.eos_token_id]
    assert generation_config.temperature == 0.7


def test_export_with_overflow_in_float16_raises(saved, tmp_path):
    def enlarge(model: MultimodalModel) -> None:
        model.llm.get_parameter("backbone.model.norm.weight").data[0] = 1e5

    _, checkpoint = saved(CASES["tied"], change=enlarge)
    message = r"llm.backbone.model.norm.weight has 1 values above 65,504.* use --dtype bfloat16"
    with pytest.raises(ConfigError, match=message):
        export_checkpoint(checkpoint, tmp_path / "half", dtype=torch.float16)
    assert not (tmp_path / "half").exists()
    export_checkpoint(checkpoint, tmp_path / "wide", dtype=torch.bfloat16)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert reloaded.model.norm.weight[0] == torch.tensor(1e5).bfloat16()


def test_merged_adapter_with_overflow_raises(saved, tmp_path):
    def enlarge(model: MultimodalModel) -> None:
        linear = model.llm.get_submodule("backbone.model.layers.0.mlp.down_proj")
        linear.weight.data.fill_(6e4)
        linear.lora.down.data.fill_(30.0)
        linear.lora.up.data.fill_(30.0)

    _, checkpoint = saved(pair_config("llama", "clip"), adapters=LORA, change=enlarge)
    with pytest.raises(ConfigError, match=r"down_proj.weight has \d+ values above 65,504"):
        export_checkpoint(checkpoint, tmp_path / "half", dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_expert_biases_are_exported_in_float32(dtype, saved, tmp_path):
    _, checkpoint = saved(ModelConfig(llm=LlmConfig(config=LLMS["glm4_moe"])))
    export_checkpoint(checkpoint, tmp_path / "ours", dtype=dtype)
    actual = load_file(tmp_path / "ours/model.safetensors")
    dtypes = {name: value.dtype for name, value in actual.items()}
    wide = {name for name in dtypes if "e_score_correction_bias" in name}
    assert wide and {dtypes[name] for name in wide} == {torch.float32}
    assert {dtypes[name] for name in dtypes.keys() - wide} == {dtype}


def test_model_card_describes_run(saved, tokenizer, tmp_path, real_data, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # else it waits
    sources = [
        {"path": str(real_data / "tuxpaint_stamps"), "weight": 2.0},
        {"path": str(real_data / "tuxpaint_stamps/train")},
        {"path": "owner/images", "format": "hub", "revision": "abc"},
    ]
    model, checkpoint = saved(CASES["LLaVA"], name="mine", data={"sources": sources})
    losses = [
        {"step": s, "loss": 5.0 - s, "validation_loss": v} for s, v in ((2, 1.5), (3, None), (4, 9))
    ]
    lines = "".join(json.dumps(line) + "\n" for line in losses)
    (checkpoint.parent.parent / "metrics.jsonl").write_text(lines)
    export_checkpoint(checkpoint, tmp_path / "hf")
    text = (tmp_path / "hf/README.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "tags": ["torchmm"],
        "pipeline_tag": "image-text-to-text",
        "datasets": ["owner/images"],
    }
    counts = sum(p.numel() for p in model.llm.parameters())
    assert f"- `llm`: {counts:,} parameters, initialized randomly" in body
    assert "tuxpaint_stamps`, weight 2; license: GPL" in body
    assert "tuxpaint_stamps/train`, weight 1; license: GPL" in body
    assert "`owner/images` at abc, weight 1; license: not recorded" in body
    recipe_toml = tomllib.loads(body.split("```toml\n")[1].split("```")[0])
    again = Recipe.model_validate(recipe_toml)
    assert recipe_model(again).parameter_counts() == model.parameter_counts()
    assert "data" not in recipe_toml and "output_dir" not in recipe_toml
    assert "- loss 2.0000 nats per token at step 3" in body
    assert "- validation loss 1.5000 nats per token at step 2" in body
    version = transformers.__version__
    assert f"Written with transformers {version}. Use transformers 4.57, or 5.17 or later." in body


def test_export_files_have_the_mode_of_new_files(saved, tmp_path):
    _, checkpoint = saved(CASES["parts"])
    before = os.umask(0o027)
    try:
        export_checkpoint(checkpoint, tmp_path / "hf")
    finally:
        os.umask(before)
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "hf").rglob("*.*")}
    assert modes == {"0o640"}


def test_failed_export_leaves_no_files(saved, tmp_path, monkeypatch):
    _, checkpoint = saved(CASES["tied"])
    (tmp_path / "existing").mkdir()
    with pytest.raises(ConfigError, match="existing already exists; use another"):
        export_checkpoint(checkpoint, tmp_path / "existing")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_files", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*hf: No space left on device"):
        export_checkpoint(checkpoint, tmp_path / "hf")
    assert {p.name for p in tmp_path.iterdir()} == {"run", "existing"}


def test_damaged_and_older_checkpoints_are_reported(saved, tmp_path):
    _, checkpoint = saved(CASES["tied"])
    manifest = checkpoint / "MANIFEST.json"
    file = checkpoint / "rank-00000.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"step-3 is corrupt: .*rank-00000"):
        export_checkpoint(checkpoint, tmp_path / "hf")
    file.write_bytes(good)
    with make_manager(tmp_path / "old", async_save=False) as manager:
        model = torch.nn.Linear(2, 2)
        manager.save(1, model, torch.optim.AdamW(model.parameters(), fused=True), {})
    with pytest.raises(CheckpointError, match="step-1 contains no recipe"):
        export_checkpoint(tmp_path / "old/checkpoints/step-1", tmp_path / "hf")
    assert manifest.exists() and not (tmp_path / "hf").exists()


def export_and_kill(rename: int, checkpoint: Path, directory: Path) -> None:
    """Export in a process that is killed instead of a specified rename."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            remaining = [rename]
            original = Path.rename

            def rename_or_die(path: Path, target: Path) -> Path:
                if not remaining[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                remaining[0] -= 1
                return original(path, target)

            Path.rename = rename_or_die  # type: ignore
            export_checkpoint(checkpoint, directory)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_killed_export_is_removed_by_next_export(saved, tmp_path):
    _, checkpoint = saved(CASES["tied"])
    export_and_kill(0, checkpoint, tmp_path / "hf")  # when all files are written, but not renamed
    assert names(tmp_path) == {".hf.partial", ".hf.partial.lock", "run"}
    export_checkpoint(checkpoint, tmp_path / "another")
    assert names(tmp_path) == {"run", "another"}
    export_checkpoint(checkpoint, tmp_path / "hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_killed_replacement_preserves_old_export(saved, tokenizer, tmp_path):
    model, _ = saved(CASES["tied"])
    write(model, tmp_path / "hf", tokenizer)
    before = files(tmp_path / "hf")
    child = os.fork()
    if child == 0:
        original = Path.rename

        def rename_or_die(path: Path, target: Path) -> Path:
            if path.name.endswith(".partial"):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(path, target)

        Path.rename = rename_or_die  # type: ignore
        with contextlib.suppress(BaseException):
            write(model, tmp_path / "hf", tokenizer)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert "hf" not in names(tmp_path)
    remove_unfinished(tmp_path)
    assert names(tmp_path) == {"hf", "run"}
    assert files(tmp_path / "hf") == before


def test_export_of_another_process_is_untouched(saved, tmp_path):
    _, checkpoint = saved(CASES["tied"])
    with (
        write_directory_atomically(tmp_path / "theirs") as other,
        scratch_directory(tmp_path) as scratch,
    ):
        (other / "config.json").write_text("{}")
        export_checkpoint(checkpoint, tmp_path / "ours")
        assert (other / "config.json").exists() and scratch.exists()
        with pytest.raises(ConfigError, match=r"theirs is being written by another process"):
            export_checkpoint(checkpoint, tmp_path / "theirs")
    assert names(tmp_path) == {"run", "ours", "theirs"}


def run_in_process(work: Callable[[], object]) -> int:
    """Run a function in a process and return the process id for `exit_reason`."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                work()
                code = 0
            except ConfigError as error:
                expected_errors = (
                    "is being written by another process",
                    "already exists; use another directory",
                )
                code = next(
                    (2 + i for i, words in enumerate(expected_errors) if words in str(error)), 1
                )
        os._exit(code)
    return child


def exit_reason(child: int) -> str:
    """Return how a process of `run_in_process` exited."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "written", 2: "being written", 3: "exists"}.get(code, f"code {code}")


def test_concurrent_exports_have_one_writer(saved, tokenizer, tmp_path):
    """Start exports concurrently, with the files of a killed export."""
    model, checkpoint = saved(CASES["tied"])
    write(model, tmp_path / "theirs", tokenizer)
    for _ in range(3):
        export_and_kill(0, checkpoint, tmp_path / "hf")
        start_read, start_write = os.pipe()

        def export(start_read: int = start_read) -> None:
            os.read(start_read, 1)
            export_checkpoint(checkpoint, tmp_path / "hf")

        children = [run_in_process(export) for _ in range(4)]
        os.write(start_write, b"1234")
        outcomes = sorted(map(exit_reason, children))
        assert outcomes.count("written") == 1 and set(outcomes) <= {
            "written",
            "being written",
            "exists",
        }
        assert files(tmp_path / "hf") == files(tmp_path / "theirs")
        assert names(tmp_path) == {"run", "theirs", "hf"}
        shutil.rmtree(tmp_path / "hf")


def export_with_slow_lock(checkpoint: Path, directory: Path) -> tuple[int, int, int]:
    """Start an exporter that pauses before it locks.

    Returns the process id, a descriptor that signals the pause, and a descriptor that continues.
    """
    (paused_read, paused_write), (continue_read, continue_write) = os.pipe(), os.pipe()

    def export() -> None:
        original = fcntl.flock

        def slow(*arguments: int) -> None:
            atomic_directory.fcntl.flock = original  # type: ignore
            os.write(paused_write, b"1")
            os.read(continue_read, 1)
            original(*arguments)

        atomic_directory.fcntl.flock = slow  # type: ignore
        export_checkpoint(checkpoint, directory)

    return run_in_process(export), paused_read, continue_write


@pytest.mark.parametrize("checks_name", [True, False])
def test_lock_is_of_current_file(checks_name, saved, tmp_path, monkeypatch):
    """Check that the lock of a removed file does not allow a second writer."""
    _, checkpoint = saved(CASES["tied"])
    if not checks_name:
        monkeypatch.setattr(atomic_directory, "_has_name", lambda *_: True)
    child, paused_read, continue_write = export_with_slow_lock(checkpoint, tmp_path / "hf")
    os.read(paused_read, 1)
    remove_unfinished(tmp_path)  # of an export with a different name
    with write_directory_atomically(tmp_path / "hf") as partial:
        (partial / "config.json").write_text("{}")
        os.write(continue_write, b"1")
        outcome = exit_reason(child)
        assert (partial.exists(), outcome) == (
            (True, "being written") if checks_name else (False, "written")
        )
        partial.mkdir(exist_ok=True)


def test_empty_or_failed_directory_is_not_created(tmp_path):
    with write_directory_atomically(tmp_path / "adapters"):
        pass
    with pytest.raises(KeyError), write_directory_atomically(tmp_path / "hf") as other:
        (other / "config.json").write_text("{}")
        raise KeyError
    assert not names(tmp_path)


@pytest.mark.parametrize("config", ["experts", "LLaVA"])
def test_full_disk_leaves_no_export(config, saved, disk, tmp_path):
    """Check full disks while weights are assembled, files are written, and files are renamed."""
    _, checkpoint = saved(CASES[config])
    target = disk("size=64m")
    export_checkpoint(checkpoint, target / "complete")
    size_kib = sum(len(data) for data in files(target / "complete").values()) // 1024
    shutil.rmtree(target / "complete")
    for part in (0.3, 0.6, 0.95, 1.2, 1.6):
        disk(f"size={max(64, int(size_kib * part))}k")
        with pytest.raises(CheckpointError, match=r"cannot write .*hf: .*No space left on device"):
            export_checkpoint(checkpoint, target / "hf")
        assert not names(target), part
    disk("size=64m")
    export_checkpoint(checkpoint, target / "hf")


def peak_growth_bytes(checkpoint: Path, directory: Path) -> int:
    """Return the peak memory of an export in bytes, including mapped pages."""
    status = Path("/proc/self/status")
    before = re.search(r"VmRSS:\s+(\d+)", status.read_text())
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    export_checkpoint(checkpoint, directory, dtype=torch.bfloat16, shard_bytes=20 << 20)
    peak = re.search(r"VmHWM:\s+(\d+)", status.read_text())
    assert before is not None and peak is not None
    return (int(peak[1]) - int(before[1])) << 10


@pytest.mark.slow
def test_export_memory_is_bounded_by_largest_file(saved, tmp_path, monkeypatch):
    """Check memory including mapped pages. Copied blocks and Python objects use a little more."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    _, checkpoint = saved(ModelConfig(llm=LlmConfig(config={**LLMS["llama"], **sizes})))
    limit = (20 << 20) + (40 << 20)
    assert peak_growth_bytes(checkpoint, tmp_path / "hf") < limit
    sizes = [file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")]
    assert max(sizes) < 21 << 20 and sum(sizes) > 1.5 * limit

    retained: list = []
    mapped = CheckpointWeights._new_mapped_tensor

    def keep(*arguments):
        retained.append(mapped(*arguments))
        return retained[-1]

    monkeypatch.setattr(CheckpointWeights, "_new_mapped_tensor", keep)
    assert peak_growth_bytes(checkpoint, tmp_path / "hf_retained") > limit, (
        "retained mappings must increase memory use"
    )


def test_experts_are_split_layer_by_layer(saved, tmp_path):
    """Check also that source tensors are freed, so that memory is bounded by a layer."""
    model, _ = saved(CASES["experts"])
    hf = model.llm.backbone
    expected = revert_weight_conversion(hf, dict(hf.state_dict()))
    expected = {name: value.clone() for name, value in expected.items()}
    layers: list[int] = []

    def keep(values: list[torch.Tensor]) -> list[torch.Tensor]:
        layers.append(sum(value.nbytes for value in values))
        return [value.clone() for value in values]

    actual = split_stacked_experts(hf, dict(hf.state_dict()), keep)
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    stacked = [p for name, p in hf.named_parameters() if name.endswith("experts.down_proj")]
    assert len(layers) == len(stacked) == 2 and all(p.is_meta for p in stacked)
    expert_bytes = sum(v.nbytes for name, v in expected.items() if ".experts." in name)
    assert max(layers) <= expert_bytes // 2


def test_export_script_accepts_run_and_reports_errors(saved, tmp_path, monkeypatch, capsys):
    _, checkpoint = saved(CASES["tied"])
    run = checkpoint.parent.parent

    def script(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
        return SCRIPT["main"]()

    assert script(run) == 0
    assert "hf-3 is complete" in capsys.readouterr().out
    assert (run / "hf-3/config.json").exists()
    assert script(run) == 2
    assert script(tmp_path) == 4
    assert "no checkpoint in" in capsys.readouterr().err


class Hub:
    """Substitute for the Hugging Face Hub. `upload_error` is the error of an upload."""

    upload_error: Exception | None = None
    uploaded: ClassVar[list] = []

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> RepoUrl:
        assert exist_ok
        return RepoUrl(f"https://huggingface.co/{name}")

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        if self.upload_error is not None:
            raise self.upload_error
        self.uploaded.append((repo_id, {p.name for p in Path(folder_path).iterdir()}))


def test_rejected_upload_preserves_export(saved, tmp_path, monkeypatch, capsys):
    _, checkpoint = saved(CASES["tied"])
    monkeypatch.setattr(exporting, "HfApi", Hub)

    def script(output: str) -> int:
        arguments = ["export.py", checkpoint, "--output", tmp_path / output, "--push", "me/mine"]
        monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
        return SCRIPT["main"]()

    assert script("good") == 0
    ((name, names),) = Hub.uploaded
    assert name == "me/mine" and {"config.json", "README.md", "model.safetensors"} <= names
    assert "uploaded to https://huggingface.co/me/mine" in capsys.readouterr().out
    transport = exporting.HUB_ERRORS[2]("no route to host")
    for error in (transport, OSError("401 Unauthorized")):
        monkeypatch.setattr(Hub, "upload_error", error)
        assert script(f"kept{error}") == 7
        text = capsys.readouterr().err
        assert f"UploadError: {tmp_path}" in text and "HF_TOKEN" in text
        assert f"was not uploaded to me/mine: {error}" in text
        assert (tmp_path / f"kept{error}" / "config.json").exists()


@pytest.mark.parametrize(
    "header", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F31"}}', b'{"a": {"dtype": []}}']
)
@pytest.mark.parametrize("length", [None, 1 << 63])
def test_damaged_safetensors_header_is_rejected(tmp_path, header, length):
    file = tmp_path / "rank-00000.safetensors"
    file.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors has "):
        _read_chunk_locations(file)
