"""The emulator detects injected errors, and accepts correct code. Runs without a GPU."""

import fakecuda

fakecuda.install()
fakecuda.set_device_count(2)

import threading
from dataclasses import replace

import pytest
import torch
from fakecuda.hangs import find_stuck, mismatches
from fakecuda.races import races
from fakecuda.records import Record, as_records, attention_kernels, host_waits
from model_cases import ONE_SIZE_ENCODERS, build, make_inputs, pair_config

from torchmm.common.batch import cuda_graph_image_count
from torchmm.models.encoder_graphs import EncoderGraphs
from torchmm.models.layers import attention

ext = fakecuda.ext


def logged(function):
    ext.drain()
    ext.start_log()
    try:
        function()
    finally:
        ext.stop_log()
    return as_records(ext.drain())


def test_device_and_host_tensors_do_not_mix():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3  # a scalar is allowed
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(x, torch.ones(2, 3))


def test_empty_memory_is_nan():
    assert torch.empty(4, device="cuda").isnan().all()


def test_backward_runs_in_separate_thread():
    threads = []

    class Where(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            threads.append(threading.get_ident())
            return g * 2

    x = torch.ones(2, device="cuda", requires_grad=True)
    Where.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0] and threads != [threading.get_ident()]


@pytest.mark.parametrize(
    ("operation", "waits"),
    [
        (lambda x: x.sum().item(), True),
        (lambda x: bool((x > 0).all()), True),
        (lambda x: x.nonzero(), True),
        (lambda x: x[x > 0], True),
        (lambda x: x.masked_fill_(x > 0, 0.0), False),
        (lambda x: x.__setitem__(x > 0, 0.0), False),
        (lambda x: x.cpu(), True),
        (lambda x: torch.tensor([1.0], device="cuda"), True),
        (lambda x: torch.ones(2).pin_memory().to("cuda", non_blocking=True), False),
        (lambda x: torch.cuda.synchronize(), True),
        (lambda x: x @ x.t(), False),
    ],
)
def test_host_wait_is_logged(operation, waits):
    x = torch.ones(2, 2, device="cuda")
    assert bool(host_waits(logged(lambda: operation(x)))) == waits


def test_unordered_streams_are_race():
    side = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")

    def wrong():
        x.add_(1)
        with torch.cuda.stream(side):
            x.mul_(2)

    def right():
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
        torch.cuda.current_stream().wait_stream(side)
        x.add_(1)

    assert races(logged(wrong)) and not races(logged(right))


def test_event_is_complete_after_wait():
    side = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    before, on_side_stream, after = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    before.record()
    with torch.cuda.stream(side):
        x.add_(1)
        on_side_stream.record()
    torch.cuda.current_stream().wait_event(on_side_stream)
    x.mul_(2)
    after.record()
    assert before.query() and not on_side_stream.query() and not after.query()
    with pytest.raises(ValueError, match="completed"):
        before.elapsed_time(after)
    on_side_stream.synchronize()
    assert on_side_stream.query() and side.query() and not after.query()
    x.sum().item()  # waits for the current stream and its dependencies
    assert after.query() and before.elapsed_time(after) >= 0
    with torch.cuda.stream(side):
        x.add_(1)
        on_side_stream.record()
    x.sum().item()
    assert not on_side_stream.query()
    torch.cuda.synchronize()
    assert on_side_stream.query()


def test_unordered_pinned_copies_are_race():
    to_host, to_device = torch.cuda.Stream(), torch.cuda.Stream()
    x, y = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    host = torch.empty(4, pin_memory=True)

    def copy_back_and_forth(in_order):
        with torch.cuda.stream(to_host):
            host.copy_(x, non_blocking=True)
        if in_order:
            to_device.wait_stream(to_host)
        with torch.cuda.stream(to_device):
            y.copy_(host, non_blocking=True)

    assert races(logged(lambda: copy_back_and_forth(False)))
    assert not races(logged(lambda: copy_back_and_forth(True)))


