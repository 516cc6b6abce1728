"""A model cut into pipeline stages starts, loads, trains, saves and exports as the whole one does.

Embedding and head are tied, so the last stage has a copy. Four ranks go through all layouts in one
launch; each layout loads what one process and the layout before it have saved.
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
    differing,
    everything,
    filled,
    gathered,
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

TABLE, COPY = "llm.backbone.model.embed_tokens.weight", "llm.backbone.lm_head.weight"
UP_PROJ = "language_model.model.layers.{}.mlp.up_proj.weight"
"""In the files."""
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


def go_through(cases: list[Case], directory: Path) -> list[str]:
    """On every rank: all that is wrong in any layout."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    source = directory / "hf"
    wrong = []
    saved = [directory / "one"]
    for case in cases:
        of = Layout(case, directory)
        found = check_training(of, source)
        if not case.freeze:
            found += check_values(of, source, directory)
            found += check_loading(of, source, [saved[0], saved[-1]])
            saved.append(of.run_dir)
        wrong += [f"{case.name}: {problem}" for problem in found]
        if case == cases[0]:
            wrong += check_errors(of, directory)
    return wrong


def check_values(of: Layout, source: Path, directory: Path) -> list[str]:
    """Initial and pretrained values, all parameters once, export."""
    part = Part(of, source)
    wrong = []
    expected = {f"model.{n}": t for n, t in filled(source, False).state_dict().items()}
    if names := differing(model_values(part), expected):
        wrong.append(f"initial values differ: {names}")
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, list(model_tensors(part.model)))
    together = {name for names in by_rank for name in names}
    if together != set(expected) - {f"model.{COPY}"}:
        wrong.append(f"names: {together ^ set(expected)}")
    loaded = load_weights(part.model)
    if loaded != set(dict(part.model.named_parameters())):
        wrong.append(f"loaded {loaded}")
    expected = {f"model.{n}": t for n, t in filled(source, True).state_dict().items()}
    if names := differing(model_values(part), expected):
        wrong.append(f"pretrained values differ: {names}")
    export_hf(part.model, directory / "exported" / of.case.name, a_tokenizer())
    return wrong


def model_values(part: Part) -> dict[str, torch.Tensor]:
    """This rank's parameters, whole; the copy too, which comes last."""
    return {name: gathered(t).detach() for name, t in model_tensors(part.model).items()}


def check_training(of: Layout, source: Path) -> list[str]:
    """Loss and gradient norm of the single process; resuming goes on bit by bit."""
    wrong = []
    model = filled(source, False)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(module_of(name) not in of.case.freeze)
    batch = [random_microbatch(seed, n) for seed, n in enumerate(IMAGES)]
    targets = sum(m.target_count for m in batch)
    loss = 0.0
    for microbatch in batch:
        share = model(microbatch) / targets
        share.backward()
        loss += share.item()
    norm = global_grad_norm({1: [p for p in model.parameters() if p.requires_grad]}).item()

    part = Part(of, source)
    found_loss, found_norm = part.train()
    if abs(found_loss / loss - 1) > 1e-5:
        wrong.append(f"loss {found_loss}, in one process {loss}")
    if abs(found_norm / norm - 1) > 1e-5:
        wrong.append(f"gradient norm {found_norm}, in one process {norm}")
    wrong += check_copies(part)

    of.checkpoints.save(1, part.model, part.optimizer, {})
    second = part.train()
    again = Part(of, source)
    restored = of.checkpoints.resume(again.model, again.optimizer)
    if restored is None or restored.rng is None:
        wrong.append("no random state in a checkpoint of the same layout")
    if again.train() != second:
        wrong.append("loss or norm after resuming differ")
    if names := differing(part.tensors(), again.tensors()):
        wrong.append(f"resuming changed {names}")
    return wrong


