"""The recipe with a pretrained, frozen LLM, on a tiny LLM with the file format of SmolLM2."""

import os
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from launch import run_distributed
from ports import free_port
from safetensors.torch import load_file
from tiny_recipe import records, weights
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
)

from torchmm.extensions.evaluation.ablation import image_losses, text_only_loss
from torchmm.parallel.mesh import build_mesh, select_device, start_process_group
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.run import train

RECIPES = Path(__file__).parents[2] / "recipes"
VISION = "model.encoders.vision.config."
SIZES = {
    "training.steps": 3,
    "training.sequence_length": 256,
    "training.global_batch_size": 4,
    "training.microbatch_size": 2,
    "training.dtype": "float32",
    "optimizer.warmup_steps": 1,
    "data.workers": 0,
    "validation.batches": 16,
    "validation.num_samples": 2,
    "validation.max_new_tokens": 3,
    VISION + "hidden_size": 32,
    VISION + "intermediate_size": 48,
    VISION + "num_hidden_layers": 1,
    VISION + "num_attention_heads": 2,
}


def recipe(name: str, llm: Path, run_dir: Path, data: Path) -> Recipe:
    values = {
        **SIZES,
        "name": run_dir.name,
        "output_dir": run_dir.parent,
        "data.index_cache_dir": run_dir.parent / "index",
        "model.llm.source": llm,
        "model.image_token": "<image>",
    }
    paths = {"sources": "train", "validation": "validation"}
    sources = [f'--data.{k}=[{{path="{data}/tuxpaint_stamps/{v}"}}]' for k, v in paths.items()]
    overrides = sources + [f"--{key}={value}" for key, value in values.items()]
    return load_recipe(RECIPES / f"{name}.toml", overrides, 2).recipe


def train_and_compare(recipes: list[Recipe], ports: list[int]) -> dict[str, float]:
    """Train all recipes. Return losses of the first recipe with and without images."""
    for recipe, port in zip(recipes, ports, strict=False):
        os.environ["MASTER_PORT"] = str(
            port
        )  # the store of the previous run can still use its port
        train(recipe)
    os.environ["MASTER_PORT"] = str(ports[-1])
    device = select_device("cpu")
    start_process_group(ParallelConfig(), device)
    mesh = build_mesh(ParallelConfig(), device)
    run = resolve_recipe(recipes[0], mesh.world_size)
    run_dir = Path(recipes[0].output_dir) / recipes[0].name
    return {
        "text": text_only_loss(run, mesh),
        **image_losses(run, run_dir, mesh),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data) -> tuple[Path, dict[str, float]]:
    """Return the directory of `llm` and of the runs, and the losses of the run with images."""
    root = tmp_path_factory.mktemp("frozen")
    tokenizer = AutoTokenizer.from_pretrained(real_data / "tokenizer")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(root / "llm")
    tokenizer.save_pretrained(root / "llm")
    recipes = [
        recipe("smollm2_vision", root / "llm", root / "seeing", real_data),
        recipe("smollm2_vision_blind", root / "llm", root / "blind", real_data),
    ]
    ports = [free_port() for _ in range(3)]
    losses = run_distributed(train_and_compare, 2, recipes, ports)
    assert losses[0] == losses[1], "ranks must agree"
    return root, losses[0]


def saved(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the unsharded tensors of a checkpoint with "name[row,column]" shards of rows."""
    shards = defaultdict(dict)
    for key, value in weights(run_dir).items():
        name, _, offset = key.rstrip("]").partition("[")
        shards[name][int(offset.split(",")[0] or 0)] = torch.atleast_1d(value)
    return {n: torch.cat([rows[k] for k in sorted(rows)]) for n, rows in shards.items()}


def test_frozen_llm_is_bitwise_unchanged(runs):
    root, _ = runs
    source = load_file(root / "llm" / "model.safetensors")
    trained = saved(root / "seeing")
    for name, value in source.items():
        assert torch.equal(trained[f"model.llm.backbone.{name}"], value), name


def test_only_encoder_and_connector_have_optimizer_state(runs):
    root, _ = runs
    names = {n.removeprefix("optimizer.") for n in saved(root / "seeing") if "optimizer." in n}
    parts = {".".join(n.split(".")[:3]) for n in names}
    assert parts == {"encoders.vision.tower", "encoders.vision.connector"}


def test_export_is_llava_with_same_llm(runs):
    root, _ = runs
    model, info = LlavaForConditionalGeneration.from_pretrained(
        root / "seeing" / "hf", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    source = load_file(root / "llm" / "model.safetensors")
    embedding = model.get_input_embeddings().weight
    assert torch.equal(embedding, source["model.embed_tokens.weight"])


def test_blind_run_reads_zero_images(runs):
    """All-zero images give identical tokens, so the loss differs from a run with images."""
    root, _ = runs
    seeing, blind = (records(root / name)[0]["loss"] for name in ("seeing", "blind"))
    assert seeing != blind
    patches = saved(root / "blind")[
        "optimizer.encoders.vision.tower.embeddings.patch_embedding.weight.exp_avg_sq"
    ]
    assert not patches.any(), "gradients of the patch embedding are products with the pixels"


def test_loss_with_images_equals_validation_loss(runs):
    root, losses = runs
    assert losses["own"] == pytest.approx(records(root / "seeing")[-1]["validation_loss"], rel=1e-5)


def test_changed_images_change_loss(runs):
    _, losses = runs
    assert len({losses["own"], losses["blank"], losses["other"]}) == 3


def test_text_only_loss_equals_hugging_face(runs, real_data):
    root, losses = runs
    model = AutoModelForCausalLM.from_pretrained(root / "llm")
    tokenizer = AutoTokenizer.from_pretrained(root / "llm")
    files = (real_data / "tuxpaint_stamps" / "validation").glob("*.parquet")
    loss, targets = 0.0, 0
    for caption in (c for f in files for c in pq.read_table(f)["text"].to_pylist()):
        ids = tokenizer.encode(caption, add_special_tokens=False)
        ids = torch.tensor([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        loss += functional.cross_entropy(logits, ids[1:], reduction="sum").item()
        targets += len(ids) - 1
    assert losses["text"] == pytest.approx(loss / targets, rel=1e-5)