@pytest.mark.parametrize("protection", [False, True, "recorded"])
def test_freed_memory_in_use_is_race(protection):
    side = torch.cuda.Stream()

    def run():
        x = torch.ones(64, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        if protection == "recorded":
            x.record_stream(side)
        if protection is True:
            torch.cuda.current_stream().wait_stream(side)
        del x
        torch.zeros(64, device="cuda")  # may get the same memory
        torch.cuda.current_stream().wait_stream(side)
        del y

    assert bool(races(logged(run))) == (protection is False)


def op(name, peer, comm, stream, label=""):
    return Record("comm", stream, name, "", label, [], peer, 0, f"{comm}|4 Float;", 0)


def wait(event, stream):
    return Record("wait", stream, "work.wait", "", "", [], event, 0, "", 0)


def done(event, stream):
    return Record("record", stream, "", "", "", [], event, 0, "", 0)


def test_crossing_sends_hang_in_shared_communicator():
    # Both ranks send first and then receive, with two streams per rank or one.
    ranks = {
        me: [
            op("send", you, f"{'up' if me < you else 'down'}/0:1", 1),
            op("recv", you, f"{'down' if me < you else 'up'}/0:1", 2),
        ]
        for me, you in ((0, 1), (1, 0))
    }
    assert not find_stuck(ranks)
    one = {
        me: [r._replace(text="pp/0:1|4 Float;", stream=1) for r in records]
        for me, records in ranks.items()
    }
    assert find_stuck(one)


def test_early_wait_for_receive_hangs():
    ranks = {
        0: [
            op("recv", 1, "down/0:1", 2),
            done(7, 2),
            wait(7, 0),
            done(8, 0),
            wait(8, 1),
            op("send", 1, "up/0:1", 1),
        ],
        1: [
            op("recv", 0, "up/0:1", 1),
            done(7, 1),
            wait(7, 0),
            done(8, 0),
            wait(8, 2),
            op("send", 0, "down/0:1", 2),
        ],
    }
    assert find_stuck(ranks)
    ranks[0] = [op("send", 1, "up/0:1", 1), *ranks[0][:3]]
    assert not find_stuck(ranks)


def test_different_collective_order_is_detected():
    a, b = op("all_reduce", -1, "5", 1), op("all_gather", -1, "5", 1)
    assert mismatches({0: [a, b], 1: [b, a]}) and not mismatches({0: [a, b], 1: [a, b]})
    assert mismatches({0: [op("send", 1, "up/0:1", 1)], 1: []})


def test_flash_attention_equals_attention():
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32).cuda()
    q, k, v = (
        torch.randn(12, h, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for h in (4, 2, 2)
    )
    out = varlen_attn(q, k, v, starts, starts, 7, 7, window_size=(-1, 0), enable_gqa=True)
    out.float().square().sum().backward()
    qs, ks, vs = (x.detach().cpu().float().requires_grad_() for x in (q, k, v))
    parts = []
    for a, b in ((0, 5), (5, 12)):
        part = [x[a:b].transpose(0, 1)[None] for x in (qs, ks, vs)]
        o = torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
        parts.append(o[0].transpose(0, 1))
    torch.cat(parts).square().sum().backward()
    for actual, expected in (
        (out, torch.cat(parts)),
        (q.grad, qs.grad),
        (k.grad, ks.grad),
        (v.grad, vs.grad),
    ):
        torch.testing.assert_close(
            actual.detach().cpu().float(), expected.detach(), rtol=3e-2, atol=3e-2
        )


def test_memory_is_counted_and_limited():
    before = ext.memory()[0]
    x = torch.zeros(1 << 20, device="cuda")
    assert ext.memory()[0] - before == 4 << 20
    ext.set_memory_limit(ext.memory()[0] + (1 << 20))
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 20, device="cuda")
    ext.set_memory_limit(0)
    del x
    assert ext.memory()[0] == before


