"""Measure the data wait per step for large images, with local and with remote data workers.

As in DistTrain figure 21, images of several sizes are decoded, resized and tokenized for every
step. A step is a sleep of the given length, because the GPU is busy and the CPU is not. The
baseline is `data.workers = 0`. Remote data workers are two processes on this machine, queried by
two local workers. "planned" is the same for a rank that has neither the data nor their index. Times
are medians over steps without the first two. Batches have to be identical.

The cost of sending is the CPU time of both ends for messages of 16 MB of pixels, over Arrow Flight
and, as the baseline, pickled over a TCP connection of multiprocessing.
"""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from pyarrow import flight
from support.harness import Row, describe_machine, make_parser, report
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchmm.common.batch import ImageSpec, TextSpec
from torchmm.data.build import build_loader
from torchmm.data.loader import Loader
from torchmm.extensions.remote.producers.rpc import FlightServer, connect_client
from torchmm.extensions.remote.producers.server import open_producer
from torchmm.extensions.remote.producers.wire_format import (
    SCHEMA,
    TensorMessage,
    decode_message,
    encode_message,
)
from torchmm.recipe.data_section import DataConfig, ProducersConfig, SourceConfig
from torchmm.recipe.training_section import TrainingConfig

SEED = 0
WARMUP = 2
SPEC = ImageSpec(
    encoder="vision",
    inputs="fixed",
    processor_class="CLIPImageProcessor",
    processor={"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    patch_size_px=14,
)
CASES = ((4, 512, 1.0), (4, 1024, 1.0), (4, 2048, 2.0), (8, 1024, 2.0))
"""Images of a step, their side in pixels, seconds of a step."""
MESSAGE_BYTES = 16 << 20


def make_samples(directory: Path, count: int, side_px: int) -> SourceConfig:
    """Write images with smooth contents, which cost a JPEG decoder as much as photographs."""
    rng = np.random.default_rng(SEED)
    rows = []
    for number in range(count):
        coarse = rng.integers(0, 255, (side_px // 16, side_px // 16, 3), dtype=np.uint8)
        stream = io.BytesIO()
        image = Image.fromarray(coarse).resize((side_px, side_px), Image.Resampling.BICUBIC)
        image.save(stream, "JPEG", quality=90)
        rows.append({"image": {"bytes": stream.getvalue(), "path": None}, "text": f"word {number}"})
    directory.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(directory / "part-0.parquet")
    return SourceConfig(path=str(directory), name="photographs")


class Site:
    """Samples with their reader and loaders."""

    def __init__(self, directory: Path, images: int, side_px: int) -> None:
        backend = Tokenizer(
            models.WordLevel({"<pad>": 0, "<image>": 1, "word": 2, "<unk>": 3}, unk_token="<unk>")
        )
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
        self.directory = directory
        self.source = make_samples(directory / "photographs", 3 * images, side_px)
        # One image fills a sequence: 576 tokens and the caption.
        self.training = TrainingConfig(
            global_batch_size=images, microbatch_size=1, sequence_length=600, seed=SEED
        )
        self.specs: dict[str, Any] = {
            "text_spec": TextSpec(vocab_size=4, image_token_id=1),
            "image_specs": {"vision": SPEC},
            "tokenizer": tokenizer,
        }

    def data(self, workers: int, addresses: list[str], *, plan: bool = False) -> DataConfig:
        nowhere = self.source.model_copy(update={"path": "/nowhere/photographs"})
        return DataConfig(
            sources=[nowhere if plan and addresses else self.source],
            workers=workers,
            index_cache_dir=str(self.directory / "index"),
            producers=ProducersConfig(addresses=addresses, plan=plan),
        )

    def loader(
        self, workers: int = 0, addresses: list[str] | None = None, *, plan: bool = False
    ) -> Loader:
        return build_loader(
            self.data(workers, addresses or [], plan=plan),
            self.training,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
            **self.specs,
        )

    @contextmanager
    def producers(self, count: int) -> Iterator[list[str]]:
        """Start the producers and yield their addresses."""
        data = self.data(0, [], plan=True)
        given = {"workers": 1, "token": None, "certificate": None}
        started = [
            open_producer(data, self.training, self.specs, "127.0.0.1:0", **given)
            for _ in range(count)
        ]
        yield [f"127.0.0.1:{producer.port}" for producer in started]
        for producer in started:
            producer.close()


def waits_s(loader: Loader, steps: int, step_s: float) -> tuple[float, float]:
    """Return the median wait of a step for its batch in seconds, and a checksum of all pixels."""
    batches, waits, checksum = iter(loader), [], 0.0
    for _ in range(WARMUP + steps):
        begin_s = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - begin_s)
        checksum += sum(
            float(m.encoders["vision"].values().pixels.sum()) for m in batch.microbatches
        )
        time.sleep(step_s)
    return median(waits[WARMUP:]), checksum


def case_rows(images: int, side_px: int, step_s: float, steps: int) -> list[Row]:
    """Return the wait times for one image size."""
    with tempfile.TemporaryDirectory() as directory:
        site = Site(Path(directory), images, side_px)
        own_s, expected = waits_s(site.loader(), steps, step_s)
        with site.producers(2) as addresses:
            found_s, found = waits_s(site.loader(2, addresses), steps, step_s)
            planned_s, planned = waits_s(site.loader(2, addresses, plan=True), steps, step_s)
    if not found == planned == expected:
        raise AssertionError(
            f"remote data workers returned other pixels: {found}, {planned}, expected {expected}"
        )
    case = f"{images} images of {side_px} x {side_px}, steps of {step_s:g} s"
    rows = [Row(case, "data wait per step", "ms", 1e3 * found_s, 1e3 * own_s, better="lower")]
    for name, own in (("", found_s), (", planned", planned_s)):
        share = f"data wait / step{name}"
        rows.append(Row(case, share, "", own / step_s, own_s / step_s, None, 0.01, "lower"))
    # DistTrain's figure 21 in words: seconds become milliseconds.
    rows.append(
        Row(
            case,
            "data wait / data wait with local decoding",
            "",
            found_s / own_s,
            1,
            better="lower",
        )
    )
    return rows


class Sender(FlightServer):
    """Flight server that sends the same message several times."""

    def __init__(self, message: TensorMessage) -> None:
        super().__init__("127.0.0.1:0")
        self._message = message

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.GeneratorStream:
        """Return the number of messages that the ticket specifies."""
        count = int(ticket.ticket)
        return flight.GeneratorStream(
            SCHEMA, (encode_message(self._message, 0) for _ in range(count))
        )


def send(told: Connection, count: int, by_flight: bool) -> None:
    """Run the sending process: report its port, send, and report its CPU seconds."""
    message = TensorMessage(
        {"part": "vision"}, {"pixels": torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)}
    )
    if by_flight:
        sender = Sender(message)
        told.send(sender.port)
        begin_s = time.process_time()
        told.recv()
    else:
        with Listener(("127.0.0.1", 0)) as listener:
            told.send(listener.address[1])
            with listener.accept() as connection:
                begin_s = time.process_time()
                for _ in range(count):
                    connection.send({k: v.numpy() for k, v in message.tensors.items()})
                told.recv()
    told.send(time.process_time() - begin_s)


def sending_s(count: int, by_flight: bool) -> float:
    """Return the CPU time of sender and receiver in seconds."""
    context = multiprocessing.get_context("spawn")
    told, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs, count, by_flight), daemon=True)
    process.start()
    port = told.recv()
    begin_s = time.process_time()
    if by_flight:
        client = connect_client(f"127.0.0.1:{port}", None, 2 * MESSAGE_BYTES)
        stream = client.do_get(flight.Ticket(str(count).encode()))
        received = sum(
            decode_message(stream.read_chunk()).tensors["pixels"].nbytes for _ in range(count)
        )
    else:
        with Client(("127.0.0.1", port)) as connection:
            pixels = (torch.from_numpy(connection.recv()["pixels"]) for _ in range(count))
            received = sum(each.nbytes for each in pixels)
    own_s = time.process_time() - begin_s
    assert received == count * MESSAGE_BYTES
    told.send("done")
    total_s = own_s + told.recv()
    process.join()
    return total_s


