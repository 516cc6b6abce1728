"""Pipeline stages initialize, load, train, save and export like the unsharded model.

Embedding and head are tied, so the last stage has a replica. Four ranks run all layouts in one
launch. Each layout loads the checkpoints of one process and of the previous layout.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed
from microbatches import VOCAB, random_microbatch
from pipeline_parts import (
    IMAGES,
    LLAVA,
    Case,
    Layout,
    Part,
    all_tensors,
    different_names,
    full_tensor_of,
    initialized_model,
    manager,
    optimizer_of,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

from torchmm.common.errors import CheckpointError
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import module_of
from torchmm.parallel.mesh import start_process_group
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.checkpoint.state import model_tensors
from torchmm.training.optim import global_grad_norm

EMBEDDING, REPLICA = "llm.backbone.model.embed_tokens.weight", "llm.backbone.lm_head.weight"
UP_PROJ = "language_model.model.layers.{}.mlp.up_proj.weight"
"""Weight name in Hugging Face files."""
STEP = 3
CASES = [
    Case("pp2 x fsdp2, 2 segments", pipeline=2, shard=2, segments=2),
    Case("pp4", pipeline=4),
    Case("fsdp4", shard=4),
    Case(
        "pp2 x tp2, sequence parallel, 2 segments",
        pipeline=2,
        tensor=2,
        segments=2,
        sequence_parallel=True,
    ),
    Case("pp2 x replicate2", pipeline=2, replicate=2),
    Case("pp4, connector only", pipeline=4, freeze=("llm", "vision")),
]


def a_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")))


def check_layouts(cases: list[Case], directory: Path) -> list[str]:
    """Check all layouts on every rank and return the problems."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    source = directory / "hf"
    problems = []
    saved = [directory / "one"]
    for case in cases:
        layout = Layout(case, directory)
        layout_problems = check_training(layout, source)
        if not case.freeze:
            layout_problems += check_values(layout, source, directory)
            layout_problems += check_loading(layout, source, [saved[0], saved[-1]])
            saved.append(layout.run_dir)
        problems += [f"{case.name}: {problem}" for problem in layout_problems]
        if case == cases[0]:
            problems += check_errors(layout, directory)
    return problems


def check_values(layout: Layout, source: Path, directory: Path) -> list[str]:
    """Check initial values, pretrained values, parameter names and the export."""
    part = Part(layout, source)
    problems = []
    expected = {f"model.{n}": t for n, t in initialized_model(source, False).state_dict().items()}
    if names := different_names(model_values(part), expected):
        problems.append(f"initial values differ: {names}")
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, list(model_tensors(part.model)))
    all_names = {name for names in by_rank for name in names}
    if all_names != set(expected) - {f"model.{REPLICA}"}:
        problems.append(f"names: {all_names ^ set(expected)}")
    loaded = load_weights(part.model)
    if loaded != set(dict(part.model.named_parameters())):
        problems.append(f"loaded {loaded}")
    expected = {f"model.{n}": t for n, t in initialized_model(source, True).state_dict().items()}
    if names := different_names(model_values(part), expected):
        problems.append(f"pretrained values differ: {names}")
    export_hf(part.model, directory / "exported" / layout.case.name, a_tokenizer())
    return problems


def model_values(part: Part) -> dict[str, torch.Tensor]:
    """Return the unsharded parameters of this rank, including the embedding replica (last)."""
    return {name: full_tensor_of(t).detach() for name, t in model_tensors(part.model).items()}


def check_training(layout: Layout, source: Path) -> list[str]:
    """Compare loss and gradient norm with one process. Resuming is bitwise equal."""
    problems = []
    model = initialized_model(source, False)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(module_of(name) not in layout.case.freeze)
    batch = [random_microbatch(seed, n) for seed, n in enumerate(IMAGES)]
    targets = sum(m.target_count for m in batch)
    loss = 0.0
    for microbatch in batch:
        share = model(microbatch) / targets
        share.backward()
        loss += share.item()
    norm = global_grad_norm({1: [p for p in model.parameters() if p.requires_grad]}).item()

    part = Part(layout, source)
    found_loss, found_norm = part.train()
    if abs(found_loss / loss - 1) > 1e-5:
        problems.append(f"loss {found_loss}, in one process {loss}")
    if abs(found_norm / norm - 1) > 1e-5:
        problems.append(f"gradient norm {found_norm}, in one process {norm}")
    problems += check_copies(part)

    layout.checkpoints.save(1, part.model, part.optimizer, {})
    second = part.train()
    resumed = Part(layout, source)
    restored = layout.checkpoints.resume(resumed.model, resumed.optimizer)
    if restored is None or restored.rng is None:
        problems.append("no random state in a checkpoint of the same layout")
    if resumed.train() != second:
        problems.append("loss or norm after resuming differ")
    if names := different_names(part.tensors(), resumed.tensors()):
        problems.append(f"resuming changed {names}")
    return problems


