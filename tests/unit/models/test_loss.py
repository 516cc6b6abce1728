"""The chunked loss equals the full loss and stores only a chunk in float32."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from torchmm.models.layers.loss import CHUNK_TARGETS, summed_cross_entropy

VOCABULARY = 48
ROWS = 2 * CHUNK_TARGETS + 3


class LargestFloat32(TorchDispatchMode):
    """Number of elements of the largest float32 tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return result


def logits_and_targets(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (3 * torch.randn(ROWS, VOCABULARY)).to(dtype).requires_grad_()
    return logits, torch.randint(VOCABULARY, (ROWS,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_loss_matches_cross_entropy(dtype):
    logits, targets = logits_and_targets(dtype)
    (summed_cross_entropy(logits, targets) / ROWS).backward()
    grad, logits.grad = logits.grad, None
    expected = functional.cross_entropy(logits.float(), targets)
    expected.backward()
    loss = summed_cross_entropy(logits, targets) / ROWS
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, logits.grad, rtol=1e-5, atol=1e-9)


def test_only_one_chunk_is_in_float32():
    logits, targets = logits_and_targets(torch.bfloat16)
    with LargestFloat32() as largest:
        summed_cross_entropy(logits, targets).backward()
    assert 0 < largest.elements <= CHUNK_TARGETS * VOCABULARY
