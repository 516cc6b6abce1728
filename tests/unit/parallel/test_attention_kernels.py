"""Tests of the choice of attention kernels, with mocked GPU kernels."""

import pytest
import torch
from torch.nn import attention

from torchmm.parallel import attention_kernels
from torchmm.parallel.attention_kernels import kernel_problems, select_kernels

CUDA = torch.device("cuda")


def test_use_kernels_selects_and_describes_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[str] = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", switched.append)
    cpu = torch.device("cpu")
    assert select_kernels("default", cpu) == "attention kernels: torch" and not switched
    assert select_kernels("fa3", cpu) == "attention kernels: FlashAttention 3"
    assert switched == ["FA3"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "card")
    monkeypatch.setattr(
        attention_kernels, "image_kernels", lambda _: {"64": "flash", "72": "cudnn"}
    )
    text = "attention kernels: torch; images of one size: cuDNN for heads of 72"
    assert select_kernels("default", CUDA) == text


def test_missing_kernels_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_problems("default", torch.device("cpu")) == []
    assert "requires a GPU" in kernel_problems("fa4", torch.device("cpu"))[0]
    monkeypatch.setattr(attention_kernels, "_available_kernels", lambda: ["FA3"])
    monkeypatch.setattr(attention_kernels.importlib.util, "find_spec", lambda name: None)
    assert "cannot select this kernel" in kernel_problems("fa4", CUDA)[0]
    assert "flash_attn_interface is not installed" in kernel_problems("fa3", CUDA)[0]
    monkeypatch.setattr(attention_kernels.importlib.util, "find_spec", lambda name: name)
    assert kernel_problems("fa3", CUDA) == []