def test_images_of_one_size_use_flash_attention(monkeypatch):
    torch.manual_seed(0)
    host_images = [torch.randn(3, 2, 5, 8).bfloat16() for _ in range(3)]
    outputs = []

    def attend():
        images = [x.cuda() for x in host_images]
        out, _ = attention.attention(torch.nn.Module(), *images, None, is_causal=False)
        outputs.append(out)

    assert attention_kernels(logged(attend)) == {"flash": 1}
    assert torch.backends.cuda.cudnn_sdp_enabled()
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in host_images))
    assert torch.allclose(outputs[0].cpu().float(), expected.transpose(1, 2), atol=0.02)
    monkeypatch.setattr(attention, "image_kernels", lambda card: {"8": "cudnn"})
    assert attention_kernels(logged(attend)) == {"cudnn": 1}
    monkeypatch.setattr(attention, "image_kernels", lambda card: {"16": "cudnn"})
    assert attention_kernels(logged(attend)) == {"flash": 1}


class _Layer(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = torch.nn.LayerNorm(8)
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, hidden):
        heads = self.norm(hidden).unflatten(-1, (2, 4)).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        hidden = hidden + out.transpose(1, 2).flatten(2)
        return hidden + self.second(torch.nn.functional.gelu(self.first(hidden)))


def _graphed_layers(trained=True):
    layers = torch.nn.Sequential(_Layer(0), _Layer(1)).cuda().requires_grad_(trained)
    return layers, EncoderGraphs("vision", list(layers), layers)


def _pass(run, layers, images, seed, embeddings=True):
    """Return output, input gradient and gradient sums of a forward and backward pass."""
    torch.manual_seed(seed)
    hidden = torch.randn(images, 5, 8).cuda().requires_grad_(embeddings)
    weights = torch.randn(images, 5, 8).cuda()
    out = run(hidden)
    if out.requires_grad:
        (out * weights).sum().backward()
    results = [out.detach().cpu(), *([hidden.grad.cpu()] if embeddings else [])]
    return results, [p.grad.cpu().clone() for p in layers.parameters() if p.grad is not None]


@pytest.mark.parametrize(("trained", "embeddings"), [(True, True), (True, False), (False, False)])
def test_encoder_graphs_match_eager_layers(trained, embeddings):
    counts = [3, 5, 4, 5, 1, 3, 7, 5]
    eager, _ = _graphed_layers(trained)
    layers, graphs = _graphed_layers(trained)
    for seed, images in enumerate(counts):  # gradients are accumulated, like over microbatches
        expected, sums = _pass(eager, eager, images, seed, embeddings)
        actual, actual_sums = _pass(graphs, layers, images, seed, embeddings)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(actual_sums, sums, rtol=1e-5, atol=1e-6)
    assert graphs.replays == len(counts) and not graphs.failure
    assert len(graphs._graphs) == len({cuda_graph_image_count(n) for n in counts})


def test_padded_images_of_graph_have_no_gradient():
    layers, graphs = _graphed_layers()
    torch.manual_seed(0)
    images = torch.randn(4, 5, 8).cuda()
    out = graphs(images)  # fills the graph of 4 images, which has no padding
    out.sum().backward()
    layers.zero_grad()
    big = graphs(torch.randn(5, 5, 8).cuda().requires_grad_())  # 6 images
    graph = graphs._graphs[6, torch.Size([5, 8]), torch.float32, True]
    assert (graph._input_BSD[5:] == 0).all()
    big.backward(torch.full_like(big, 1e30))
    assert (graph._output_gradient_BSD[5:] == 0).all()
    assert (graph._input_gradient_BSD[5:] == 0).all()


