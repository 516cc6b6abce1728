"""Text generated without a cache and without a pipeline, one prompt at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.extensions.evaluation.samples import held_out_prompts
from torchmm.extensions.evaluation.text.generate import (
    extend_prompt,
    generate_tokens,
    join_prompts,
    next_token_sequence,
)
from torchmm.extensions.evaluation.text.sampling import Sampling, TokenSampler
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.mesh import ParallelMesh
from torchmm.training.pipeline import Pipeline

GREEDY = Sampling(max_new_tokens=6)
DRAWN = Sampling(max_new_tokens=6, temperature=1.5, top_k=30, top_p=0.98, seed=5)


def prompts_of(microbatches: Iterable[Microbatch], count: int) -> list[Microbatch]:
    """Return prompts with images, and one without images that has another length."""
    step = type("Step", (), {"microbatches": list(microbatches)})
    prompts = []
    for prompt, truth, _ in held_out_prompts([step], count):  # type: ignore[list-item]
        row = prompt
        for token in truth[: len(prompts)]:  # so that lengths differ
            row = extend_prompt(row, token[None])
        prompts.append(row)
    assert len({p.cu_seqlens[-1] for p in prompts}) == count
    first = prompts[0]
    words = first.input_ids_T[:3].clone()
    words[:] = torch.tensor([7, 11, 13])
    text = replace(
        first,
        input_ids_T=words,
        targets_T=first.targets_T[:3],
        target_positions_L=None,
        position_ids=torch.arange(3).expand(*first.position_ids.shape[:-1], 3),
        cu_seqlens=[0, 3],
        encoders={},
        meta=MicrobatchMeta((), 3),
    )
    return [*prompts, text]


@dataclass(frozen=True)
class Written:
    """Texts and logits of an unsharded model."""

    greedy: list[list[int]]
    drawn: list[list[int]]
    logits: list[Tensor]
    """Logits (N, V) before each greedy token, by prompt."""


@torch.no_grad()
def written_again(model: MultimodalModel, prompts: Sequence[Microbatch]) -> Written:
    """Generate texts without a cache: every token is computed from the complete text."""
    texts: list[list[list[int]]] = []
    logits: list[Tensor] = []
    for sampling in (GREEDY, DRAWN):
        texts.append([])
        for number, prompt in enumerate(prompts):
            choose = TokenSampler(sampling, [prompt], number)
            row, ids = prompt, []
            for _ in range(sampling.max_new_tokens):
                last = torch.tensor([row.input_ids_T.numel() - 1])
                logits_1V = model.llm.logits(row, model.encode(row), last)
                if sampling is GREEDY:
                    logits.append(logits_1V)
                token_1 = choose(logits_1V)
                ids.append(int(token_1))
                row = extend_prompt(row, token_1)
            texts[-1].append(ids)
    size = GREEDY.max_new_tokens
    by_prompt = [torch.cat(logits[i : i + size]) for i in range(0, len(logits), size)]
    return Written(texts[0], texts[1], by_prompt)


def differences(
    pipeline: Pipeline, prompts: Sequence[Microbatch], mesh: ParallelMesh, expected: Written
) -> list[str]:
    """Return differences of texts and logits that a pipeline generates; collective."""
    problems = []
    for sampling, texts in ((GREEDY, expected.greedy), (DRAWN, expected.drawn)):
        tokens = generate_tokens(pipeline, prompts, mesh, sampling, ())
        if tokens != texts:
            problems.append(f"{sampling}: {tokens}, expected {texts}")
    alone = generate_tokens(pipeline, prompts[:1], mesh, GREEDY, ())
    if alone != expected.greedy[:1]:
        problems.append(f"alone: {alone}, expected {expected.greedy[0]}")
    if pipeline.caches_tokens:
        problems += _errors_of_logits(pipeline, join_prompts(prompts), expected)
    return problems


@torch.no_grad()
def _errors_of_logits(pipeline: Pipeline, row: Microbatch, expected: Written) -> list[str]:
    problems = []
    with pipeline.text_generation():
        for step, tokens in enumerate(zip(*expected.greedy, strict=True)):
            logits_BV = pipeline.next_token_logits(row)
            expected_BV = torch.stack([logits[step] for logits in expected.logits])
            if logits_BV is not None:
                error = (logits_BV - expected_BV).norm() / expected_BV.norm()
                if not error <= 1e-5:
                    problems.append(f"logits of token {step} are off by {error}")
            row = next_token_sequence(row, torch.tensor(tokens))
    return problems