def sending_rows(quick: bool) -> list[Row]:
    """Return the cost of sending, as medians of rounds."""
    count, rounds = (16, 1) if quick else (64, 7)
    ours, baseline = [], []
    for _ in range(rounds):
        ours.append(sending_s(count, by_flight=True))
        baseline.append(sending_s(count, by_flight=False))
    gigabytes = count * MESSAGE_BYTES / 1e9
    found = median(ours) / gigabytes, median(baseline) / gigabytes
    return [Row("messages of 16 MB", "CPU per GB, both sides", "s", *found, better="lower")]


def main() -> None:
    """Print the table."""
    arguments = make_parser((__doc__ or "").splitlines()[0]).parse_args()
    datasets.disable_progress_bars()
    print(describe_machine(torch.device("cpu")))
    print(f"seed {SEED}")
    rows = []
    for images, side_px, step_s in CASES[:2] if arguments.quick else CASES:
        rows += case_rows(images, side_px, step_s, steps=3 if arguments.quick else 7)
        first = rows[-4]
        print(f"{first.case}: {first.baseline:.0f} -> {first.ours:.1f} ms", flush=True)
    rows += sending_rows(arguments.quick)
    report("Data wait: remote data workers, baseline: local decoding", rows, arguments.json)


if __name__ == "__main__":
    main()