def test_encoder_graphs_run_one_pass():
    eager, _ = _graphed_layers()
    layers, graphs = _graphed_layers()
    torch.manual_seed(0)
    inputs = [torch.randn(n, 5, 8).cuda() for n in (3, 3, 6)]
    for x in inputs:
        graphs(x).sum().backward()  # captures all graphs
    layers.zero_grad()
    before = graphs.replays
    outputs = [graphs(x) for x in inputs]
    assert graphs.replays == before + 1
    for out, x in zip(outputs, inputs, strict=True):
        out.sum().backward()
        eager(x).sum().backward()
    for graphed, eager_parameter in zip(layers.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(
            graphed.grad.cpu(), eager_parameter.grad.cpu(), rtol=1e-5, atol=1e-6
        )
    del outputs, out
    graphs(inputs[0])  # without a backward pass
    graphs(inputs[0]).sum().backward()
    assert graphs.replays == before + 3


def test_encoder_graph_rejects_lost_activations():
    _, graphs = _graphed_layers()
    x = torch.ones(3, 5, 8).cuda()
    out = graphs(x)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwritten"):
        out.sum().backward()


@pytest.mark.parametrize("counts", [(3, 6), (6, 3)])
def test_shared_pool_overwrites_activations(monkeypatch, counts):
    """If the check is disabled, the backward pass of a graph reads memory of the next one."""
    layers, graphs = _graphed_layers()
    monkeypatch.setattr(graphs, "_is_in_use", lambda: False)
    monkeypatch.setattr(graphs, "end_pass", lambda pending_pass: None)
    inputs = [torch.randn(n, 5, 8).cuda() for n in counts]
    for x in (inputs[0], inputs[1], inputs[0]):
        graphs(x).sum().backward()
    assert not any(p.grad.isnan().any() for p in layers.parameters())
    layers.zero_grad()
    first, _ = [graphs(x) for x in inputs]
    first.sum().backward()
    assert any(p.grad.isnan().any() for p in layers.parameters())


def test_failed_capture_runs_eager_layers(caplog):
    eager, _ = _graphed_layers()
    layers, graphs = _graphed_layers()

    def run(hidden):
        assert hidden.sum().item() is not None  # the host waits
        return layers(hidden)

    graphs._run = run
    for seed in range(2):
        expected = _pass(eager, eager, 3, seed)
        torch.testing.assert_close(_pass(graphs, layers, 3, seed), expected, rtol=1e-5, atol=1e-6)
    assert graphs.replays == 0 and "stream is capturing" in graphs.failure
    assert caplog.text.count("run without CUDA graphs") == 1
    assert torch.cuda.current_stream().stream_id == 0


def test_moved_parameters_run_eager_layers():
    layers, graphs = _graphed_layers()
    x = torch.ones(3, 5, 8).cuda()
    graphs(x).sum().backward()
    layers[0].first.weight.data = layers[0].first.weight.data.clone() * 2
    expected = layers(x)
    torch.testing.assert_close(graphs(x).cpu(), expected.cpu())
    assert graphs.replays == 1 and "new addresses" in graphs.failure


def test_graph_replay_with_stale_input_is_wrong(monkeypatch):
    eager, _ = _graphed_layers()
    layers, graphs = _graphed_layers()
    _pass(graphs, layers, 3, 0)
    monkeypatch.setattr("torchmm.models.encoder_graphs._Graph._copy_padded", lambda *_: None)
    expected, _ = _pass(eager, eager, 3, 1)
    actual, _ = _pass(graphs, layers, 3, 1)
    assert not torch.allclose(actual[0], expected[0], rtol=1e-2)


@pytest.mark.parametrize("family", ONE_SIZE_ENCODERS)
def test_encoder_with_graphs_matches_eager_encoder(family):
    inputs, indices = make_inputs(family), [0, 1, 0, 1, 1]  # 6 with padding
    grids = [inputs.grids_thw[i] for i in indices]
    inputs = replace(inputs, pixels=inputs.pixels[indices], grids_thw=grids)
    results = []
    for uses_graphs in (False, True):
        encoder = build(pair_config("llama", family)).encoders["eye"].cuda()
        if uses_graphs:
            encoder.enable_cuda_graphs()
        moved = replace(inputs, pixels=inputs.pixels.cuda())
        for _ in range(2):  # gradients are accumulated
            out = encoder(moved)
            weights = torch.linspace(-1, 1, out.numel()).view(out.shape).cuda()
            (out * weights).sum().backward()
        assert encoder.graphs is None or encoder.graphs.replays == 2
        results.append([out, *(p.grad for p in encoder.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 1
    largest = max(tensor.norm().item() for tensor in results[0][1:])
    for actual, expected in zip(results[1], results[0], strict=True):
        error = (actual - expected).norm().item()
        assert error <= 1e-5 * max(expected.norm().item(), 1e-2 * largest)
