"""Check that torchmm computes the right results on the GPUs of this machine.

    python scripts/gpu_check.py [--json FILE] [--minutes 9] [--only NAME ...]

Each result is printed, and appended to FILE as a JSON object, as soon as it is known. It has the
value, the expected value and a verdict. A check that exceeds its time limit is "not run". The
script requires the data set of the quickstart (`python scripts/prepare_data.py emoji_scenes`). The
exit code is 1 if a result is wrong. `benchmarks/one_gpu.py` measures speed.

    losses       first steps of the quickstart on the GPU against the CPU, in float32 and bfloat16,
                 and over 2 GPUs: FSDP2, pipelines, tensor parallelism with and without overlap,
                 encoder layers inside collectives
    attention    kernels that packed attention runs
    families     gradients of a small model of every family on one GPU against the CPU
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from torchmm.common.errors import ConfigError
from torchmm.common.log import log_to_console, make_console, report_imports, report_progress

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data" / "emoji_scenes"
QUICKSTART = ROOT / "recipes" / "quickstart.toml"
STEPS = 6
SHUTDOWN_S = 40
"""Time limit of the shutdown in seconds. torchrun waits 30 s for its ranks."""
EXACT, ROUNDED = 1e-4, 3e-2
"""Limits on the relative difference to the float32 losses of the CPU.

