"""Tests of private functions of torch, and of the detection of changes."""

import torch
from torch.autograd.graph import GradientEdge

from torchmm.parallel import torch_compat


def test_weight_split_support_follows_torch_version():
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert torch_compat.supports_weight_split() == (version > (2, 12)) or version == (2, 12)


def test_double_counting_in_torch_is_detected(monkeypatch):
    def counting_twice(weights, groups):
        """Add the gradient from one use of the weight to the other, as torch 2.11 does."""
        (weight,) = weights
        for group in groups:
            pairs = [
                (GradientEdge(node, 0), sum(g for g in grads if g is not None))
                for node, grads in zip(group["intermediates"], group["grads"], strict=True)
            ]
            edges, grads = zip(*pairs, strict=True)
            weight_edges = tuple(GradientEdge(w, 0) for w in group["params"])
            (weight.grad,) = torch.autograd.grad(edges, weight_edges, grads)

    monkeypatch.setattr(torch_compat, "stage_backward_weight", counting_twice)
    assert not torch_compat.supports_weight_split.__wrapped__()


def test_views_are_recognized():
    x = torch.ones(2, 3, requires_grad=True)
    assert torch_compat.is_view((2 * x)[0])
    assert not torch_compat.is_view(2 * x)
