"""Emulation of CUDA and NCCL for a torch build without CUDA. Device operations are logged.

    import fakecuda            before anything imports torch
    fakecuda.install()
    fakecuda.set_device_count(8)

Tensors on "cuda" use host memory, and CPU kernels compute them immediately in program order.
Operations that are asynchronous on a GPU (kernels of several streams, NCCL, copies from pinned
memory) are logged with streams and events. The log shows possible behavior of a GPU: races between
streams and memory that is reused too early (`races`), waits of the host (`records`), and NCCL
operations in an order that hangs (`hangs`). Backward runs in the device thread of autograd, as on a
GPU.

The emulation does not cover speed, numerics of GPU kernels, kernels that do not exist on CUDA, and
memory other than tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path

_SOURCE = Path(__file__).parent / "fakecuda.cpp"
_VERSION = hashlib.sha256(_SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:12]
BUILD = Path.home() / ".cache" / "fakecuda" / _VERSION
"""Directory of the compiled library."""
ext = None
device_count = 8


def load():
    """Load the compiled library before torch initializes CUDA."""
    global ext
    if ext is not None:
        return ext
    if "torch" in sys.modules:
        raise RuntimeError("import fakecuda before torch")
    library = BUILD / "fakecuda_ext.so"
    if not library.exists():
        raise RuntimeError(f"{library} is missing; run python {Path(__file__).parent}/build.py")
    # pybind modules of torch need these four libraries, in this order.
    root = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(root / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location("fakecuda_ext", library)
    ext = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ext)
    return ext


def install(name: str = "NVIDIA H200", memory: int = 141 << 30) -> None:
    """Replace torch.cuda and the backend "nccl" with the emulation."""
    extension = load()
    import torch

    _patch_cuda(torch, extension, name, memory)
    _patch_storage(torch, extension)
    _patch_attention(torch)
    _patch_nccl(torch, extension)
    from fakecuda import flash, graphs, symmetric  # noqa: F401 - kernels of variable length attention

    graphs.install()
    symmetric.install()


def set_device_count(count: int) -> None:
    """Set the number of devices of this host."""
    global device_count
    device_count = count
    ext.set_device_count(count)


def _patch_cuda(torch, extension, name, memory):
    cuda = torch.cuda

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **kwargs):
            if kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(
                cls, device=torch.device("cuda", extension.current_device()), priority=0
            )

        @property
        def cuda_stream(self):
            return self.stream_id

    class Event(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            event = super().__new__(
                cls, device=torch.device("cuda", extension.current_device()), enable_timing=True
            )
            event.timed = enable_timing
            return event

        def record(self, stream=None):
            super().record(stream if stream is not None else current_stream())
            self.at_s = time.perf_counter()

        def wait(self, stream=None):
            super().wait(stream if stream is not None else current_stream())

        def elapsed_time(self, end):
            if not (self.timed and end.timed):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if not (self.query() and end.query()):
                raise ValueError("Both events must be completed before calculating elapsed time.")
            return (end.at_s - self.at_s) * 1e3

    def index_of(device=None):
        if device is None:
            return extension.current_device()
        if isinstance(device, int):
            return device if device >= 0 else extension.current_device()
        device = torch.device(device)
        return extension.current_device() if device.index is None else device.index

    def current_stream(device=None):
        return Stream(
            stream_id=extension.current_stream_id(), device_index=index_of(device), device_type=1
        )

    def default_stream(device=None):
        return Stream(stream_id=0, device_index=index_of(device), device_type=1)

    class StreamContext:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            if self.stream is not None:
                self.before = extension.exchange_stream(self.stream.stream_id)
            return self.stream

        def __exit__(self, *_):
            if self.stream is not None:
                extension.exchange_stream(self.before)

    class Device:
        def __init__(self, device):
            self.index = index_of(device)

        def __enter__(self):
            self.before = extension.current_device()
            extension.set_device(self.index)

        def __exit__(self, *_):
            extension.set_device(self.before)

    def properties(device=None):
        return types.SimpleNamespace(
            uuid=f"fake-{extension.current_device() if device is None else index_of(device)}",
            **shared,
        )

    shared = dict(
        name=name, total_memory=memory, multi_processor_count=132, major=9, minor=0,
        warp_size=32, gcnArchName="", L2_cache_size=60 << 20, is_integrated=False,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    )  # fmt: skip

    def synchronize(device=None):
        from fakecuda.graphs import reject_while_capturing

        reject_while_capturing("cudaDeviceSynchronize")
        extension.note("sync", "device.synchronize", "")

    def record_history(*args, **kwargs):
        extension.note("memory_history", "record", "")

    class Cudart:
        """CUDA runtime library: page-locking of existing memory."""

        class cudaError:
            success = 0

        def cudaHostRegister(self, pointer, size, flags):
            extension.note("host_register", "cudaHostRegister", str(size))
            extension.host_register(pointer, size)
            return 0

        def cudaHostUnregister(self, pointer):
            extension.host_unregister(pointer)
            return 0

    replacements = dict(
        cudart=Cudart,
        is_available=lambda: True, is_initialized=lambda: True, init=lambda: None,
        _lazy_init=lambda: None, device_count=lambda: device_count,
        current_device=extension.current_device,
        set_device=lambda d: extension.set_device(index_of(d)), get_device_name=lambda d=None: name,
        get_device_properties=properties,
        get_device_capability=lambda d=None: (9, 0),
        is_bf16_supported=lambda including_emulation=True: True, Stream=Stream, Event=Event,
        current_stream=current_stream, default_stream=default_stream, stream=StreamContext,
        StreamContext=StreamContext, device=Device, synchronize=synchronize,
        set_stream=lambda s: extension.exchange_stream(s.stream_id),
        max_memory_allocated=lambda d=None: extension.memory()[1],
        memory_allocated=lambda d=None: extension.memory()[0],
        max_memory_reserved=lambda d=None: extension.memory()[1],
        memory_reserved=lambda d=None: extension.memory()[0],
        reset_peak_memory_stats=lambda d=None: extension.reset_peak(), empty_cache=lambda: None,
        mem_get_info=lambda d=None: (memory - extension.memory()[0], memory),
        manual_seed=lambda s: None, manual_seed_all=lambda s: None, seed_all=lambda: None,
        get_rng_state=lambda d="cuda": torch.get_rng_state(),
        set_rng_state=lambda s, d="cuda": torch.set_rng_state(s),
        get_rng_state_all=lambda: [torch.get_rng_state()] * device_count,
        set_rng_state_all=lambda s: None, is_current_stream_capturing=lambda: False,
        can_device_access_peer=lambda a, b: True, ipc_collect=lambda: None,
        _is_in_bad_fork=lambda: False, is_mig_enabled=lambda: False,
    )  # fmt: skip
    for key, value in replacements.items():
        setattr(cuda, key, value)
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.memory._record_memory_history = record_history
    cuda.memory._dump_snapshot = lambda path: Path(path).write_bytes(b"")
    cuda.memory.max_memory_allocated = replacements["max_memory_allocated"]
    cuda.random.get_rng_state = replacements["get_rng_state"]
    cuda.random.set_rng_state = replacements["set_rng_state"]
    torch._C._cuda_getDeviceCount = lambda: device_count
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    torch._C._cuda_isInBadFork = False
    torch._C._cuda_getCurrentRawStream = lambda device: extension.current_stream_id()
    torch._C._cuda_getDevice = extension.current_device
    torch._C._cuda_setDevice = extension.set_device
    torch._C._cuda_exchangeDevice = lambda d: (
        (extension.current_device(), extension.set_device(d))[0]
        if d >= 0
        else extension.current_device()
    )
    torch._C._cuda_maybeExchangeDevice = torch._C._cuda_exchangeDevice
    torch.cuda._is_compiled = lambda: True
    torch.accelerator.synchronize = lambda device=None: extension.note(
        "sync", "device.synchronize", ""
    )
    torch.utils.data._utils.pin_memory.torch = torch


def _patch_storage(torch, extension):
    original = torch.UntypedStorage.resize_

    def resize_(self, size):
        if self.device.type != "cuda":
            return original(self, size)
        holder = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        extension.resize_storage(holder, int(size))
        return None

    torch.UntypedStorage.resize_ = resize_


def _patch_attention(torch):
    """Compute attention with matmuls, and log the kernel that CUDA would select."""
    original = torch.nn.functional.scaled_dot_product_attention
    math_attention = torch.ops.aten._scaled_dot_product_attention_math

    def attention(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        if query.device.type != "cuda":
            return original(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        half = query.dtype in (torch.bfloat16, torch.float16)
        grouped = query.shape[1] != key.shape[1]
        fused = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
        if half and fused and torch.backends.cuda.cudnn_sdp_enabled():
            kernel = "cudnn"  # first on Hopper
        elif half and attn_mask is None and fused:
            kernel = "flash"
        elif fused and not (grouped and enable_gqa):
            kernel = "efficient"
        else:
            kernel = "math"
        ext.note(
            "sdpa",
            kernel,
            f"{tuple(query.shape)} {query.dtype} mask={attn_mask is not None} gqa={grouped}",
        )
        out, _ = math_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        # Kernels for long sequences give (B, T, H, D) memory.
        return (
            out.transpose(1, 2).contiguous().transpose(1, 2)
            if kernel in ("flash", "cudnn")
            else out
        )

    torch.nn.functional.scaled_dot_product_attention = attention
    torch._C._nn.scaled_dot_product_attention = attention


def _patch_nccl(torch, extension):
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    class Meta(type):
        def __instancecheck__(cls, value):
            return isinstance(value, c10d.Backend_type) and value.name() == "nccl"

    class Options(
        dist.ProcessGroupGloo._Options if False else torch._C._distributed_c10d.Backend.Options
    ):
        def __init__(self, is_high_priority_stream=False):
            super().__init__("nccl")
            self.is_high_priority_stream = is_high_priority_stream
            self.config = types.SimpleNamespace()
            self.split_from = None
            self.split_color = 0

    c10d.Backend_type = torch._C._distributed_c10d.Backend
    counter = {}

    class ProcessGroupNCCL(metaclass=Meta):
        def __new__(cls, store, rank, size, options):
            gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            ranks = list(options.global_ranks_in_group) or list(range(size))
            key = options.group_name or "default"
            group = extension.make_nccl(gloo, f"{key}", ranks, options)
            keep.append((gloo, options))
            return group

    ProcessGroupNCCL.Options = Options
    keep = counter.setdefault("keep", [])
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    dist.ProcessGroupNCCL = ProcessGroupNCCL
    dist.is_nccl_available = lambda: True
    c10d.is_nccl_available = lambda: True
