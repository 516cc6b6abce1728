"""Compare the cost model with published training runs: tokens/s, memory and ratios.

Each run is simulated with the same model, GPUs, batch, sequence, recomputation and parallelism. One
factor per software stack (geometric mean of published over simulated speed) accounts for kernels
and power limits that the device table does not know; ratios use no factor. Nothing is measured
here. Goal: errors of at most 10 % after the factor, of ratios at most 3 %.

    python benchmarks/published_runs.py [--quick] [--json FILE]

Sources:

- torchtitan, December 2024: Llama 3.1 8B FSDP2 on 8 and 128 H100, float8, 70B memory:
  https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md
- torchtitan, June 2025: tensor parallelism with and without async TP, 8B and 70B:
  https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md
  (table: https://github.com/pytorch/torchtitan/pull/1299). Rows with rowwise float8 are omitted:
  the page calls their baseline too slow.
- torchtitan, 2024: 64 A100: performance.md in https://github.com/pytorch/torchtitan/tree/main/docs
- Megatron-Bridge, NeMo 25.11, DGX H100:
  https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import exp, log

import torch
from support.harness import Row, describe_machine, make_parser, report, write_rows
from support.papers.training_runs import RUNS, Result, simulate

QUICK = ("8b", "8b compile", "8b 128", "8b 128 compile")
RATIOS = {
    "compile / eager": ("8b compile", "8b"),
    "float8 / compile": ("8b float8", "8b compile"),
    "128 / 8 GPUs, eager": ("8b 128", "8b"),
    "128 / 8 GPUs, compile": ("8b 128 compile", "8b compile"),
    "128 / 8 GPUs, float8": ("8b 128 float8", "8b float8"),
    "async TP, 8B": ("8b async", "8b tp"),
    "async TP, 70B": ("70b async", "70b tp"),
    "async TP, 70B, float8": ("70b float8 async", "70b float8"),
}
"""Names of rows whose speeds are divided."""


def main() -> int:
    """Print the tables and return 0."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"machine: {describe_machine(torch.device('cpu'))}")
    results = {name: simulate(RUNS[name]) for name in (QUICK if arguments.quick else RUNS)}
    speeds = speed_rows(results)
    report("tokens/s per GPU, simulated x factor", speeds, None)
    memory = [
        _compared(RUNS[name].case, "peak memory", "GiB", found.memory_gib, published)
        for name, found in results.items()
        if (published := RUNS[name].memory_gib) is not None
    ]
    report("memory, simulated", memory, None)
    ratios = ratio_rows(results)
    report("ratios of speeds, simulated without factor", ratios, None)
    for metric, rows in (("speed", speeds), ("memory", memory), ("ratio", ratios)):
        own = [error(row) for row in rows if row.paper is not None]
        worst, mean = max(own, key=abs), sum(map(abs, own)) / len(own)
        print(f"{metric}: error at most {worst:+.1%}, mean {mean:.1%}, {len(own)} rows")
    if arguments.json is not None:
        write_rows(speeds + memory + ratios, arguments.json)
    return 0


def error(row: Row) -> float:
    """Return the relative error of a row against the published value."""
    assert row.paper is not None
    return row.ours / row.paper - 1


def factors(results: Mapping[str, Result]) -> dict[str, float]:
    """Return the calibration factor of each software stack."""
    logs: dict[str, list[float]] = {}
    for name, found in results.items():
        run = RUNS[name]
        logs.setdefault(run.stack, []).append(log(run.tokens_per_s / found.tokens_per_s))
    return {stack: exp(sum(own) / len(own)) for stack, own in logs.items()}


def speed_rows(results: Mapping[str, Result]) -> list[Row]:
    """Return rows of tokens per second and GPU with the factor, and rows of the factors."""
    found = factors(results)
    rows = [
        Row(stack, "calibration factor", "", factor, kind="simulated")
        for stack, factor in found.items()
    ]
    for name, result in results.items():
        run = RUNS[name]
        scaled = found[run.stack] * result.tokens_per_s
        own = _compared(f"{run.stack}: {run.case}", "speed", "tokens/s", scaled, run.tokens_per_s)
        rows.append(own)
    return rows


def ratio_rows(results: Mapping[str, Result]) -> list[Row]:
    """Return rows of ratios between two runs."""
    rows = []
    for case, (above, below) in RATIOS.items():
        if above in results and below in results:
            published = RUNS[above].tokens_per_s / RUNS[below].tokens_per_s
            ours = results[above].tokens_per_s / results[below].tokens_per_s
            rows.append(_compared(case, "ratio of speeds", "", ours, published))
    return rows


def _compared(case: str, metric: str, unit: str, ours: float, published: float) -> Row:
    return Row(case, metric, unit, ours, paper=published, kind="simulated")


if __name__ == "__main__":
    sys.exit(main())
