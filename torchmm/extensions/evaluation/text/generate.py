"""Generate text with a training model, in every parallelism config.

    ends = [{eos_token_id}] * len(prompts)
    texts = generate_tokens(pipeline, prompts, mesh, Sampling(max_new_tokens=40), ends)

Prompts of different lengths form one packed sequence, like samples in training. The first forward
pass computes the complete prompts, including images, and fills the caches of the LLM stages. Later
packed sequences have one new token per prompt. Each forward pass is a pipeline plan, so TP and
FSDP2 require no special code. FSDP2 all-gathers the weights for every token.

If layers cannot cache (model types that are not registered, context parallelism), every forward
pass computes the prompts with all generated tokens. The same applies when a text exceeds
`original_max_position_embeddings` of RoPE type "longrope": its frequencies change, so that cached
keys become invalid. The Hugging Face `generate` does the same for Phi-3.

All data-parallel ranks process the same prompts. The rank with the last LLM stage selects the
tokens and broadcasts them, so that all ranks stop at the same step.

The `generate` loop of Hugging Face is not used. It requires the complete model on one rank. Its
random tokens depend on the batch, and it changes the random state of training.

Shape legend: B prompts, N generated tokens per prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import EncoderInputs, Microbatch, MicrobatchMeta
from torchmm.common.log import iterate_with_progress
from torchmm.common.module_names import LLM
from torchmm.extensions.evaluation.text.prompts import Prompt
from torchmm.extensions.evaluation.text.sampling import Sampling, TokenSampler
from torchmm.models.layers.kv_cache import extend_prompt, next_token_sequence
from torchmm.parallel.mesh import ParallelMesh
from torchmm.training.pipeline import Pipeline

OnTokens = Callable[[Mapping[int, int]], None]
"""Function that receives the newest token of each unfinished prompt, by prompt number."""


def generate_texts(
    pipeline: Pipeline,
    batches: Iterable[Sequence[Prompt]],
    tokenizer: PreTrainedTokenizerBase,
    mesh: ParallelMesh,
    sampling: Sampling,
    end_ids: Collection[int] = (),
    on_tokens: OnTokens | None = None,
) -> Iterator[tuple[Prompt, list[int]]]:
    """Yield each prompt with its generated tokens. All ranks must pass the same prompts.

    Args:
        pipeline: Pipeline of this rank.
        batches: Prompts of each batch, see `batch_prompts`.
        tokenizer: Tokenizer of the LLM.
        mesh: Mesh of the run.
        sampling: Decoding settings.
        end_ids: Tokens that end any text, in addition to EOS and the tokens of
            `Prompt.sample_end_tokens`.
        on_tokens: Called after every step, with numbers relative to the batch.
    """
    first = 0
    for prompts in batches:
        rows = [prompt.row for prompt in prompts]
        own_ends = [
            {*end_ids, tokenizer.eos_token_id} | p.sample_end_tokens(tokenizer) for p in prompts
        ]
        texts = generate_tokens(pipeline, rows, mesh, sampling, own_ends, on_tokens, first)
        first += len(prompts)
        yield from zip(prompts, texts, strict=True)


# "force_eager", because compiling for a few prompts takes longer than it saves.
@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def generate_tokens(
    pipeline: Pipeline,
    prompts: Sequence[Microbatch],
    mesh: ParallelMesh,
    sampling: Sampling,
    end_ids: Sequence[Collection[int]],
    on_tokens: OnTokens | None = None,
    first: int = 0,
) -> list[list[int]]:
    """Return the tokens that follow each prompt. All ranks must pass the same prompts.

    Args:
        pipeline: Pipeline of this rank.
        prompts: Packed sequences of one sample each, on the CPU, with all pixels.
        mesh: Mesh of the run.
        sampling: Decoding settings.
        end_ids: Tokens that end the text of each prompt, and are not part of it. If empty, every
            text has the maximum length.
        on_tokens: Called after every step, on every rank. If set, progress is not logged.
        first: Number of the first prompt, which seeds the sampling.
    """
    source = mesh.first_global_rank(pipeline=pipeline.last_rank(LLM))
    choose = TokenSampler(sampling, prompts, first)
    row = join_prompts(prompts)
    chosen: list[list[int]] = []
    texts: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(prompts)))
    steps: Iterable[int] = range(sampling.max_new_tokens)
    if on_tokens is None:
        steps = iterate_with_progress("writing", steps, sampling.max_new_tokens, "tokens")
    with pipeline.text_generation():
        for step in steps:
            # Inference mode saves time, but FSDP2 and DTensor do not support it. In the first step,
            # encoders may create buffers that training also uses.
            with torch.inference_mode(mesh.world_size == 1 and step > 0):
                logits_BV = pipeline.next_token_logits(row)
            if logits_BV is None:
                tokens_B = torch.zeros(len(prompts), dtype=torch.int64, device=mesh.device)
            else:
                tokens_B = choose(logits_BV)
            if mesh.world_size > 1:
                dist.broadcast(tokens_B, src=source)
            ids = tokens_B.tolist()
            if end_ids:
                unfinished = {number for number in unfinished if ids[number] not in end_ids[number]}
            for number in unfinished:
                texts[number].append(ids[number])
            if on_tokens is not None:
                on_tokens({number: ids[number] for number in sorted(unfinished)})
            if not unfinished:
                break
            chosen.append(ids)
            lengths = {len(prompts[n].input_ids_T) + step for n in unfinished}
            if pipeline.caches_tokens and not lengths & pipeline.rotary_limits.switches:
                row = next_token_sequence(row, tokens_B)
                continue
            pipeline.reset_caches()
            pairs = zip(prompts, torch.tensor(chosen).T, strict=True)
            row = join_prompts([extend_prompt(prompt, own_N) for prompt, own_N in pairs])
    return texts


def join_prompts(prompts: Sequence[Microbatch]) -> Microbatch:
    """Return one packed sequence with all prompts."""
    if len(prompts) == 1:
        return prompts[0]
    starts = list(accumulate((p.cu_seqlens[-1] for p in prompts), initial=0))
    parts: dict[str, list[EncoderInputs]] = {}
    cu_seqlens = [0]
    for prompt, start in zip(prompts, starts, strict=False):
        cu_seqlens += [start + stop for stop in prompt.cu_seqlens[1:]]
        for name, inputs in prompt.encoders.items():
            moved = replace(inputs, positions_K=inputs.positions_K + start)
            parts.setdefault(name, []).append(moved)
    samples = tuple(sample for prompt in prompts for sample in prompt.meta.samples)
    return Microbatch(
        input_ids_T=torch.cat([p.input_ids_T for p in prompts]),
        targets_T=torch.cat([p.targets_T for p in prompts]),
        position_ids=torch.cat([p.position_ids for p in prompts], dim=-1),
        cu_seqlens=cu_seqlens,
        encoders={name: _join_inputs(inputs) for name, inputs in parts.items()},
        meta=MicrobatchMeta(samples, starts[-1]),
    )


def _join_inputs(parts: Sequence[EncoderInputs]) -> EncoderInputs:
    """Return the inputs of one encoder with the images of all parts."""
    assert all(part.local_images is None for part in parts), (
        "prompts require the pixels of all their images"
    )
    first = parts[0]
    firsts = accumulate((len(part.grids_thw) for part in parts), initial=0)
    return replace(
        first,
        pixels=torch.cat([part.pixels for part in parts]),
        grids_thw=[grid for part in parts for grid in part.grids_thw],
        positions_K=torch.cat([part.positions_K for part in parts]),
        tile_regions=None
        if first.tile_regions is None
        else [kept for part in parts for kept in part.tile_regions or ()],
        undecodable=[
            start + image
            for part, start in zip(parts, firsts, strict=False)
            for image in part.undecodable
        ],
    )
