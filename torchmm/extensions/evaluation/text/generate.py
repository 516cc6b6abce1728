"""Writes text behind prompts, token by token, in every layout.

    ends = [{eos_token_id}] * len(prompts)
    texts = generate_tokens(pipeline, prompts, mesh, Sampling(max_new_tokens=40), ends)

Prompts of different lengths are one packed row, as samples are in training. The first step runs it
whole, encoders included; then each LLM stage's cache knows it, and a step is a row with the next
token of each prompt, which travels through the stages. Every step is a plan of forwards, run like
those of training, so tensor parallelism and FSDP2 need nothing of their own (FSDP2 does gather
weights for every token).

All data-parallel ranks work on the same prompts in lockstep. The rank with the LLM's last stage
chooses tokens and broadcasts them, so ranks can never disagree on what was written or on when to
stop.

Where layers cannot keep what they need (families that are not listed, rows that ranks share), the
whole text is computed again for each token, one prompt after the other.

RoPE type "longrope" uses other frequencies once a text is longer than
`original_max_position_embeddings`. Cached keys then have the wrong frequencies, so all prompts are
computed again. The Hugging Face `generate` does the same for Phi-3. For its other classes, it keeps
the cached keys.

One rank alone computes later tokens in inference mode, which saves some 5 % of a small model's
time. FSDP2 and DTensor do not know that mode; and encoders, in the first step, may keep tables that
training uses too, which must not be tensors of inference.

Rejected: Hugging Face's own `generate` loop, which wants a whole model on one rank.

Shape legend: B prompts, T tokens of all prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from torchmm.common.batch import EncoderInputs, Microbatch, MicrobatchMeta
from torchmm.common.log import worked
from torchmm.common.module_names import LLM
from torchmm.extensions.evaluation.text.sampling import Chooser, Sampling
from torchmm.models.layers.token_cache import grown_row, next_row
from torchmm.parallel.mesh import ParallelMesh
from torchmm.training.pipeline import Pipeline

OnTokens = Callable[[Mapping[int, int]], None]
"""Gets the newest token of each prompt that has not ended, by the prompt's number."""


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def generate_tokens(
    pipeline: Pipeline,
    prompts: Sequence[Microbatch],
    mesh: ParallelMesh,
    sampling: Sampling,
    ends: Sequence[Collection[int]],
    on_tokens: OnTokens | None = None,
    first: int = 0,
) -> list[list[int]]:
    """The tokens that follow each prompt; all ranks must pass the same prompts.

    Args:
        prompts: of one sample each, on any device, with the pixels of all their images.
        ends: by prompt: tokens that end its text, of which they are no part; empty: nothing ends
            any.
        on_tokens: called after every step, on every rank; who gets it is told nothing else.
        first: number of the first prompt, for draws.
    """
    if not pipeline.caches_tokens and len(prompts) > 1:
        alone = partial(generate_tokens, pipeline, mesh=mesh, sampling=sampling)
        return [
            alone(
                [prompt],
                ends=ends[number : number + 1],
                on_tokens=_renumbered(on_tokens, number),
                first=first + number,
            )[0]
            for number, prompt in enumerate(prompts)
        ]
    source = mesh.global_rank(pipeline=pipeline.last_rank(LLM))
    choose = Chooser(sampling, prompts, first)
    row = join_prompts(prompts).to(mesh.device)
    following = next_row if pipeline.caches_tokens else grown_row
    chosen: list[Tensor] = []
    written: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(prompts)))
    most = sampling.max_new_tokens
    with pipeline.writing():
        steps: Iterable[int] = range(most)
        if on_tokens is None:
            steps = worked("writing", steps, most, "tokens at most")
        for step in steps:
            with torch.inference_mode(mesh.world_size == 1 and step > 0):
                logits_BV = pipeline.next_token_logits(row)
            none_yet_B = torch.zeros(len(prompts), dtype=torch.int64, device=mesh.device)
            tokens_B = none_yet_B if logits_BV is None else choose(logits_BV)
            if mesh.world_size > 1:
                dist.broadcast(tokens_B, src=source)
            ids = tokens_B.tolist()
            if ends:
                unfinished = {number for number in unfinished if ids[number] not in ends[number]}
            for number in unfinished:
                written[number].append(ids[number])
            if on_tokens is not None:
                on_tokens({number: ids[number] for number in sorted(unfinished)})
            if not unfinished:
                break
            chosen.append(tokens_B)
            lengths = {len(prompts[n].input_ids_T) + step for n in unfinished}
            if lengths & pipeline.rotary_limits.switches:
                pipeline.renew_caches()
                row = _grown_prompts(prompts, chosen)
            else:
                row = following(row, tokens_B)
    return written


def _grown_prompts(prompts: Sequence[Microbatch], chosen: Sequence[Tensor]) -> Microbatch:
    """Return one packed sequence of prompts with all generated tokens.

    Args:
        chosen: (B,) tokens of each step.
    """
    tokens_BN = torch.stack(list(chosen), dim=1)
    pairs = zip(prompts, tokens_BN, strict=True)
    return join_prompts([grown_row(prompt.to(own_N.device), own_N) for prompt, own_N in pairs])


def _renumbered(on_tokens: OnTokens | None, number: int) -> OnTokens | None:
    """For a prompt that is written alone."""
    if on_tokens is None:
        return None
    return lambda tokens: on_tokens({number + own: token for own, token in tokens.items()})


def join_prompts(prompts: Sequence[Microbatch]) -> Microbatch:
    """Prompts, one after the other in one packed row."""
    if len(prompts) == 1:
        return prompts[0]
    starts = list(accumulate((p.cu_seqlens[-1] for p in prompts), initial=0))
    parts: dict[str, list[EncoderInputs]] = {}
    for prompt, start in zip(prompts, starts, strict=False):
        for name, inputs in prompt.encoders.items():
            moved = replace(inputs, positions_K=inputs.positions_K + start)
            parts.setdefault(name, []).append(moved)
    cu_seqlens = [
        start + stop
        for prompt, start in zip(prompts, starts, strict=False)
        for stop in prompt.cu_seqlens[1:]
    ]
    samples = tuple(sample for prompt in prompts for sample in prompt.meta.samples)
    return Microbatch(
        input_ids_T=torch.cat([p.input_ids_T for p in prompts]),
        targets_T=torch.cat([p.targets_T for p in prompts]),
        position_ids=torch.cat([p.position_ids for p in prompts], dim=-1),
        cu_seqlens=[0, *cu_seqlens],
        encoders={name: _joined(own) for name, own in parts.items()},
        meta=MicrobatchMeta(samples, starts[-1]),
    )


def _joined(parts: Sequence[EncoderInputs]) -> EncoderInputs:
    """The images of several inputs of one encoder."""
    assert all(part.held is None for part in parts), "prompts have the pixels of all their images"
    first = parts[0]
    counts = [len(part.grids_thw) for part in parts]
    return replace(
        first,
        pixels=torch.cat([part.pixels for part in parts]),
        grids_thw=[grid for part in parts for grid in part.grids_thw],
        positions_K=torch.cat([part.positions_K for part in parts]),
        kept=None if first.kept is None else [kept for part in parts for kept in part.kept or ()],
        blank=[
            start + image
            for part, start in zip(parts, accumulate(counts, initial=0), strict=False)
            for image in part.blank
        ],
    )
