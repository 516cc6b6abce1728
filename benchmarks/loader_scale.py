"""Measure data planning for thousands of replicas and sources of 10^9 samples.

    python benchmarks/loader_scale.py --cases planning billion index --json FILE

Sample lengths are synthetic: a manifest with one line per shard, all shards being one file. The
code that reads, orders, packs and resumes is that of a run. No record is read, except in "index",
which measures synthetic text. Times are CPU seconds of one process. Memory is the growth of the
process, without memory-mapped pages. Goals are for steps of 5 s: planning takes at most 1 %, start
and resume take 10 s.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from support.harness import Row, run_cases

from torchmm.common.batch import TextSpec
from torchmm.common.files import canonical_json
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.index import measure_shards
from torchmm.data.sources.index.index_builder import IndexBuilder
from torchmm.data.sources.index.length_index import MANIFEST, Shard, ShardSizes, read_index
from torchmm.data.sources.reader import SampleReader
from torchmm.data.steps.feeds import FeedOptions, IndexFeed, Mixture, MixtureStage
from torchmm.data.steps.plan_steps import StepPacks, StepPlanner, StepSamples
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig

PACKS = 8
"""Sequences of a replica in a step."""
LENGTH = 8192
MEAN_TOKENS = 540
"""About 15 samples in a sequence."""
SEED = 5


def fabricate(directory: Path, samples: int) -> None:
    """Write an index of `samples` samples, whose shards are all the same file."""
    rng = np.random.default_rng(SEED)
    count = min(samples, measure_shards.LARGE_SHARD_SAMPLES)
    tokens = rng.gamma(2.0, MEAN_TOKENS / 2, count).clip(8, LENGTH).astype("<u4")
    starts = np.arange(count + 1, dtype="<u4")
    rows = np.array([[w, 336, w // 14 * 24, w // 28 * 12, 1, 0, 0, 0] for w in range(28, 1036, 4)])
    images = rng.integers(0, len(rows), count).astype(np.uint16)
    none = np.zeros(count + 1, "<u4"), np.zeros(0, np.uint16), np.zeros((0, 4), "<i4")
    data, arrays = measure_shards.serialize_sizes(
        ShardSizes(tokens, starts, images, rows.astype("<i4"), *none)
    )
    shard = Shard(
        0, count, 0, int(tokens.min()), int(tokens.max()), "x", hashlib.sha256(data).hexdigest(),
        len(data), arrays,
    )  # fmt: skip
    shards = [
        dataclasses.replace(shard, first=number * count) for number in range(samples // count)
    ]
    directory.mkdir(parents=True)
    first = measure_shards.shard_file(directory, 0, "sizes")
    first.write_bytes(data)
    for number in range(1, len(shards)):
        measure_shards.shard_file(directory, number, "sizes").hardlink_to(first)
    (directory / MANIFEST).write_bytes(
        canonical_json({"shards": [dataclasses.asdict(shard) for shard in shards]})
    )


def steps_of(
    directories: Sequence[Path], replicas: int, ranks: int = 1, state: dict[str, Any] | None = None
) -> StepPlanner:
    """Return the steps of rank 0, from the start or from `state`."""
    feeds = []
    for number, directory in enumerate(directories):
        index = read_index(directory)
        assert index is not None
        options = FeedOptions(number, f"s{number}", SEED, shuffle=True, one_epoch=False)
        feeds.append(IndexFeed(options, index, ("vision",)))
    training = TrainingConfig(
        global_batch_size=replicas * PACKS, microbatch_size=1, sequence_length=LENGTH, seed=SEED
    )
    stages = [MixtureStage([float(1 + number) for number in range(len(feeds))])]
    return StepPlanner(Mixture(feeds, stages), training, 16, ranks, 0, state)


def cpu_s(program: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU time of a call in seconds, and its result."""
    begin_s = time.process_time()
    result = program()
    return time.process_time() - begin_s, result