`EXACT` applies to float32, in which kernels sum in different orders. `ROUNDED` applies to bfloat16.
"""
LIMITS_S = {"losses": 280.0, "attention": 45.0, "families": 280.0}
"""Time limit of each check."""
FAMILY_SOURCES = ("torchmm/models", "benchmarks/support/cases", "torchmm/common")
"""Directories that the results of "families" depend on."""

Verdict = Literal["ok", "look", "WRONG", "not run"]


class ResultRow(NamedTuple):
    """Row of the result table."""

    check: str
    case: str
    found: str
    expected: str
    verdict: Verdict


class FailedError(Exception):
    """Error of a program that exits with a nonzero code."""


class OutOfTimeError(FailedError):
    """Error of a program that was stopped at its time limit."""


@dataclass
class CheckMachine:
    """Machine on which the checks run programs.

    Attributes:
        gpus: Maximum number of GPUs to use.
        through: Script that runs every program, for tests without GPUs.
        small: Whether models are tiny, for tests.
        families: "all", "changed" or "none".
        since: Results of an earlier run, for "changed".
    """

    gpus: int
    ends_at: float
    folder: Path
    through: Path | None = None
    small: bool = False
    families: str = "all"
    since: Path | None = None
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def shapes(self) -> Mapping[str, object]:
        """Overrides of the quickstart model."""
        return SMALL if self.small else {}

    @property
    def left_s(self) -> float:
        """Remaining time in seconds."""
        return self.ends_at - time.monotonic()

    def run(self, script: str, arguments: Iterable[str], ranks: int = 1) -> str:
        """Return the standard output of a script of the repository.

        Raises:
            FailedError: The script failed.
            OutOfTimeError: The time limit expired.
        """
        return "".join(self.lines(script, arguments, ranks))

    def lines(self, script: str, arguments: Iterable[str], ranks: int = 1) -> Iterator[str]:
        """Yield the lines of the standard output of a script as they are written.

        Raises:
            FailedError: The script failed.
            OutOfTimeError: The time limit expired.
        """
        start = [sys.executable]
        if ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        start += [str(self.through)] if self.through else []
        paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [*start, str(ROOT / script), *arguments],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            expired = threading.Event()

            def expire() -> None:
                expired.set()
                _terminate(process)

            timer = threading.Timer(max(1.0, self.left_s), expire)
            timer.start()
            printed = []
            try:
                with report_progress(f"running {script}"):
                    for line in process.stdout or ():
                        printed.append(line)
                        yield line
                    process.wait()
            finally:
                timer.cancel()
                if process.poll() is None:
                    _terminate(process)
            if expired.is_set():
                raise OutOfTimeError("the time limit expired")
            if process.returncode:
                errors.seek(0)
                text = (errors.read() or "".join(printed)).strip().splitlines()
                raise FailedError(f"exit code {process.returncode}: {' / '.join(text[-2:])}")

    def train(self, name: str, changes: Mapping[str, object], ranks: int = 1) -> list[dict]:
        """Return the lines of metrics.jsonl of a run of the quickstart recipe."""
        if name in self.runs:
            return self.runs[name]
        settings: dict[str, object] = {
            "output_dir": self.folder,
            "data.index_cache_dir": self.folder / "index",
            "training.steps": STEPS,
            "training.global_batch_size": 8,
            "training.microbatch_size": 2,
            "optimizer.lr_schedule": "constant",
            "optimizer.warmup_steps": 1,
            "parallel.pipeline": 1,
            "validation.interval": 0,
            "checkpoint.interval": 0,
            "checkpoint.export_hf": "false",
            "checkpoint.resume": "none",
            **self.shapes,
            **changes,
        }
        folder = name.replace(", ", "_").replace(" ", "_")
        settings["name"] = folder
        option_words = [f"--{key}={value}" for key, value in settings.items()]
        self.run("train.py", ["--config", str(QUICKSTART), *option_words], ranks)
        lines = (self.folder / folder / "metrics.jsonl").read_text().splitlines()
        self.runs[name] = [json.loads(line) for line in lines]
        return self.runs[name]


SMALL: dict[str, object] = {
    "training.sequence_length": 128,
    **{
        f"model.{part}.config.{key}": value
        for part in ("llm", "encoders.vision")
        for key, value in {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }.items()
    },
}
"""Overrides for tiny models in tests."""


PIPELINE: dict[str, object] = {"parallel.pipeline": 2}
TENSOR: dict[str, object] = {"parallel.tensor": 2, "parallel.sequence_parallel": "true"}
PIECES: dict[str, object] = {
    "parallel.tensor": 2,
    "parallel.vision.tensor": 1,
    "parallel.placement": "colocated",
    "parallel.schedule": "optimus",
    "parallel.tp_comm_fraction": 0.3,
}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "1 GPU": (1, {}),
    "FSDP2": (2, {}),
    "pipeline": (2, PIPELINE),
    "zero bubble": (2, PIPELINE | {"parallel.schedule": "zero_bubble"}),
    "tensor parallel": (2, TENSOR),
    "async tensor parallel": (2, TENSOR | {"parallel.async_tensor_parallel": "true"}),
    "pieces in collectives": (2, PIECES),
    "pipeline x FSDP2": (4, PIPELINE),
}


def check_losses(machine: CheckMachine) -> Iterator[ResultRow]:
    """Compare the losses of every parallelism config with those of one CPU process."""
    base = {"training.device": "cpu", "training.dtype": "float32"}
    expected = [line["loss"] for line in machine.train("cpu", base)]
    for layout, (ranks, changes) in LAYOUTS.items():
        if ranks > machine.gpus:
            yield ResultRow("losses", layout, f"requires {ranks} GPUs", "", "not run")
            continue
        for dtype, limit in (("float32", EXACT), ("bfloat16", ROUNDED)):
            case = f"{layout}, {dtype}"
            settings = changes | {"training.dtype": dtype, "training.device": "cuda"}
            try:
                losses = [line["loss"] for line in machine.train(case, settings, ranks)]
            except FailedError as error:
                yield ResultRow("losses", case, str(error), "", _verdict(error))
                continue
            off = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
            verdict: Verdict = "ok" if off <= limit else "WRONG"
            yield ResultRow("losses", case, f"{off:.1e} off the CPU's", f"<= {limit:.0e}", verdict)


def check_attention(machine: CheckMachine) -> Iterator[ResultRow]:
    """Check the operators that packed attention runs."""
    for line in machine.run("scripts/gpu_check.py", ["--attention"]).splitlines():
        case, _, operators = line.partition(": ")
        fast = "flash" in operators
        yield ResultRow("attention", case, operators, "flash", "ok" if fast else "look")


def check_families(machine: CheckMachine) -> Iterator[ResultRow]:
    """Check the gradients of the model families, in float32 and bfloat16."""
    if machine.families == "none":
        yield ResultRow("families", "all", "--families none", "", "not run")
        return
    names = ["llama", "qwen3_vl"] if machine.small else []
    unchanged = unchanged_families(machine.since) if machine.families == "changed" else set()
    if unchanged:
        yield ResultRow(
            "families", f"{len(unchanged)} families", "unchanged since an earlier run", "", "ok"
        )
    arguments = ["--gradients", *names, *(f"-{name}" for name in sorted(unchanged))]
    for line in machine.lines("scripts/gpu_check.py", arguments):
        case, result, expected, verdict = line.rstrip("\n").split("; ")
        yield ResultRow("families", case, result, expected, cast(Verdict, verdict))


def family_digest() -> str:
    """Return a digest of the code and the libraries that gradients of families depend on."""
    digest = hashlib.sha256()
    for package in ("torch", "transformers"):
        digest.update(importlib.metadata.version(package).encode())
    for folder in FAMILY_SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def unchanged_families(since: Path | None) -> set[str]:
    """Return the families that were correct in an earlier run of the same code and libraries.

    Args:
        since: File of an earlier run. If None, all families are changed.
    """
    if since is None or not since.exists():
        return set()
    records = [json.loads(line) for line in since.read_text().splitlines()]
    if not records or records[0].get("families") != family_digest():
        return set()
    verdicts: dict[str, set[str]] = {}
    for record in records[1:]:
        if record["check"] == "families":
            verdicts.setdefault(record["case"].partition(",")[0], set()).add(record["verdict"])
    return {name for name, outcomes in verdicts.items() if outcomes == {"ok"} and " " not in name}


CHECKS: dict[str, Callable[[CheckMachine], Iterator[ResultRow]]] = {
    "losses": check_losses,
    "attention": check_attention,
    "families": check_families,
}


def show_attention() -> None:
    """Print the operators that attention layers call for some head shapes."""
    with report_imports():
        import torch
        from torch.profiler import ProfilerActivity, profile

        from torchmm.models.layers.attention import Segments, attention

    device = torch.device("cuda")
    segments = Segments.from_starts([0, 300, 1024], device)
    for case, (heads, groups, width) in {
        "LLM, 16 heads of 128, 8 of keys": (16, 8, 128),
        "encoder, 16 heads of 72": (16, 16, 72),
        "4 heads of 12": (4, 4, 12),
    }.items():
        query, key, value = (
            torch.randn(1, h, 1024, width, dtype=torch.bfloat16, device=device)
            for h in (heads, groups, groups)
        )
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            attention(torch.nn.Module(), query, key, value, segments)
        names = {e.key for e in recorded.key_averages() if "attention" in e.key}
        print(f"{case}: {', '.join(sorted(names))}")


def show_families(names: list[str]) -> None:
    """Print the difference between gradients of the GPU and the CPU.

    Args:
        names: Families to check; "-NAME" omits a family. If none is named, all are checked.
    """
    with report_imports():
        from support.captions import load_captions
        from support.cases.family_batches import renumbered
        from support.cases.family_cases import QUICK, families
        from support.cases.family_models import device_differences

        from torchmm.parallel.mesh import select_device, start_process_group
        from torchmm.recipe.parallel_section import ParallelConfig

    device = select_device("cuda")
    start_process_group(ParallelConfig(), device)
    samples, vocabulary = renumbered(load_captions(0), 8)
    selected = [name for name in names if not name.startswith("-")]
    for family in families(QUICK, vocabulary):
        if f"-{family.name}" in names or (selected and family.name not in selected):
            continue
        try:
            for dtype, off in device_differences(family, samples, device):
                verdict = "ok" if off.share <= off.most else "WRONG"
                difference = f"gradients {off.share:.1e} off the CPU's, most of it {off.worst}"
                print(
                    f"{family.name}, {dtype}; {difference}; <= {off.most:.0e}; {verdict}",
                    flush=True,
                )
        except ConfigError as error:  # this version of transformers does not have the model
            print(f"{family.name}; {_one_line(error)}; ; not run", flush=True)
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"{family.name}; {_one_line(error)}; ; WRONG", flush=True)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).replace(";", ",").split())
    return f"{type(error).__name__}: {text[:200]}"


def main() -> int:
    """Run the checks; return 1 if a result is wrong."""
    options = _parse()
    log_to_console(make_console(stderr=True), only_progress=True)
    if options.attention:
        show_attention()
        return 0
    if options.gradients is not None:
        show_families(options.gradients)
        return 0
    if not DATA.is_dir():
        print(f"no data in {DATA}; run: python scripts/prepare_data.py emoji_scenes")
        return 2
    machine_name = _gpu_names()
    print(f"{options.gpus} GPUs: {machine_name}")
    _append(options.json, {"machine": machine_name, "families": family_digest()})
    count = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        ends_at = time.monotonic() + 60 * options.minutes
        machine = CheckMachine(
            options.gpus, ends_at, Path(folder), options.through, options.small,
            options.families, options.since,
        )  # fmt: skip
        for name in options.only:
            machine.ends_at = min(ends_at, time.monotonic() + LIMITS_S[name])
            for line in _check_rows(name, machine):
                print(f"{line.verdict:8} {name:12} {line.case}: {line.found} {line.expected}")
                sys.stdout.flush()
                _append(options.json, line._asdict())
                count += 1
                wrong += line.verdict == "WRONG"
    print(f"{count} lines, {wrong} wrong")
    return int(wrong > 0)


def _append(file: Path | None, record: Mapping[str, object]) -> None:
    """Append a JSON object to the file of results."""
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")


def _check_rows(name: str, machine: CheckMachine) -> Iterator[ResultRow]:
    """Yield the lines of a check, or one line with the reason if it cannot run."""
    if machine.left_s <= 0:
        yield ResultRow(name, "all", "no time left", "", "not run")
        return
    try:
        yield from CHECKS[name](machine)
    except FailedError as error:
        yield ResultRow(name, "all", str(error), "", _verdict(error))


def _terminate(process: subprocess.Popen) -> None:
    """Terminate a program. A launcher then terminates its ranks, so it is not killed at once."""
    process.terminate()
    try:
        process.wait(timeout=SHUTDOWN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _verdict(error: FailedError) -> Verdict:
    return "not run" if isinstance(error, OutOfTimeError) else "WRONG"


def _gpu_names() -> str:
    shown = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown to nvidia-smi"
    return "; ".join(output.strip().splitlines())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="append each result to FILE as a JSON object")
    add("--minutes", type=float, default=9.0, help="time limit of all checks")
    add("--gpus", type=int, default=_gpus(), help="maximum number of GPUs to use")
    add("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="NAME")
    add(
        "--families",
        choices=("changed", "all", "none"),
        default="all",
        help="families to check; changed: all but those that were right in --since",
    )
    add("--since", type=Path, metavar="FILE", help="results of an earlier run (--json)")
    add("--small", action="store_true", help="for tests: tiny models")
    add("--through", type=Path, help="for tests: script that starts every program")
    add("--attention", action="store_true", help="only print the kernels of packed attention")
    add("--gradients", nargs="*", metavar="NAME", help="only print the gradients of families")
    return parser.parse_args()


def _gpus() -> int:
    names = _gpu_names()
    return 0 if names.startswith("unknown") else names.count(";") + 1


if __name__ == "__main__":
    sys.exit(main())