def check_copies(part: Part) -> list[str]:
    """The copy of the embedding is bit-equal to the original, on all ranks."""
    digests = {
        name: hashlib.sha256(local(parameter).numpy().tobytes()).hexdigest()
        for name, parameter in part.model.named_parameters()
        if name in (TABLE, COPY)
    }
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, digests)
    first, last = part.mesh.plan_ranks[0][0], part.mesh.plan_ranks[-1][0]
    if part.mesh.pipeline_size > 1 and by_rank[first][TABLE] != by_rank[last][COPY]:
        return ["the copy of the embedding went its own way"]
    return []


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def check_loading(of: Layout, source: Path, saved: list[Path]) -> list[str]:
    """Checkpoints of other layouts, bit by bit; afterwards this layout's is there too."""
    wrong = []
    expected = load_file(source.parent / "expected.safetensors")
    part = Part(of, source)
    for run_dir in dict.fromkeys(saved):
        with torch.no_grad():
            for parameter in part.model.parameters():
                parameter.fill_(torch.nan)
        path = run_dir / "checkpoints" / f"step-{STEP}"
        restored = of.checkpoints.load(path, part.model, part.optimizer)
        if restored.rng is not None:
            wrong.append(f"{run_dir.name}: took over random state of another layout")
        found = part.tensors()
        if names := differing(found, expected):
            wrong.append(f"{run_dir.name}: {names}")
        if not any(name.startswith("optimizer.") for name in found):
            wrong.append(f"{run_dir.name}: no optimizer state")
        wrong += check_copies(part)
    of.checkpoints.save(STEP, part.model, part.optimizer, {})
    return wrong


def check_errors(of: Layout, directory: Path) -> list[str]:
    """Files that fit no rank's stages fail on all ranks, with the same words."""
    part = Part(of, directory / "broken")
    try:
        load_weights(part.model)
    except CheckpointError as error:
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, str(error))
        missing = "missing for 'llm': backbone.model.layers.0.mlp.up_proj.weight\n"
        stray = f"not part of the model: {UP_PROJ.format(9)}"
        good = missing in by_rank[0] + "\n" and stray in by_rank[0] and len(set(by_rank)) == 1
        return [] if good else [f"broken files: {by_rank}"]
    return ["broken files: no error"]


def prepare(directory: Path) -> None:
    """Hugging Face files, whole and broken; a checkpoint of one process and what is in it."""
    torch.manual_seed(0)
    source = directory / "hf"
    config = AutoConfig.for_model("llava", **LLAVA)
    AutoModelForImageTextToText.from_config(config).save_pretrained(source)
    AutoModelForImageTextToText.from_pretrained(source).save_pretrained(directory / "broken")
    weights = load_file(source / "model.safetensors")
    weights[UP_PROJ.format(9)] = weights.pop(UP_PROJ.format(0))
    save_file(weights, directory / "broken" / "model.safetensors", metadata={"format": "pt"})

    model = filled(source, True)
    optimizer = optimizer_of(model)
    model(random_microbatch(0, 2)).backward()
    optimizer.step()
    expected = {n: t.clone() for n, t in everything(model, optimizer).items()}
    save_file(expected, directory / "expected.safetensors")
    with manager(directory / "one", {}) as checkpoints:
        checkpoints.save(STEP, model, optimizer, {})
    export_hf(filled(source, True), directory / "exported" / "one", a_tokenizer())


@pytest.mark.slow
def test_a_pipeline_is_the_whole_model(tmp_path: Path) -> None:
    prepare(tmp_path)
    assert run_distributed(go_through, 4, CASES, tmp_path) == [[], [], [], []]
    reference = tmp_path / "exported" / "one"
    layouts = [case.name for case in CASES if not case.freeze]
    for name in layouts:
        exported = tmp_path / "exported" / name
        files = {file.name for file in exported.iterdir()}
        assert files == {file.name for file in reference.iterdir()}
        for file in files:
            assert (exported / file).read_bytes() == (reference / file).read_bytes(), (name, file)
    expected = load_file(tmp_path / "expected.safetensors")
    model = filled(tmp_path / "hf", False)
    optimizer = optimizer_of(model)
    with manager(tmp_path / "plain", {}) as checkpoints:
        for name in layouts:
            init_weights(model, seed=2)
            path = tmp_path / "runs" / name / "checkpoints" / f"step-{STEP}"
            checkpoints.load(path, model, optimizer)
            assert everything(model, optimizer).keys() == expected.keys()
            assert differing(everything(model, optimizer), expected) == [], name
