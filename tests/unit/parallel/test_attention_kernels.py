"""The choice of attention kernels, with a stand-in for those that need a GPU."""

import pytest
import torch
from torch.nn import attention

from torchmm.parallel import attention_kernels
from torchmm.parallel.attention_kernels import kernel_problems, use_kernels

CUDA = torch.device("cuda")


def test_what_runs_is_said_and_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[str] = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", switched.append)
    assert use_kernels("default") == "attention: torch's own kernels" and not switched
    assert use_kernels("fa3") == "attention: kernels of FlashAttention 3"
    assert switched == ["FA3"]


def test_kernels_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_problems("default", torch.device("cpu")) == []
    assert "needs a GPU" in kernel_problems("fa4", torch.device("cpu"))[0]
    monkeypatch.setattr(attention_kernels, "_available", lambda: ["FA3"])
    monkeypatch.setattr(attention_kernels.importlib.util, "find_spec", lambda name: None)
    assert "has no switch" in kernel_problems("fa4", CUDA)[0]
    assert "flash_attn_interface is not installed" in kernel_problems("fa3", CUDA)[0]
    monkeypatch.setattr(attention_kernels.importlib.util, "find_spec", lambda name: name)
    assert kernel_problems("fa3", CUDA) == []
