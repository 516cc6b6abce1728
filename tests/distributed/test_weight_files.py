"""Sharded parameters load Hugging Face files and save the same files as Hugging Face."""

import json
from pathlib import Path

import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

from torchmm.common.batch import MicrobatchMeta
from torchmm.models.build import build_model
from torchmm.models.hf.adapter_files import load_adapters, save_adapters
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.legacy_keys import without_legacy_keys
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import encoder_meshes, start_process_group
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.planning.step import plan_layout
from torchmm.recipe.model_section import AdapterConfig, FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig

_SIZES = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2}
_TEXT = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 70}
COMPOSITES = {
    "llava": {
        "vision_config": {
            "model_type": "clip_vision_model",
            **_SIZES,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
        },
        "text_config": {"model_type": "llama", **_TEXT},
        "image_token_index": 69,
    },
    "qwen2_5_vl": {
        "vision_config": {
            "depth": 2,
            "fullatt_block_indexes": [1],
            "hidden_size": 32,
            "intermediate_size": 56,
            "num_heads": 4,
            "out_hidden_size": 40,
        },
        "text_config": {
            **_TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 2, 2],
            },
        },
        "image_token_id": 69,
        "tie_word_embeddings": True,
    },
}
LAYOUTS = {
    "fsdp4": ParallelConfig(shard=4),
    "fsdp2 x tp2": ParallelConfig(shard=2, tensor=2),
    "tp4": ParallelConfig(shard=1, tensor=4),
    "colocated": ParallelConfig(
        pipeline=2,
        replicate=2,
        shard=1,
        placement="colocated",
        schedule="optimus",
        vision={"replicate": 1},
    ),
}


ADAPTERS = {
    "text": AdapterConfig(modules=["llm"], rank=3),
    "images": AdapterConfig(modules=["vision"], rank=3, method="dora"),
}


def _round_trip(directory: Path) -> list[str]:
    """Load and save every model in every layout, and return the problems."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    problems = []
    for name in COMPOSITES:
        source = directory / name
        reference = AutoModelForImageTextToText.from_pretrained(source).state_dict()
        for layout, parallel in LAYOUTS.items():
            model = _split(build_model(ModelConfig(source=str(source)), FreezeConfig()), parallel)
            init_weights(model, 0, skip=load_weights(model))
            problems += [f"{name}, {layout}: {p}" for p in _wrong_weights(model, reference)]
            export_hf(model, directory / f"{name}, {layout}", _tokenizer())
    return problems


def _round_trip_of_adapters(directory: Path) -> None:
    """Load adapters in every layout, and save them separately and merged."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    for layout, parallel in LAYOUTS.items():
        model = _split(_adapted(directory), parallel)
        sources = {name: str(directory / "adapters" / name) for name in ADAPTERS}
        loaded = load_adapters(model, sources)
        init_weights(model, 0, skip=load_weights(model) | loaded)
        save_adapters(model, directory / f"adapters, {layout}")
        export_hf(model, directory / f"merged, {layout}", _tokenizer())


def _adapted(directory: Path) -> MultimodalModel:
    config = ModelConfig(source=str(directory / "qwen2_5_vl"))
    return build_model(config, FreezeConfig(), adapters=ADAPTERS)


def _split(model: MultimodalModel, parallel: ParallelConfig) -> MultimodalModel:
    """Parallelize the model and allocate the parameters of this rank."""
    mesh = mesh_for(parallel)
    descriptions = [module.describe() for module in model.modality_modules()]
    layout = plan_layout(parallel, descriptions, [MicrobatchMeta((), 32)])
    split_model_for_rank(model, layout, mesh.plan_rank)
    plain = (ActivationCheckpointConfig(), CompileConfig(), torch.float32)
    meshes = encoder_meshes(parallel, mesh, ["vision"])
    parallelize(model, mesh, parallel, *plain, meshes=meshes)
    materialize(model, "cpu")
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(70)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")))


def _wrong_weights(model: MultimodalModel, reference: dict[str, torch.Tensor]) -> list[str]:
    """Check the token embedding and the patch embedding, if this rank has them."""
    problems = []
    for suffix, file_name in (
        ("embed_tokens.weight", "model.language_model.embed_tokens.weight"),
        ("patch_embedding.weight", "model.vision_tower.embeddings.patch_embedding.weight"),
        ("patch_embed.proj.weight", "model.visual.patch_embed.proj.weight"),
    ):
        for name, parameter in model.named_parameters():
            if name.endswith(suffix):
                assert isinstance(parameter, DTensor)
                if not torch.equal(parameter.full_tensor(), reference[file_name]):
                    problems.append(f"{name} differs")
    return problems


@pytest.mark.slow
def test_layouts_load_and_save_same_files(tmp_path: Path) -> None:
    for name, settings in COMPOSITES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **settings)
        AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / name)
        reloaded = AutoModelForImageTextToText.from_pretrained(tmp_path / name)
        reloaded.save_pretrained(tmp_path / name)
    assert run_distributed(_round_trip, 4, tmp_path) == [[], [], [], []]
    for name in COMPOSITES:
        for layout in LAYOUTS:
            for file in (tmp_path / name).iterdir():
                saved = tmp_path / f"{name}, {layout}" / file.name
                if file.name == "config.json":
                    actual, expected = (json.loads(f.read_text()) for f in (saved, file))
                    assert without_legacy_keys(actual) == without_legacy_keys(expected), layout
                    continue
                assert saved.read_bytes() == file.read_bytes(), (layout, file)


def test_layouts_load_and_save_same_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2_5_vl", **COMPOSITES["qwen2_5_vl"])
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "qwen2_5_vl")
    model = _adapted(tmp_path)
    materialize(model, "cpu")
    init_weights(model, 0, skip=load_weights(model))
    for name, parameter in model.named_parameters():
        if name.endswith("lora.up"):
            torch.nn.init.normal_(parameter)
    save_adapters(model, tmp_path / "adapters")
    export_hf(model, tmp_path / "merged", _tokenizer())
    run_distributed(_round_trip_of_adapters, 4, tmp_path)
    for layout in LAYOUTS:
        for kind in ("adapters", "merged"):
            for file in (f for f in (tmp_path / kind).rglob("*") if f.is_file()):
                saved = tmp_path / f"{kind}, {layout}" / file.relative_to(tmp_path / kind)
                assert saved.read_bytes() == file.read_bytes(), (layout, file)