def own_bytes() -> int:
    """Return the memory of this process in bytes, without file mappings."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def plan_bytes(step: StepSamples) -> int:
    """Return the bytes of the arrays of a plan."""
    assert isinstance(step.pack, StepPacks)
    arrays = [*step.pack.samples.columns, step.pack.starts_P1, step.sequences_RMB]
    return sum(array.nbytes for array in arrays)


def sample_count(step: StepSamples) -> int:
    """Return the number of samples of all ranks."""
    assert isinstance(step.pack, StepPacks)
    return int(step.pack.starts_P1[-1])


def planning(size: str) -> Iterator[list[Row]]:
    """Measure a step of all replicas on one rank, with three sources."""
    counts = {"tiny": [8], "quick": [64, 1024], "full": [64, 256, 1024, 10_000]}[size]
    samples = 1 << (14 if size == "tiny" else 24)
    with tempfile.TemporaryDirectory() as scratch:
        directories = [Path(scratch) / str(number) for number in range(3)]
        for directory in directories:
            fabricate(directory, samples)
        for replicas in counts:
            steps = steps_of(directories, replicas, replicas)
            next(steps)  # compiles, and reads blocks
            taken_s = []
            for _ in range(5):
                used_s, step = cpu_s(lambda steps=steps: next(steps))
                taken_s.append(used_s)
            share_s, _ = cpu_s(lambda step=step: step.ranks[0])
            case = f"{replicas} replicas x {PACKS} packed sequences"
            goal = 50.0 if replicas <= 1024 else None
            yield [
                Row(case, "samples of a step", "", sample_count(step)),
                Row(case, "planning a step", "ms CPU", min(taken_s) * 1e3, goal=goal,
                    better="lower"),
                Row(case, "local samples as objects", "ms CPU", share_s * 1e3, better="lower"),
                Row(case, "plan size", "MB", plan_bytes(step) / 1e6, better="lower"),
                Row(case, "data state", "kB", len(json.dumps(step.state)) / 1e3, better="lower"),
            ]  # fmt: skip


def billion(size: str) -> Iterator[list[Row]]:
    """Measure start and resume with many samples."""
    samples = {"tiny": 1 << 18, "quick": 1 << 26, "full": 1 << 30}[size]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "index"
        fabricate(directory, samples)
        next(steps_of([directory], 8))  # compiles
        before = own_bytes()
        start_s, (steps, first) = cpu_s(lambda: _begun(directory, 64))
        grown = own_bytes() - before
        case = f"{samples:.1e} samples"
        state = json.loads(json.dumps(first.state))
        draws = int(1e5 * sample_count(first))
        state["feeds"]["s0"]["draws"] = draws
        state["steps"] = 100_000
        resume_s, (_, resumed) = cpu_s(lambda: _begun(directory, 64, state))
        shares = [
            [list(step.ranks) for step in islice(steps_of([directory], 1024, ranks), 2)]
            for ranks in (1, 8, 1024)
        ]
        flat = [[[p for r in step for m in r for p in m] for step in of] for of in shares]
        same = all(names(one) == names(flat[0]) for one in flat[1:])
        assert int(resumed.state["feeds"]["s0"]["draws"]) > draws and steps is not None
        yield [
            Row(case, "start and first step", "s CPU", start_s, goal=10.0, better="lower"),
            Row(case, "memory without mapped pages", "MB", grown / 1e6, goal=200.0, better="lower"),
            Row(case, "resume at step 10^5", "s CPU", resume_s, goal=10.0, better="lower"),
            Row(case, "same order on 1, 8 and 1,024 ranks", "", float(same), goal=1.0),
        ]


def names(steps: Sequence[Any]) -> list[Any]:
    """Return (epoch, sample index) of all samples of each packed sequence."""
    return [[(i.epoch, i.meta.index) for pack in step for i in pack] for step in steps]


def _begun(
    directory: Path, replicas: int, state: dict[str, Any] | None = None
) -> tuple[StepPlanner, StepSamples]:
    steps = steps_of([directory], replicas, state=state)
    return steps, next(steps)


class Texts:
    """Synthetic captions."""

    fingerprint = "texts"

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> Record:
        """Return record `index`."""
        return Record({"text": f"sample {index} " + "of a red boat at sea " * (index % 7)}, None)


def index(size: str) -> Iterator[list[Row]]:
    """Measure the indexing of synthetic captions in one process."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - this case alone
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    count = {"tiny": 500, "quick": 20_000, "full": 100_000}[size]
    backend = Tokenizer(models.WordLevel({"of": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    spec = TextSpec(vocab_size=3, image_token_id=None)
    reader = SampleReader(DataConfig(), 2048, spec, {}, tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "index"
        before = own_bytes()
        used_s, built = cpu_s(lambda: IndexBuilder("texts", Texts(count), reader, directory).load())
        stored = sum(f.stat().st_size for f in directory.glob("*.sizes"))
        case = f"{len(built):,} texts"
        yield [
            Row(case, "measuring", "us CPU a sample", used_s / count * 1e6, better="lower"),
            Row(case, "sizes", "bytes a sample", stored / count, goal=16.0, better="lower"),
            Row(case, "memory", "MB", (own_bytes() - before) / 1e6, better="lower"),
        ]


if __name__ == "__main__":
    run_cases(
        "Planning at scale",
        __doc__,
        {"planning": planning, "billion": billion, "index": index},
        f"fabricated sizes, mean {MEAN_TOKENS} tokens, sequences of {LENGTH}; seed {SEED}",
    )
