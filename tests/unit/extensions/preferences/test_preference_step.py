"""Loss and gradients of a step on pairs with images equal those of two models of Hugging Face.

The reference is an export of the initial model, and the policy an export of the changed model. Each
answer is a separate forward pass, and the loss is the formula of TRL's `DPOTrainer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from layout_cases import FIRST, SECOND
from model_cases import ENCODERS, LLMS, build, randomize
from torch.nn import functional
from transformers import AutoModelForImageTextToText

from torchmm.common.batch import IGNORE_TARGET
from torchmm.data.build import build_loader
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

CPU = torch.device("cpu")
TRAINING = TrainingConfig(
    global_batch_size=2, microbatch_size=1, sequence_length=256, loss="preference", device="cpu"
)
LENGTHS = "a red dog", "two small cats in the sun", "blue", "a large picture of three dogs"


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        start_process_group(ParallelConfig(backend="gloo"), CPU)
        yield build_mesh(ParallelConfig(), CPU)
        dist.destroy_process_group()


@pytest.fixture
def model(text_spec):
    llava = {
        "model_type": "llava",
        "vision_config": ENCODERS["clip"],
        "text_config": {**LLMS["llama"], "vocab_size": 512},
        "image_token_index": text_spec.image_token_id,
        "image_seq_length": 16,
    }
    return build(ModelConfig(config=llava))


@pytest.fixture
def microbatches(model, tokenizer, root, tmp_path):
    """Return two microbatches with pairs of different lengths, with and without an image."""
    rows = []
    for number in range(12):
        images = [[FIRST], [], [SECOND]][number % 3]
        question = "".join("<image>" for _ in images) + "what is it"
        rows.append(
            {
                "conversations": [{"from": "human", "value": question}],
                "chosen": {"from": "gpt", "value": LENGTHS[number % 4]},
                "rejected": {"from": "gpt", "value": LENGTHS[(number + 1) % 4]},
                "images": images,
            }
        )
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loader = build_loader(
        DataConfig(
            sources=[SourceConfig(path=str(source), files=root)],
            workers=0,
            index_cache_dir=str(tmp_path / "index"),
        ),
        TRAINING,
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
        **model.sample_specs(tokenizer),
    )
    (batch,) = islice(loader.batches(), 1)
    assert not batch.corrupt and len(batch.microbatches) == 2
    return batch.microbatches


def hugging_face(model, tokenizer, directory: Path):
    """Return the exported model."""
    write_export(model, directory, tokenizer, TrainingSummary(Recipe(), 1, Path("none")))
    return AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")


def answer_log_probs(model, microbatches) -> torch.Tensor:
    """Return the summed log-probabilities of the answers, one forward pass for each."""
    log_probs = []
    for microbatch in microbatches:
        inputs = microbatch.encoders["vision"].values()
        firsts = inputs.positions_K.view(len(inputs.grids_thw), -1)[:, 0]
        for start, stop in pairwise(microbatch.cu_seqlens):
            targets = microbatch.targets_T[start:stop]
            (positions,) = (targets != IGNORE_TARGET).nonzero(as_tuple=True)
            if not len(positions):
                continue  # padding
            is_inside = (firsts >= start) & (firsts < stop)
            pixels = {"pixel_values": inputs.pixels[is_inside]} if is_inside.any() else {}
            logits = model(input_ids=microbatch.input_ids_T[None, start:stop], **pixels).logits[0]
            log_prob = functional.log_softmax(logits[positions].float(), -1)
            log_probs.append(log_prob.gather(1, targets[positions, None]).sum())
    return torch.stack(log_probs)


def pair_loss(log_probs, reference, beta):
    scores = log_probs - reference
    return -functional.logsigmoid(beta * (scores[0::2] - scores[1::2])).mean()


@pytest.mark.parametrize("has_reference", [True, False], ids=["dpo", "reference free"])
def test_step_on_pairs_matches_hugging_face(
    model, tokenizer, microbatches, mesh, tmp_path, has_reference
):
    config = PreferenceConfig(beta=0.2, reference_free=not has_reference)
    pipeline = unsplit_pipeline(model, mesh, torch.float32)
    recipe = SimpleNamespace(preference=config)
    prepare_preference_loss(SimpleNamespace(recipe=recipe), model, pipeline)
    reference = hugging_face(model, tokenizer, tmp_path / "reference")
    randomize(model)
    policy = hugging_face(model, tokenizer, tmp_path / "policy")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    pairs = sum(m.loss_count for m in microbatches)
    plan = pipeline.plan_training(microbatches)
    outcome = TrainStep(pipeline, mesh).run(plan, microbatches, pairs)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    log_probs = answer_log_probs(policy, microbatches)
    assert len(log_probs) == 2 * pairs > 8
    with torch.no_grad():
        of_reference = answer_log_probs(reference, microbatches)
    expected = pair_loss(log_probs, of_reference if has_reference else 0, beta=0.2)
    assert outcome.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    # The other reference gives another loss.
    other = pair_loss(log_probs, 0 if has_reference else of_reference, beta=0.2)
    assert abs(other - expected) > 1e-2 * expected

    expected.backward()
    with torch.no_grad():  # exported like weights, for the names of Hugging Face
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    ours = dict(hugging_face(model, tokenizer, tmp_path / "gradients").named_parameters())
    theirs = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    largest = max(gradient.norm() for gradient in theirs.values())
    assert len(theirs) > 40
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / max(gradient.norm(), 1e-3 * largest)
        assert error < 2e-5, name
