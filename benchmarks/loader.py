"""Compare the cost per sample of the torchmm data loader with five other loaders.

    pip install --no-deps --target DIR -r benchmarks/support/loader_packages.txt
    python benchmarks/loader.py [--quick] [--json FILE] [--packages DIR]

All loaders return the same pixels and token ids of the same JPEG files and captions, which is
checked before timing. Ranks are processes of one core without workers. Rounds of all loaders are
interleaved. Ratios are medians over rounds.

    CPU per sample     of all ranks, from the first batch to the last
    samples per second of all ranks in total, wall-clock time
    bytes read         by system calls, without memory-mapped files (Arrow tables)
    memory             of a rank: its peak above the memory at start
    start-up           until the first batch, without imports, with all data prepared
    prepared once      CPU time of everything that is written or measured before the first run

The other packages are not dependencies of torchmm. Missing packages are skipped with a message.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import torch
from PIL import Image, ImageOps
from support.captions import IMAGE_TOKEN, Captions, load_captions
from support.cases.loader_sides import SIDES, Side, Task
from support.harness import Row, describe_machine, make_parser, report

SEED = 0
SIZE_PX = (320, 240)
OURS = "torchmm"
EPOCHS = 6
"""Epochs in which torchmm returns every sample."""


@dataclass(frozen=True)
class Cost:
    """Cost of all ranks of one loader in one round."""

    cpu_us: float
    """Per sample."""
    samples_per_s: float
    read_bytes: float
    """Per sample."""
    memory_mb: float
    """Of the rank that took most."""
    start_s: float
    """CPU time of the slowest rank until its first batch."""


METRICS = {
    "cpu_us": ("CPU per sample", "us", "lower"),
    "samples_per_s": ("samples per second", "1/s", "higher"),
    "read_bytes": ("bytes read per sample", "B", "lower"),
    "memory_mb": ("memory", "MB", "lower"),
    "start_s": ("start-up", "CPU s", "lower"),
}


def main() -> int:
    """Prepare all loaders, compare tensors, measure, and return 1 if tensors differ, else 0."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--packages", type=Path, help="directory with the packages of the other loaders"
    )
    parser.add_argument("--samples", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    args = parser.parse_args()
    if args.packages is not None:
        sys.path.append(str(args.packages))
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    samples = args.samples or (96 if args.quick else 1500)
    rounds = args.rounds or (1 if args.quick else 3)
    ranks = args.ranks or ([1, 2] if args.quick else [1, 2, 4, 8])
    captions = load_captions(SEED)
    print(f"machine: {describe_machine(torch.device('cpu'))}")
    print(f"samples: {samples} JPEG files of {SIZE_PX[0]}x{SIZE_PX[1]} made of {captions.source}")
    with tempfile.TemporaryDirectory() as directory:
        task = make_task(Path(directory), captions, samples)
        try:
            rows = compare(task, args.sides, ranks, rounds)
        except DifferentTensorsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    report("Data loading: cost per sample", rows, args.json)
    return 0


class DifferentTensorsError(Exception):
    """Different tensors of two loaders."""


def make_task(directory: Path, captions: Captions, samples: int) -> Task:
    """Return a task with images in the size and format of photographs.

    Records that are used again are mirrored, then upside down.
    """
    jpegs, texts = [], []
    turns: list[Callable[[Image.Image], Image.Image]] = [
        lambda i: i,
        ImageOps.mirror,
        ImageOps.flip,
    ]
    count = len(captions.records)
    for number in range(samples):
        record = captions.records[number % count]
        image = Image.open(io.BytesIO(record["image"]["bytes"])).convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image).convert("RGB").resize(SIZE_PX)
        file = io.BytesIO()
        turns[number // count % 3](image).save(file, "JPEG", quality=90)
        jpegs.append(file.getvalue())
        texts.append(record["text"])
    tokenizer = captions.tokenizer
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    if image_token is None or image_token == tokenizer.unk_token_id:
        tokenizer.add_tokens([IMAGE_TOKEN], special_tokens=True)
        image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    return Task(directory, jpegs, texts, tokenizer, image_token)


def compare(task: Task, names: Sequence[str], counts: Sequence[int], rounds: int) -> list[Row]:
    """Return the rows of all installed loaders."""
    sides = {name: SIDES[name](task) for name in names}
    absent = [name for name, side in sides.items() if side.missing()]
    for name in absent:
        print(f"{name} is not installed ({sides.pop(name).module}) and is skipped")
    prepared = {name: in_process(prepare, side) for name, side in sides.items()}
    for name, cpu_us in prepared.items():
        print(f"{name}: prepared once in {cpu_us:,.0f} us of CPU per sample")
    contents = {name: in_process(fingerprints, side) for name, side in sides.items()}
    first, *others = contents
    for name in others:
        if contents[name] != contents[first]:
            same = len(set(contents[name]) & set(contents[first]))
            raise DifferentTensorsError(
                f"{name} and {first} agree in {same} of {len(task.jpegs)} samples"
            )
    print(f"{len(sides)} loaders return the same pixels and token ids of {len(task.jpegs)} samples")
    rows = []
    for count in counts:
        costs = measure(sides, count, rounds)
        rows += rows_of(costs, count)
        for name in absent:
            rows.append(
                Row(f"{count} ranks: {name} (absent)", "CPU per sample", "us", rows[0].ours)
            )
    return rows


def measure(sides: dict[str, Side], ranks: int, rounds: int) -> dict[str, list[Cost]]:
    """Return the costs of each loader. Every round starts with a different loader."""
    costs: dict[str, list[Cost]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            costs[name].append(run_ranks(sides[name], ranks))
            cpu_us = costs[name][-1].cpu_us
            print(f"  {ranks_of(ranks)}, round {number}: {name}: {cpu_us:,.0f} us", flush=True)
    return costs


def rows_of(costs: dict[str, list[Cost]], ranks: int) -> list[Row]:
    """Compare torchmm with each other loader, and with the fastest of them."""
    rows = []
    ours = costs[OURS]
    of_others = {name: found for name, found in costs.items() if not name.startswith(OURS)}
    for name, found in costs.items():
        if name == OURS:
            continue
        for key, (metric, unit, better) in METRICS.items():
            mine, other = (median(getattr(c, key) for c in side) for side in (ours, found))
            case = f"{ranks_of(ranks)}: {name}"
            rows.append(Row(case, metric, unit, mine, other, better=better))  # type: ignore[arg-type]
    if of_others:
        best = min(of_others, key=lambda name: median(c.cpu_us for c in of_others[name]))
        pairs = zip(of_others[best], ours, strict=True)
        ratio = median(other.cpu_us / mine.cpu_us for other, mine in pairs)
        rows.append(
            Row(f"{ranks_of(ranks)}: {best}, the fastest", "speed by CPU", "x", ratio, goal=1.0)
        )
    return rows


def ranks_of(count: int) -> str:
    """Return the number of ranks as text."""
    return f"{count} rank{'s' * (count > 1)}"


def prepare(side: Side) -> float:
    """Return the CPU time per sample in microseconds."""
    begin = cpu_s()
    side.prepare()
    return 1e6 * (cpu_s() - begin) / len(side.task.jpegs)


def fingerprints(side: Side) -> list[str]:
    """Hash the tensors of every sample, sorted. torchmm needs several epochs to return all."""
    found: set[str] = set()
    wanted = len(set(zip(side.task.jpegs, side.task.captions, strict=True)))
    seen = 0
    for count, content in side.batches(0, 1):
        for ids, pixels in content():
            digest = hashlib.sha256(str(ids).encode() + pixels.contiguous().numpy().tobytes())
            found.add(digest.hexdigest())
        seen += count
        if len(found) == wanted or seen > EPOCHS * len(side.task.jpegs):
            break
    return sorted(found)


def run_ranks(side: Side, ranks: int) -> Cost:
    """Run all ranks of a loader concurrently, each with its shard of an epoch."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    start = context.Barrier(ranks)
    share = len(side.task.jpegs) // ranks
    processes = [
        context.Process(target=_rank, args=(side, rank, ranks, share, start, answers))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    samples = sum(f["samples"] for f in found)
    wall_s = max(f["end"] for f in found) - min(f["begin"] for f in found)
    return Cost(
        cpu_us=1e6 * sum(f["cpu_s"] for f in found) / samples,
        samples_per_s=samples / wall_s,
        read_bytes=sum(f["read"] for f in found) / samples,
        memory_mb=max(f["memory"] for f in found) / 1e6,
        start_s=max(f["start_s"] for f in found),
    )


def _rank(side: Side, rank: int, ranks: int, share: int, start: Any, answers: Any) -> None:
    resident = memory("VmRSS")
    begin_cpu, begin_read = cpu_s(), read_bytes()
    batches = side.batches(rank, ranks)
    next(batches)
    start_s = cpu_s() - begin_cpu
    start.wait()
    begin, begin_cpu, samples = time.monotonic(), cpu_s(), 0
    for count, _ in batches:
        samples += count
        if samples >= share * 0.75:  # the last batches of a rank come when others have none
            break
    answers.put({
        "samples": samples,
        "start_s": start_s,
        "cpu_s": cpu_s() - begin_cpu,
        "begin": begin,
        "end": time.monotonic(),
        "read": read_bytes() - begin_read,
        "memory": memory("VmHWM") - resident,
    })  # fmt: skip
    os._exit(0)  # threads of some have not noticed that it is over


def in_process(function: Callable[[Side], Any], side: Side) -> Any:
    """Return the result of a function from a separate process, because threads do not fork."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def answer() -> None:
        answers.put(function(side))
        os._exit(0)

    process = context.Process(target=answer)
    process.start()
    result = answers.get()
    process.join()
    return result


def cpu_s() -> float:
    """Return the CPU time of this process and its finished child processes in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def read_bytes() -> int:
    """Return the number of bytes that system calls have read."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


def memory(name: str) -> int:
    """Return a memory value of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"{name}:\s+(\d+) kB", status)[0])


if __name__ == "__main__":
    sys.exit(main())
