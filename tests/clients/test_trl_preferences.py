"""TRL's DPOTrainer has the loss, gradient norm and rewards of torchmm on the same pairs.

Both start from the same exports: a policy and a reference model that differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from client_cases import make_tokenizer, model_section
from model_cases import build, randomize
from PIL import Image

from torchmm.data.build import build_loader
from torchmm.extensions.preferences.loss import METRIC_NAMES
from torchmm.extensions.preferences.reference import prepare_preference_loss
from torchmm.extensions.preferences.section import PreferenceConfig
from torchmm.parallel.mesh import ParallelMesh, build_mesh, start_process_group
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.model_section import ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import TrainingConfig
from torchmm.training.export.model_files import TrainingSummary, write_export
from torchmm.training.pipeline import unsplit_pipeline
from torchmm.training.step import TrainStep

pytestmark = pytest.mark.campaign
CPU = torch.device("cpu")
BETA = 0.2
LOSSES = ("sigmoid", "sigmoid_norm", "ipo")
ANSWERS = (
    ("A red chicken.", "Two small dogs in the sun."),
    ("A boat on the sea near the old town.", "A car."),
    ("Four apples.", "Four pears."),
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endif %}"
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{{ 'assistant:\n' if add_generation_prompt }}"
)
"""Chat template with nothing after an answer, which TRL would include in the loss."""


@dataclass
class PreferenceCase:
    """Policy and reference exports with the metrics of torchmm."""

    family: str
    values: dict[str, Any]
    expected: dict[str, float]

    def job(self) -> dict[str, Any]:
        """Return the values that the program receives."""
        return {"family": self.family, **self.values}


@contextmanager
def single_process() -> Iterator[ParallelMesh]:
    """Yield the mesh of one process. Programs that start later must not join its group."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        start_process_group(ParallelConfig(backend="gloo"), CPU)
        yield build_mesh(ParallelConfig(), CPU)
        dist.destroy_process_group()


def make_case(loss_type: str, directory: Path, data: Path, mesh: ParallelMesh) -> PreferenceCase:
    """Export a reference and a policy, and run a step on pairs with images."""
    directory.mkdir()
    tokenizer = make_tokenizer(data, "clip + llama")
    tokenizer.chat_template = TEMPLATE
    model = build(model_section("clip + llama", tokenizer))
    pipeline = unsplit_pipeline(model, mesh, torch.float32)
    config = PreferenceConfig(loss_type=loss_type, beta=BETA)
    recipe: Any = SimpleNamespace(recipe=SimpleNamespace(preference=config))
    prepare_preference_loss(recipe, model, pipeline)
    trained = TrainingSummary(Recipe(model=ModelConfig()), 1, Path("none"))
    write_export(model, directory / "reference", tokenizer, trained)
    randomize(model)
    write_export(model, directory / "policy", tokenizer, trained)

    rng = np.random.default_rng(0)
    pairs = []
    for number, (chosen, rejected) in enumerate(ANSWERS):
        image = directory / f"{number}.png"
        # The size of the encoder input, because the programs resize with different libraries.
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(image)
        pairs.append(
            {
                "image": str(image),
                "question": "What is this?",
                "chosen": chosen,
                "rejected": rejected,
            }
        )
    microbatches = microbatches_of(model, tokenizer, directory, pairs)
    count = sum(m.loss_count for m in microbatches)
    assert count == len(ANSWERS)
    plan = pipeline.plan_training(microbatches)
    outcome = TrainStep(pipeline, mesh).run(plan, microbatches, count)
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    loss: Any = model.llm.answer_loss
    sums = [value / count for value in loss.pop_sums(CPU)[:3].tolist()]
    expected = {
        "loss": outcome.loss.item(),
        "grad_norm": torch.stack(squares).sum().sqrt().item(),
        **dict(zip(METRIC_NAMES, sums, strict=True)),
    }
    values = {
        "directory": str(directory / "policy"),
        "reference": str(directory / "reference"),
        "pairs": pairs,
        "beta": BETA,
        "loss_type": loss_type,
    }
    return PreferenceCase(loss_type, values, expected)


def microbatches_of(model, tokenizer, directory: Path, pairs: list[dict]) -> list:
    """Return the pairs as a training run reads them."""
    rows = []
    for pair in pairs:
        question = [{"type": "image"}, {"type": "text", "text": pair["question"]}]
        answers = {
            name: [{"role": "assistant", "content": pair[name]}] for name in ("chosen", "rejected")
        }
        prompt = [{"role": "user", "content": question}]
        rows.append({"images": [Path(pair["image"]).name], "prompt": prompt, **answers})
    source = directory / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loader = build_loader(
        DataConfig(
            validation=[SourceConfig(path=str(source))],
            workers=0,
            index_cache_dir=str(directory / "index"),
        ),
        TrainingConfig(global_batch_size=1, sequence_length=1024, loss="preference", device="cpu"),
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
        validation=True,
        **model.sample_specs(tokenizer),
    )
    (batch,) = islice(loader.batches(), 1)
    return batch.microbatches


@pytest.fixture(scope="module")
def cases(tmp_path_factory, real_data) -> dict[str, PreferenceCase]:
    root = tmp_path_factory.mktemp("preferences")
    with single_process() as mesh:
        return {name: make_case(name, root / name, real_data, mesh) for name in LOSSES}


@pytest.fixture(scope="module")
def trl_answers(ask, cases) -> dict[str, dict]:
    return ask("with_dpo", list(cases.values()))["answers"]["dpo"]


@pytest.mark.parametrize("loss_type", LOSSES)
def test_trl_step_has_equal_loss_gradient_and_rewards(loss_type, cases, trl_answers) -> None:
    found, case = trl_answers[loss_type], cases[loss_type]
    assert "error" not in found, found["error"]
    assert found == pytest.approx(case.expected, rel=1e-4)
    others = [other.expected["loss"] for name, other in cases.items() if name != loss_type]
    assert all(abs(found["loss"] - loss) > 1e-2 for loss in others)
