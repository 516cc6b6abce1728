"""Whether the emulator finds what it is for, and nothing else. Runs without a GPU."""

import fakecuda

fakecuda.install(2)

import threading

import pytest
import torch
from fakecuda.hangs import mismatches, stuck
from fakecuda.races import races
from fakecuda.records import Record, as_records, attention_kernels, host_waits

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


def test_tensors_of_both_kinds_do_not_mix():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number may
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(x, torch.ones(2, 3))


def test_memory_is_not_clean():
    assert torch.empty(4, device="cuda").isnan().all()


def test_backward_runs_in_a_thread_of_its_own():
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
    ("what", "waits"),
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
def test_where_the_host_waits(what, waits):
    x = torch.ones(2, 2, device="cuda")
    assert bool(host_waits(logged(lambda: what(x)))) == waits


def test_two_streams_without_order_are_a_race():
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


def test_event_is_complete_after_a_wait_that_covers_it():
    side = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    before, beside, after = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    before.record()
    with torch.cuda.stream(side):
        x.add_(1)
        beside.record()
    torch.cuda.current_stream().wait_event(beside)
    x.mul_(2)
    after.record()
    assert before.query() and not beside.query() and not after.query()
    with pytest.raises(ValueError, match="completed"):
        before.elapsed_time(after)
    beside.synchronize()
    assert beside.query() and side.query() and not after.query()
    x.sum().item()  # waits for the current stream, and so for all that it waits for
    assert after.query() and before.elapsed_time(after) >= 0
    with torch.cuda.stream(side):
        x.add_(1)
        beside.record()
    x.sum().item()
    assert not beside.query()
    torch.cuda.synchronize()
    assert beside.query()


def test_page_locked_memory_is_a_race_too():
    going, coming = torch.cuda.Stream(), torch.cuda.Stream()
    x, y = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    host = torch.empty(4, pin_memory=True)

    def there_and_back(in_order):
        with torch.cuda.stream(going):
            host.copy_(x, non_blocking=True)
        if in_order:
            coming.wait_stream(going)
        with torch.cuda.stream(coming):
            y.copy_(host, non_blocking=True)

    assert races(logged(lambda: there_and_back(False)))
    assert not races(logged(lambda: there_and_back(True)))


@pytest.mark.parametrize("kept", [False, True, "recorded"])
def test_memory_goes_back_while_another_stream_reads(kept):
    side = torch.cuda.Stream()

    def run():
        x = torch.ones(64, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        if kept == "recorded":
            x.record_stream(side)
        if kept is True:
            torch.cuda.current_stream().wait_stream(side)
        del x
        torch.zeros(64, device="cuda")  # may get the same memory
        torch.cuda.current_stream().wait_stream(side)
        del y

    assert bool(races(logged(run))) == (kept is False)


def op(name, peer, comm, stream, label=""):
    return Record("comm", stream, name, "", label, [], peer, 0, f"{comm}|4 Float;", 0)


def wait(event, stream):
    return Record("wait", stream, "work.wait", "", "", [], event, 0, "", 0)


def done(event, stream):
    return Record("record", stream, "", "", "", [], event, 0, "", 0)


def test_crossing_sends_hang_in_one_communicator_only():
    # Both send first and receive then: two streams per rank, or one.
    ranks = {
        me: [
            op("send", you, f"{'up' if me < you else 'down'}/0:1", 1),
            op("recv", you, f"{'down' if me < you else 'up'}/0:1", 2),
        ]
        for me, you in ((0, 1), (1, 0))
    }
    assert not stuck(ranks)
    one = {
        me: [r._replace(text="pp/0:1|4 Float;", stream=1) for r in records]
        for me, records in ranks.items()
    }
    assert stuck(one)


def test_a_receive_that_is_waited_for_before_its_sender_can_send():
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
    assert stuck(ranks)
    ranks[0] = [op("send", 1, "up/0:1", 1), *ranks[0][:3]]
    assert not stuck(ranks)


def test_collectives_in_another_order_are_told():
    a, b = op("all_reduce", -1, "5", 1), op("all_gather", -1, "5", 1)
    assert mismatches({0: [a, b], 1: [b, a]}) and not mismatches({0: [a, b], 1: [a, b]})
    assert mismatches({0: [op("send", 1, "up/0:1", 1)], 1: []})


def test_flash_attention_is_attention():
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
    for mine, theirs in (
        (out, torch.cat(parts)),
        (q.grad, qs.grad),
        (k.grad, ks.grad),
        (v.grad, vs.grad),
    ):
        torch.testing.assert_close(
            mine.detach().cpu().float(), theirs.detach(), rtol=3e-2, atol=3e-2
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
    plain = [torch.randn(3, 2, 5, 8).bfloat16() for _ in range(3)]
    outputs = []

    def attend():
        images = [x.cuda() for x in plain]
        out, _ = attention.attention(torch.nn.Module(), *images, None, is_causal=False)
        outputs.append(out)

    assert attention_kernels(logged(attend)) == {"flash": 1}
    assert torch.backends.cuda.cudnn_sdp_enabled()
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in plain))
    assert torch.allclose(outputs[0].cpu().float(), expected.transpose(1, 2), atol=0.02)
    monkeypatch.setattr(attention, "image_kernels", lambda card: {"8": "cudnn"})
    assert attention_kernels(logged(attend)) == {"cudnn": 1}
    monkeypatch.setattr(attention, "image_kernels", lambda card: {"16": "cudnn"})
    assert attention_kernels(logged(attend)) == {"flash": 1}
