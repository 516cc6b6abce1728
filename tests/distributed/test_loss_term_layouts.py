"""Label smoothing and z-loss are the same in all layouts."""

import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from model_cases import LLMS, gradient_limit, loss_and_gradients, microbatch, relative_error
from tiny_recipe import LLM, arguments, train_records
from torch.distributed.tensor import DTensor

from torchmm.models.build import build_model
from torchmm.models.hf.load import copy_slice
from torchmm.models.initialize import init_weights
from torchmm.models.layers.loss import LossTerms
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel.mesh import start_process_group
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
VOCABULARIES = (64, 71)
"""Vocabularies that ranks share, evenly and not."""
FAMILIES = ("llama", "llama_tied", "gemma2")


def test_vocabulary_shards_have_terms_of_full_vocabulary():
    for errors in run_distributed(_compare_shards, 2):
        assert len(errors) == len(FAMILIES) * len(VOCABULARIES) * 2
        for case, wrong in errors.items():
            assert wrong == {}, (case, wrong)


def test_missing_offset_of_shard_is_detected():
    """Check the test above with the local indices of rank 0 on all ranks."""
    for errors in run_distributed(_compare_shards, 2, "offset"):
        assert any("loss" in wrong for (_, _, rows), wrong in errors.items() if rows)


def _build(config: dict) -> MultimodalModel:
    return build_model(ModelConfig(llm=LlmConfig(config=config)), FreezeConfig())


def _compare_shards(defect: str = "") -> dict[tuple, dict[str, float]]:
    """Return the errors above the tolerance by family, vocabulary and rows per chunk."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    mesh = mesh_for(ParallelConfig(shard=1, tensor=2)).module_mesh.tensor
    if defect == "offset":
        torch.distributed.device_mesh.DeviceMesh.get_local_rank = lambda *_: 0
    errors = {}
    for family in FAMILIES:
        for vocabulary in VOCABULARIES:
            config = {**LLMS[family], "vocab_size": vocabulary}
            full, split = _build(config), _build(config)
            materialize(full, "cpu")
            init_weights(full, seed=0)
            apply_tensor_parallel(split.llm, mesh, sequence_parallel=False, overlap=None)
            materialize(split, "cpu")
            init_weights(split, seed=0)
            weights = full.state_dict()
            for name, tensor in split.state_dict(keep_vars=True).items():
                copy_slice(tensor, weights[name])
            for rows in (0, 6):
                errors[family, vocabulary, rows] = _errors(full, split, rows)
    return errors


def _errors(full: MultimodalModel, split: MultimodalModel, rows: int) -> dict[str, float]:
    batch = microbatch([5, 9, 9, 4, 2])
    values = []
    for model in (full, split):
        model.llm.loss_terms = LossTerms(0.2, 1e-2)
        result = loss_and_gradients(model, batch, rows if model is split else 0)
        sums = zip(("smoothed", "z", "targets"), model.llm.loss_terms.pop_sums(CPU), strict=True)
        result |= sums
        values.append(
            {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in result.items()}
        )
    expected, found = values
    assert expected.keys() == found.keys()
    errors = {n: relative_error(found[n], v) for n, v in expected.items() if v.norm() > 1e-6}
    return {name: error for name, error in errors.items() if not error <= gradient_limit(name)}


LAYOUTS = {
    "replicate": {"parallel__replicate": 2},
    "shard": {"parallel__shard": 2},
    "pipeline": {"parallel__pipeline": 2},
    "virtual stages": {
        "parallel__pipeline": 2,
        "parallel__virtual_stages": 2,
        "parallel__schedule": "interleaved_1f1b",
    },
    "tensor": {"parallel__tensor": 2, "parallel__shard": 1},
    "tensor in chunks": {
        "parallel__tensor": 2,
        "parallel__shard": 1,
        "model__chunked_loss": "true",
    },
    "context": {"parallel__llm__context": 2},
}
METRICS = ("loss", "grad_norm", "loss_smoothed", "loss_z", "validation_loss")


@pytest.fixture(scope="module")
def train(tmp_path_factory, real_data, train_server):
    """Return a function that trains in a layout and returns the records of the steps."""

    def run(name, ranks, **layout):
        run_dir = tmp_path_factory.mktemp(name.replace(" ", "_")) / "run"
        changes = {
            "training__steps": 2,
            "training__label_smoothing": 0.2,
            "training__z_loss": 1e-2,
            "validation__interval": 2,
            "validation__batches": 1,
            LLM.strip("-").replace(".", "__") + "num_hidden_layers": 4,
            LLM.strip("-").replace(".", "__") + "tie_word_embeddings": "false",
        }
        command = arguments(run_dir, real_data, **{**changes, **layout})
        return train_records(train_server, run_dir, command, ranks)

    return run


@pytest.fixture(scope="module")
def single(train):
    return train("single", 1)


def test_loss_is_cross_entropy(train, single):
    """Check the first step, in which the terms have not changed the weights yet."""
    plain = train("plain", 1, training__label_smoothing=0.0, training__z_loss=0.0)
    assert single[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6)
    assert single[0]["loss_smoothed"] != single[0]["loss"]
    assert single[0]["loss_z"] > 0
    assert plain[0]["loss_smoothed"] is None and plain[0]["loss_z"] is None
    assert single[0]["grad_norm"] != pytest.approx(plain[0]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_terms_are_equal_in_layouts(train, single, layout):
    for found, expected in zip(train(layout, 2, **LAYOUTS[layout]), single, strict=True):
        for metric in METRICS:
            assert found[metric] == (
                None if expected[metric] is None else pytest.approx(expected[metric], rel=1e-5)
            ), metric
