"""Held-out losses, and text the model generates for held-out images.

Both are plans of forwards alone, run as training steps are. For generation all data-parallel ranks
work on the same sample in lockstep (FSDP gathers every layer's weights for all of them anyway) and
one rank's choice of each token is broadcast, so ranks can never disagree on when to stop. Rejected:
a key-value cache; captions are short and recomputing keeps one code path for training and
generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import IGNORE_TARGET, Microbatch, SampleMeta, StepBatch
from torchmm.common.module_names import GENERATOR
from torchmm.parallel.mesh import ParallelMesh
from torchmm.training.pipeline import Pipeline


@dataclass(frozen=True)
class GeneratedText:
    """What the model wrote for one held-out sample, beside what it should have written."""

    source: str
    index: int
    prompt: str
    truth: str
    generated: str
    duration_ms: int = 0
    """Of the sounds and clips before it."""


# Held-out batches are few and prompts of all lengths: compiling for them would cost more than it
# saves, hence "force_eager".
@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def held_out_losses(
    pipeline: Pipeline, batches: Iterable[StepBatch], mesh: ParallelMesh
) -> dict[str, float]:
    """Mean loss over all held-out batches and ranks: "llm" per target, "generator" per image."""
    sums = {name: torch.zeros((), device=mesh.device) for name in ("llm", GENERATOR)}
    targets = images = 0
    for batch in batches:
        losses = pipeline.losses([m.to(mesh.device) for m in batch.microbatches])
        for module, by_microbatch in losses.items():
            sums[module] += torch.stack(by_microbatch).sum()
        targets += sum(m.target_count for m in batch.microbatches)
        images += sum(m.generated_count for m in batch.microbatches)
    # Of ranks with the same samples, only one tensor-parallel group has a module's losses, while
    # all have counted targets.
    share = mesh.samples_ranks / mesh.tensor_size
    local = [*(loss.item() * share for loss in sums.values()), targets, images]
    text, drawn, all_targets, all_images = mesh.sum_over_data(local)
    return {"llm": text / max(1.0, all_targets), GENERATOR: drawn / max(1.0, all_images)}


def validation_loss(pipeline: Pipeline, batches: Iterable[StepBatch], mesh: ParallelMesh) -> float:
    """Mean text loss per target over all held-out batches and ranks."""
    return held_out_losses(pipeline, batches, mesh)["llm"]


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def generate_samples(
    pipeline: Pipeline,
    prompts: Iterable[tuple[Microbatch, Tensor, SampleMeta]],
    tokenizer: PreTrainedTokenizerBase,
    mesh: ParallelMesh,
    max_new_tokens: int,
) -> list[GeneratedText]:
    """Greedy text for each prompt; all ranks must pass the same prompts.

    Args:
        prompts: from `held_out_prompts`.
        max_new_tokens: longest text, in tokens; generation stops at the end-of-text token.
    """
    texts = []
    for prompt, truth_ids, sample in prompts:
        new_ids = _generate(pipeline, prompt.to(mesh.device), tokenizer, max_new_tokens, mesh)
        image_positions = torch.cat([e.positions_K for e in prompt.encoders.values()])
        shown = prompt.input_ids_T.clone()
        shown[image_positions] = -1
        ids = (shown[shown >= 0].tolist(), truth_ids.tolist(), new_ids)
        prompt_text, truth, new = [str(tokenizer.decode(i, skip_special_tokens=True)) for i in ids]
        duration_ms = sum(image.duration_ms for image in sample.images)
        texts.append(
            GeneratedText(sample.source, sample.index, prompt_text, truth, new, duration_ms)
        )
    return texts


def word_error_rate(texts: Sequence[GeneratedText]) -> float:
    """Words to be changed, added or taken away, as a share of the words of the truths.

    Case and punctuation at words' ends do not count. Above 1 where too much was written.

    Raises:
        ValueError: the truths have no words.
    """
    words = [[_words(text) for text in (t.generated, t.truth)] for t in texts]
    total = sum(len(truth) for _, truth in words)
    if not total:
        raise ValueError(f"no words in the truths of {len(texts)} texts")
    return sum(_edits(written, truth) for written, truth in words) / total


def _words(text: str) -> list[str]:
    stripped = (word.strip(".,;:!?\"'()") for word in text.lower().split())
    return [word for word in stripped if word]


def _edits(written: Sequence[str], truth: Sequence[str]) -> int:
    """Levenshtein distance."""
    row = list(range(len(truth) + 1))
    for i, word in enumerate(written, 1):
        diagonal, row[0] = row[0], i
        for j, expected in enumerate(truth, 1):
            changed = diagonal + (word != expected)
            diagonal, row[j] = row[j], min(changed, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def held_out_prompts(
    batches: Iterable[StepBatch], count: int
) -> Iterator[tuple[Microbatch, Tensor, SampleMeta]]:
    """The first `count` samples with images, cut before the text to be generated.

    Batches must come from a loader with one pack per microbatch, whose samples are its first
    segments.
    """
    found = 0
    for microbatch in (m for batch in batches for m in batch.microbatches):
        for prompt in _prompts_of(microbatch):
            if found == count:
                return
            found += 1
            yield prompt


def _prompts_of(microbatch: Microbatch) -> Iterator[tuple[Microbatch, Tensor, SampleMeta]]:
    behind = dict.fromkeys(microbatch.encoders, 0)  # images of samples so far
    segments = zip(microbatch.cu_seqlens, microbatch.cu_seqlens[1:], strict=False)
    for sample, (start, stop) in zip(microbatch.meta.samples, segments, strict=False):
        before = dict(behind)
        behind = {name: count + len(sample.images_read_by(name)) for name, count in before.items()}
        shown = {n: range(before[n], behind[n]) for n in before if before[n] < behind[n]}
        targets = microbatch.targets_T[start:stop]
        counted = (targets != IGNORE_TARGET).nonzero()
        if not len(counted) or not shown:
            continue
        cut = start + int(counted[0]) + 1
        encoders = {name: microbatch.encoders[name].select(own) for name, own in shown.items()}
        for inputs in encoders.values():
            inputs.positions_K = inputs.positions_K - start
        if max(int(inputs.positions_K.max()) for inputs in encoders.values()) >= cut - start:
            continue  # text before the last image: not a caption to be generated
        prompt = Microbatch(
            input_ids_T=microbatch.input_ids_T[start:cut],
            targets_T=torch.full((cut - start,), IGNORE_TARGET),
            position_ids=microbatch.position_ids[..., start:cut],
            cu_seqlens=[0, cut - start],
            encoders=encoders,
            meta=replace(microbatch.meta, samples=(sample,), tokens=cut - start),
        )
        yield prompt, targets[counted[:, 0]], sample


def _generate(
    pipeline: Pipeline,
    prompt: Microbatch,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    mesh: ParallelMesh,
) -> list[int]:
    source = mesh.global_rank(pipeline=pipeline.last_rank("llm"))
    new_ids: list[int] = []
    state = prompt
    for _ in range(max_new_tokens):
        logits_V = pipeline.next_token_logits(state)
        token = torch.zeros((), dtype=torch.int64, device=mesh.device)
        if logits_V is not None:
            token = logits_V.argmax()
        dist.broadcast(token, src=source)
        if int(token) == tokenizer.eos_token_id:
            break
        new_ids.append(int(token))
        state = _append(state, token)
    return new_ids


def _append(state: Microbatch, token: Tensor) -> Microbatch:
    positions = state.position_ids
    following = positions.amax() + 1
    # What was written is the target of the token before: some models see prompts both ways.
    ignored = torch.full_like(state.targets_T[:1], IGNORE_TARGET)
    length = state.input_ids_T.numel() + 1
    return replace(
        state,
        input_ids_T=torch.cat([state.input_ids_T, token[None]]),
        targets_T=torch.cat([state.targets_T[:-1], token[None], ignored]),
        position_ids=torch.cat([positions, following.expand_as(positions[..., :1])], dim=-1),
        cu_seqlens=[0, length],
        meta=replace(state.meta, tokens=length),
    )
