"""What we rely on in torch's private parts, and how we notice that it is different."""

import torch
from torch.autograd.graph import GradientEdge

from torchmm.parallel import torch_private


def test_a_split_backward_is_right_for_a_weight_used_twice():
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert torch_private.supports_weight_split() == (version > (2, 12)) or version == (2, 12)


def test_a_torch_that_counts_twice_is_noticed(monkeypatch):
    def counting_twice(weights, groups):
        """As in torch 2.11: what flows from one use of the weight to the other is added."""
        (weight,) = weights
        for group in groups:
            pairs = [
                (GradientEdge(node, 0), sum(g for g in grads if g is not None))
                for node, grads in zip(group["intermediates"], group["grads"], strict=True)
            ]
            edges, grads = zip(*pairs, strict=True)
            ways = tuple(GradientEdge(w, 0) for w in group["params"])
            (weight.grad,) = torch.autograd.grad(edges, ways, grads)

    monkeypatch.setattr(torch_private, "stage_backward_weight", counting_twice)
    assert not torch_private.supports_weight_split.__wrapped__()


def test_views_are_recognized():
    x = torch.ones(2, 3, requires_grad=True)
    assert torch_private.is_view((2 * x)[0])
    assert not torch_private.is_view(2 * x)
