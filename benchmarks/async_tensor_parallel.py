"""Measure async tensor parallelism: layers on a slow link, and matmuls in blocks.

    python benchmarks/async_tensor_parallel.py [--quick] [--json FILE] [--plot FILE] [--cuda]

    mlp       forward and backward of gated MLPs on two ranks. Transfers take as long as on a link
              of the stated speed (`slow_link`), because gloo on one machine takes almost no time.
              The lower bound of a step is max(compute, transfers)
    layers    the same for Hugging Face Llama layers with the tensor-parallel plan. Nothing overlaps
              with attention and norms
    products  cost of splitting a matmul into blocks, without transfers
              (--cuda: only this case, with the shapes of Llama 3 8B and 70B)

Every rank uses one thread. With overlap a rank receives more data, because it gathers inputs again
instead of storing them. The lower bound includes this.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from support.harness import Row, describe_machine, make_parser, report
from support.models.async_prediction import prediction_rows
from support.models.chunked_products import (
    CHUNKS,
    CPU_PRODUCTS,
    CUDA_PRODUCTS,
    TINY_PRODUCTS,
    product_rows,
)
from support.ranks import Stopwatch, run_ranks
from support.slow_link import Interval, Link, Records, slow_group
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from torchmm.extensions.async_tp.linear import Overlap, gather_linear, linear_scatter
from torchmm.extensions.async_tp.styles import AsyncStyles
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.layers.attention import Segments
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import materialize
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.recipe.changes import reject_renamed_options
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

RANKS = 2
SEED = 0
QUIET = 0.05
"""Share of the CPU that other programs may take."""
NEAR_BOUND = 1.1
"""Goal, as a multiple of the shortest possible step."""


@dataclass(frozen=True)
class Setting:
    """Sizes and length of the measurement."""

    hidden: int
    ffn: int
    layers: int
    tokens: int
    ratios: tuple[float, ...]
    """Transfer time of a plain step / computing time."""
    runs: int
    patience_s: float


SETTINGS = {
    "full": Setting(768, 2048, 2, 1024, (0.25, 0.5, 1.0, 2.0), 9, 60.0),
    "quick": Setting(512, 1408, 1, 512, (0.5,), 3, 1.0),
    "tiny": Setting(32, 64, 1, 32, (1.0,), 1, 0.0),
}


class Recorded(NamedTuple):
    """Recorded times of one step on one rank."""

    name: str
    step: Interval
    records: Records


class OverlapTimes(NamedTuple):
    """Times of one program pair at one speed of the link."""

    case: str
    ratio: float
    mb_per_s: float
    chunks: int
    compute_s: float
    transfer_s: dict[str, float]
    step_s: dict[str, float]
    disturbed: str
    steps: list[Recorded]
    """One step of each program, for the plot."""

    @property
    def bound(self) -> float:
        """Lower bound of the step time / step time of regular tensor parallelism."""
        shortest_s = max(self.compute_s, self.transfer_s["overlapped"])
        return shortest_s / (self.compute_s + self.transfer_s["plain"])


class SplitProgram(ABC):
    """Forward and backward pass on this rank, whose transfers the link records.

    Args:
        chunks: Blocks per slice. 0 means regular tensor parallelism.
    """

    case: str

    def __init__(
        self, setting: Setting, group: dist.ProcessGroup, link: Link, chunks: int = 0
    ) -> None:
        self.name = "overlapped" if chunks else "plain"
        self.chunks = chunks
        self._link = link
        self._mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tensor",))
        self._overlap = Overlap("ring", group.group_name, chunks) if chunks else None
        generator = torch.Generator().manual_seed(SEED)
        self._x_TD = torch.randn(setting.tokens, setting.hidden, generator=generator)
        self._grad_TD = torch.randn(setting.tokens, setting.hidden, generator=generator)

    @abstractmethod
    def run(self) -> Tensor:
        """Run a forward and a backward pass, and return the gradient of the input."""

    def step(self, index: int) -> float:
        """Run a step and return the seconds in which this rank does not wait."""
        recorded = self.record()
        waited_s = sum(wait.end_s - wait.begin_s for wait in recorded.records.waits)
        return recorded.step.end_s - recorded.step.begin_s - waited_s

    def record(self) -> Recorded:
        """Run a step and return its times and the transfers during it."""
        self._link.take_records()
        begin_s = time.perf_counter()
        self.run()
        step = Interval(begin_s, time.perf_counter())
        return Recorded(self.name, step, self._link.take_records())


class Mlps(SplitProgram):
    """A sequence of gated MLPs whose inputs and outputs are slices of the sequence dimension."""

    case = "MLPs"

    def __init__(
        self, setting: Setting, group: dist.ProcessGroup, link: Link, chunks: int = 0
    ) -> None:
        super().__init__(setting, group, link, chunks)
        width, hidden = setting.ffn // RANKS, setting.hidden
        self._rows = setting.tokens // RANKS
        generator = torch.Generator().manual_seed(SEED + 1 + group.rank())
        self._weights = [
            [
                (torch.randn(shape, generator=generator) * hidden**-0.5).requires_grad_()
                for shape in ((width, hidden), (width, hidden), (hidden, width))
            ]
            for _ in range(setting.layers)
        ]

    def run(self) -> Tensor:
        own = slice(self._rows * self._mesh.get_local_rank(), None)
        x_SD = self._x_TD[own][: self._rows].detach().requires_grad_()
        hidden_SD = x_SD
        for weights in self._weights:
            for weight in weights:
                weight.grad = None
            output_SD = (
                self._overlapped(hidden_SD, *weights)
                if self._overlap
                else (self._plain(hidden_SD, *weights))
            )
            hidden_SD = hidden_SD + output_SD
        hidden_SD.backward(self._grad_TD[own][: self._rows])
        assert x_SD.grad is not None
        return x_SD.grad

    def _overlapped(self, x_SD: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        assert self._overlap is not None
        both, rows = [gate, up], len(self._x_TD)
        gate_TF, up_TF = gather_linear(x_SD, both, [None, None], rows, self._overlap)
        hidden_TF = functional.silu(gate_TF) * up_TF
        return linear_scatter(hidden_TF, down, None, len(x_SD), self._overlap)

    def _plain(self, x_SD: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x = DTensor.from_local(x_SD, self._mesh, [Shard(0)], run_check=False)
        x_TD = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        hidden_TF = functional.silu(functional.linear(x_TD, gate)) * functional.linear(x_TD, up)
        partial_TD = functional.linear(hidden_TF, down)
        out = DTensor.from_local(partial_TD, self._mesh, [Partial()], run_check=False)
        return out.redistribute(placements=[Shard(0)]).to_local()


class Layers(SplitProgram):
    """Llama layers of Hugging Face Transformers."""

    case = "Llama layers"

    def __init__(
        self, setting: Setting, group: dist.ProcessGroup, link: Link, chunks: int = 0
    ) -> None:
        super().__init__(setting, group, link, chunks)
        config = {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": setting.hidden,
            "intermediate_size": setting.ffn,
            "num_hidden_layers": setting.layers,
            "num_attention_heads": max(2, setting.hidden // 64),
            "num_key_value_heads": max(2, setting.hidden // 64),
        }
        model = build_model(ModelConfig(llm={"config": config}), FreezeConfig())
        self.llm: LlmModule = model.llm
        styles = AsyncStyles(self._overlap) if self._overlap else None
        apply_tensor_parallel(self.llm, self._mesh, True, styles)
        materialize(model, "cpu")
        init_weights(model, SEED)

    def run(self) -> Tensor:
        self.llm.zero_grad()
        x_TD = self._x_TD.detach().requires_grad_()
        tokens = len(x_TD)
        output = self.llm.text_model(
            inputs_embeds=x_TD[None],
            position_ids=torch.arange(tokens)[None],
            use_cache=False,
            cu_seq_lens_q=Segments.from_starts([0, tokens], x_TD.device),
        )
        output.last_hidden_state[0].backward(self._grad_TD)
        assert x_TD.grad is not None
        return x_TD.grad


def run_rank(setting: Setting) -> list[OverlapTimes]:
    """Measure all programs at every link speed. Collective."""
    group, link = slow_group()
    watch = Stopwatch(setting.patience_s, QUIET)
    return [
        found for kind in (Mlps, Layers) for found in compare(kind, setting, group, link, watch)
    ]


def compare(
    kind: type[SplitProgram],
    setting: Setting,
    group: dist.ProcessGroup,
    link: Link,
    watch: Stopwatch,
) -> list[OverlapTimes]:
    """Return the times of regular and overlapped programs at every link speed."""
    link.s_per_byte = 0.0
    plain = kind(setting, group, link)
    tried = [kind(setting, group, link, chunks) for chunks in CHUNKS]
    expected = plain.run()
    for program in tried:
        error = ((program.run() - expected).norm() / expected.norm()).item()
        if not error <= 1e-5:
            raise ValueError(f"gradients with {program.chunks} blocks differ by {error:.1e}")
    received = {p.name: p.record().records.received_bytes for p in (plain, tried[0])}
    compute_s = watch.compare([plain], 1, setting.runs).wall_s("plain")
    found = []
    for ratio in setting.ratios:
        link.s_per_byte = ratio * compute_s / received["plain"]
        ours = watch.fastest(tried)
        comparison = watch.compare([plain, ours], 1, setting.runs)
        found.append(
            OverlapTimes(
                f"{setting.layers} {kind.case}, {setting.hidden} features, {setting.tokens} tokens",
                ratio,
                1e-6 / link.s_per_byte,
                ours.chunks,
                compute_s,
                {name: size * link.s_per_byte for name, size in received.items()},
                {name: comparison.wall_s(name) for name in received},
                str(comparison),
                [plain.record(), ours.record()],
            )
        )
    return found


def overlap_rows(found: OverlapTimes) -> list[Row]:
    """Return the rows of one link speed."""
    case = f"{found.case}, {RANKS} ranks, communication {found.ratio:g} x compute"
    torchmm_s, plain_s = found.step_s["overlapped"], found.step_s["plain"]
    goal = round(found.bound * NEAR_BOUND, 3) if Mlps.case in found.case else None
    ratio, bound = torchmm_s / plain_s, found.bound
    return [
        Row(case, "step", "ms", torchmm_s * 1e3, plain_s * 1e3, better="lower"),
        Row(case, "step / step without overlap", "", ratio, bound, goal=goal, better="lower"),
    ]


def draw_overlap(steps: Sequence[Recorded], file: Path) -> None:
    """Plot computation and transfers of one step of each program."""
    figure = Figure(figsize=(9, 1.1 + 0.9 * len(steps)), layout="constrained")
    axes = figure.subplots()
    labels = []
    for index, (name, step, records) in enumerate(steps):
        level = 2.4 * (len(steps) - 1 - index)
        edges = [step.begin_s, *(t for wait in records.waits for t in wait), step.end_s]
        computing = zip(edges[::2], edges[1::2], strict=True)
        for offset, intervals, color in (
            (1.0, computing, "#3b6ea5"),
            (0.0, records.transfers, "#d98c3f"),
        ):
            bars = [((a - step.begin_s) * 1e3, (b - a) * 1e3) for a, b in intervals]
            axes.broken_barh(bars, (level + offset, 0.85), color=color, linewidth=0)
        labels += [(level + 1.4, f"{name}: compute"), (level + 0.4, "link")]
    axes.set_yticks([at for at, _ in labels], [text for _, text in labels])
    axes.set_xlabel("ms")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file)


def main() -> None:
    """Print the table."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="run the smallest cases, for tests")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot one step of each case to FILE"
    )
    reject_renamed_options(parser, "async_tensor_parallel")
    parser.add_argument("--cuda", action="store_true", help="measure only matmuls, on the GPU")
    arguments = parser.parse_args()
    size = "tiny" if arguments.tiny else "quick" if arguments.quick else "full"
    setting, rows = SETTINGS[size], []
    device = torch.device("cuda" if arguments.cuda else "cpu")
    torch.set_num_threads(1)
    print(f"machine: {describe_machine(device)}; seed {SEED}")
    every = CUDA_PRODUCTS if arguments.cuda else CPU_PRODUCTS
    for products in TINY_PRODUCTS if arguments.tiny else every:
        rows += product_rows(products, device, setting.runs * 3)
    for found in [] if arguments.cuda else run_ranks(run_rank, RANKS, setting):
        print(f"{found.case}, link of {found.mb_per_s:.1f} MB/s, {found.chunks} blocks:")
        print(f"  {found.disturbed}")
        print(f"  compute {found.compute_s * 1e3:.1f} ms; transfers, ms: "
              + ", ".join(f"{n} {s * 1e3:.1f}" for n, s in found.transfer_s.items()))  # fmt: skip
        rows += overlap_rows(found)
        if arguments.plot and Mlps.case in found.case and found.ratio in (0.5, 1):
            draw_overlap(found.steps, arguments.plot)
    if not (arguments.tiny or arguments.cuda):
        rows += prediction_rows()
    report("Async tensor parallelism", rows, arguments.json)


if __name__ == "__main__":
    main()