def check_copies(part: Part) -> list[str]:
    """Check that the embedding replica is bitwise equal to the embedding on all ranks."""
    digests = {
        name: hashlib.sha256(local(parameter).numpy().tobytes()).hexdigest()
        for name, parameter in part.model.named_parameters()
        if name in (EMBEDDING, REPLICA)
    }
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, digests)
    first, last = part.mesh.plan_ranks[0][0], part.mesh.plan_ranks[-1][0]
    if part.mesh.plan_size > 1 and by_rank[first][EMBEDDING] != by_rank[last][REPLICA]:
        return ["the embedding replica differs"]
    return []


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def check_loading(layout: Layout, source: Path, saved: list[Path]) -> list[str]:
    """Load checkpoints of other layouts, compare bitwise, and save this layout."""
    problems = []
    expected = load_file(source.parent / "expected.safetensors")
    part = Part(layout, source)
    for run_dir in dict.fromkeys(saved):
        with torch.no_grad():
            for parameter in part.model.parameters():
                parameter.fill_(torch.nan)
        path = run_dir / "checkpoints" / f"step-{STEP}"
        restored = layout.checkpoints.load(path, part.model, part.optimizer)
        if restored.rng is not None:
            problems.append(f"{run_dir.name}: restored the random state of another layout")
        tensors = part.tensors()
        if names := different_names(tensors, expected):
            problems.append(f"{run_dir.name}: {names}")
        if not any(name.startswith("optimizer.") for name in tensors):
            problems.append(f"{run_dir.name}: no optimizer state")
        problems += check_copies(part)
    layout.checkpoints.save(STEP, part.model, part.optimizer, {})
    return problems


def check_errors(layout: Layout, directory: Path) -> list[str]:
    """Check that invalid files fail on all ranks with the same message."""
    part = Part(layout, directory / "broken")
    try:
        load_weights(part.model)
    except CheckpointError as error:
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, str(error))
        missing = "missing for 'llm': backbone.model.layers.0.mlp.up_proj.weight\n"
        stray = f"not part of the model: {UP_PROJ.format(9)}"
        is_correct = missing in by_rank[0] + "\n" and stray in by_rank[0] and len(set(by_rank)) == 1
        return [] if is_correct else [f"broken files: {by_rank}"]
    return ["broken files: no error"]


def prepare(directory: Path) -> None:
    """Write valid and broken Hugging Face files, and a checkpoint of one process."""
    torch.manual_seed(0)
    source = directory / "hf"
    config = AutoConfig.for_model("llava", **LLAVA)
    AutoModelForImageTextToText.from_config(config).save_pretrained(source)
    AutoModelForImageTextToText.from_pretrained(source).save_pretrained(directory / "broken")
    weights = load_file(source / "model.safetensors")
    weights[UP_PROJ.format(9)] = weights.pop(UP_PROJ.format(0))
    save_file(weights, directory / "broken" / "model.safetensors", metadata={"format": "pt"})

    model = initialized_model(source, True)
    optimizer = optimizer_of(model)
    model(random_microbatch(0, 2)).backward()
    optimizer.step()
    expected = {n: t.clone() for n, t in all_tensors(model, optimizer).items()}
    save_file(expected, directory / "expected.safetensors")
    with manager(directory / "one", {}) as checkpoints:
        checkpoints.save(STEP, model, optimizer, {})
    export_hf(initialized_model(source, True), directory / "exported" / "one", a_tokenizer())


@pytest.mark.slow
def test_pipeline_equals_unsharded_model(tmp_path: Path) -> None:
    prepare(tmp_path)
    assert run_distributed(check_layouts, 4, CASES, tmp_path) == [[], [], [], []]
    reference = tmp_path / "exported" / "one"
    layouts = [case.name for case in CASES if not case.freeze]
    for name in layouts:
        exported = tmp_path / "exported" / name
        files = {file.name for file in exported.iterdir()}
        assert files == {file.name for file in reference.iterdir()}
        for file in files:
            assert (exported / file).read_bytes() == (reference / file).read_bytes(), (name, file)
    expected = load_file(tmp_path / "expected.safetensors")
    model = initialized_model(tmp_path / "hf", False)
    optimizer = optimizer_of(model)
    with manager(tmp_path / "plain", {}) as checkpoints:
        for name in layouts:
            init_weights(model, seed=2)
            path = tmp_path / "runs" / name / "checkpoints" / f"step-{STEP}"
            checkpoints.load(path, model, optimizer)
            assert all_tensors(model, optimizer).keys() == expected.keys()
            assert different_names(all_tensors(model, optimizer), expected) == [], name
