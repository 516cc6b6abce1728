"""Tests of `drop_unread_pixels`: pixels that only other ranks read are omitted."""

import torch

from torchmm.common.batch import EncoderInputs, Microbatch, MicrobatchMeta
from torchmm.common.generated import GeneratorInputs
from torchmm.training.pipeline import drop_unread_pixels


def test_pixels_of_other_ranks_are_omitted():
    ids_T = torch.arange(4)
    encoders = {
        name: EncoderInputs(torch.ones(2, 3, 4, 4), [(1, 2, 2)] * 2, torch.tensor([0, 1]))
        for name in ("vision", "other")
    }
    generator_inputs = GeneratorInputs(
        torch.ones(4, 3), torch.ones(4, 3), [0.5], [(1, 2, 2)], torch.tensor([3]), [1], [True]
    )
    microbatch = Microbatch(
        ids_T, ids_T, ids_T, [0, 4], encoders, MicrobatchMeta((), 4), generator_inputs
    )
    llm = drop_unread_pixels({"llm"}, microbatch)
    assert {name: len(e.pixels) for name, e in llm.encoders.items()} == {"vision": 0, "other": 0}
    assert llm.encoders["vision"].positions_K is encoders["vision"].positions_K
    assert llm.encoders["vision"].grids_thw == encoders["vision"].grids_thw
    assert llm.generator is not None and llm.generator.contexts == [1]
    assert llm.generator.patches_PV.numel() == llm.generator.noise_PV.numel() == 0
    assert llm.target_count == microbatch.target_count == 4
    both = drop_unread_pixels({"vision", "generator"}, microbatch)
    assert both.encoders["vision"] is encoders["vision"] and both.generator is generator_inputs
    assert len(both.encoders["other"].pixels) == 0
