"""Check this machine's GPUs: is what torchmm computes on them right, and fast, and if not, what.

    python scripts/gpu_check.py [--json FILE] [--minutes 10] [--only NAME ...]

Prints a line for each check: what was found, what is expected, and a verdict. Checks that no longer
fit into the time are named and left out. Needs the small data set of the quickstart
(`python scripts/prepare_data.py emoji_scenes`). Exit code 1 if a result is wrong, whatever the
speed.

    losses       the quickstart's first steps on the GPU against the CPU, in float32 and bfloat16,
                 and over 2 GPUs: FSDP2, pipelines, tensor parallelism with and without overlap,
                 encoders on a side stream
    attention    which kernels packed attention runs
    families     gradients of a small model of every family on one GPU against the CPU
    speed        SigLIP-so400m with Qwen3-1.7B and 8B against Hugging Face, with and without compile
    data         how long steps wait for samples
    saving       how much longer a step takes while a checkpoint is written
    calibration  how far `--dry-run` with a profile measured here is off
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, cast

from torchmm.common.errors import ConfigError
from torchmm.common.log import loading, log_to_console, make_console, working

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data" / "emoji_scenes"
QUICKSTART = ROOT / "recipes" / "quickstart.toml"
STEPS = 6
ENDING_S = 40
"""torchrun gives its ranks 30 seconds to end."""
EXACT, ROUNDED = 1e-4, 3e-2
"""Relative difference of losses from the CPU's in float32: in the same dtype (kernels add in other
orders), in bfloat16."""
MOST_WAITING, MOST_SLOWER, MOST_OFF = 0.05, 1.25, 0.25

Verdict = Literal["ok", "look", "WRONG", "not run"]


class Line(NamedTuple):
    """A row of the table."""

    check: str
    case: str
    found: str
    expected: str
    verdict: Verdict


class FailedError(Exception):
    """A program ended with an error."""


class OutOfTimeError(FailedError):
    """A program was ended, as time was over."""


@dataclass
class Machine:
    """Where programs are started.

    Attributes:
        gpus: how many are used at most.
        through: script through which every program is started; for tests without GPUs.
        small: shapes of tests instead of published ones; figures then say nothing.
    """

    gpus: int
    ends_at: float
    folder: Path
    through: Path | None = None
    small: bool = False
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def shapes(self) -> Mapping[str, object]:
        """What is changed of the quickstart's model."""
        return SMALL if self.small else {}

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.ends_at - time.monotonic()

    def run(self, script: str, arguments: Iterable[str], ranks: int = 1) -> str:
        """Standard output of a script of the repository.

        Raises:
            FailedError: it ended with an error.
            OutOfTimeError: time was over.
        """
        start = [sys.executable]
        if ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        start += [str(self.through)] if self.through else []
        paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        process = subprocess.Popen(
            [*start, str(ROOT / script), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            with working(f"running {script}"):
                out, errors = process.communicate(timeout=max(1.0, self.left_s))
        except subprocess.TimeoutExpired as error:
            _end(process)
            raise OutOfTimeError("took longer than there was time") from error
        if process.returncode:
            said = (errors or out).strip().splitlines()
            raise FailedError(f"exit code {process.returncode}: {' / '.join(said[-2:])}")
        return out

    def train(self, name: str, changes: Mapping[str, object], ranks: int = 1) -> list[dict]:
        """The lines of metrics.jsonl of a run of the quickstart's recipe."""
        if name in self.runs:
            return self.runs[name]
        settings: dict[str, object] = {
            "output_dir": self.folder,
            "data.index_cache": self.folder / "index",
            "training.steps": STEPS,
            "training.global_batch_size": 8,
            "training.microbatch_size": 2,
            "optimizer.schedule": "constant",
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
        given = [f"--{key}={value}" for key, value in settings.items()]
        self.run("train.py", ["--config", str(QUICKSTART), *given], ranks)
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
"""For tests."""


PIPELINE: dict[str, object] = {"parallel.pipeline": 2}
TENSOR: dict[str, object] = {"parallel.tensor": 2, "parallel.sequence_parallel": "true"}
FILLERS: dict[str, object] = {
    "parallel.tensor": 2,
    "parallel.vision.tensor": 1,
    "parallel.placement": "colocated",
    "parallel.schedule": "optimus",
    "parallel.tensor_bubbles": 0.3,
}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "1 GPU": (1, {}),
    "FSDP2": (2, {}),
    "pipeline": (2, PIPELINE),
    "zero bubble": (2, PIPELINE | {"parallel.schedule": "zero_bubble"}),
    "tensor parallel": (2, TENSOR),
    "async tensor parallel": (2, TENSOR | {"parallel.async_tensor_parallel": "true"}),
    "side stream": (2, FILLERS),
    "pipeline x FSDP2": (4, PIPELINE),
}


def check_losses(machine: Machine) -> Iterator[Line]:
    """Losses of every layout against one CPU process."""
    plain = {"training.device": "cpu", "training.dtype": "float32"}
    expected = [line["loss"] for line in machine.train("cpu", plain)]
    for layout, (ranks, changes) in LAYOUTS.items():
        if ranks > machine.gpus:
            yield Line("losses", layout, f"needs {ranks} GPUs", "", "not run")
            continue
        for dtype, most in (("float32", EXACT), ("bfloat16", ROUNDED)):
            case = f"{layout}, {dtype}"
            settings = changes | {"training.dtype": dtype, "training.device": "cuda"}
            try:
                found = [line["loss"] for line in machine.train(case, settings, ranks)]
            except FailedError as error:
                yield Line("losses", case, str(error), "", _verdict(error))
                continue
            off = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
            verdict: Verdict = "ok" if off <= most else "WRONG"
            yield Line("losses", case, f"{off:.1e} off the CPU's", f"<= {most:.0e}", verdict)


def check_attention(machine: Machine) -> Iterator[Line]:
    """Which operators packed attention runs."""
    for line in machine.run("scripts/gpu_check.py", ["--attention"]).splitlines():
        case, _, operators = line.partition(": ")
        fast = "flash" in operators
        yield Line("attention", case, operators, "flash", "ok" if fast else "look")


def check_families(machine: Machine) -> Iterator[Line]:
    """Gradients of every family, in float32 and bfloat16."""
    wanted = ["--families", *(["llama", "qwen3_vl"] if machine.small else [])]
    for line in machine.run("scripts/gpu_check.py", wanted).splitlines():
        case, found, expected, said = line.split("; ")
        yield Line("families", case, found, expected, cast(Verdict, said))


def check_speed(machine: Machine) -> Iterator[Line]:
    """`benchmarks/single_device.py`, shape by shape."""
    shapes = ["tiny"] if machine.small else ["so400m_qwen3_1.7b", "so400m_qwen3_8b_frozen_llm"]
    for shape in shapes:
        file = machine.folder / f"{shape}.json"
        wanted = ["--quick", "--device", "cuda", "--shapes", shape, "--json", str(file)]
        machine.run("benchmarks/single_device.py", [*wanted, "--baselines", "Hugging Face"])
        for row in json.loads(file.read_text()):
            if row["metric"] in ("speed ratio", "MFU"):
                goal = row["goal"]
                met = goal is None or row["ours"] >= goal
                shown = "" if goal is None else f">= {goal}"
                found = f"{row['metric']} {row['ours']:.3f}"
                yield Line("speed", row["case"], found, shown, "ok" if met else "look")


def check_data(machine: Machine) -> Iterator[Line]:
    """The share of steps that is waiting for samples, once workers run."""
    records = machine.train("1 GPU, bfloat16", {"training.device": "cuda"})[2:]
    share = median(r["data_wait_ms"] / r["step_ms"] for r in records)
    verdict: Verdict = "ok" if share <= MOST_WAITING else "look"
    yield Line("data", "quickstart", f"{share:.1%} waiting", f"<= {MOST_WAITING:.0%}", verdict)


def check_saving(machine: Machine) -> Iterator[Line]:
    """Steps after a checkpoint, which is written while they run, against the others."""
    steps = 8 if machine.small else 24
    settings: dict[str, object] = {"training.steps": steps, "checkpoint.interval": 4}
    records = machine.train("saving", settings | {"training.device": "cuda"})[3:]
    after = median(r["step_ms"] for r in records if r["step"] % 4 == 1)
    others = median(r["step_ms"] for r in records if r["step"] % 4 in (2, 3))
    verdict: Verdict = "ok" if after <= MOST_SLOWER * others else "look"
    found = f"{after / others:.2f} x the others"
    yield Line("saving", "step after a checkpoint", found, f"<= {MOST_SLOWER}", verdict)


def check_calibration(machine: Machine) -> Iterator[Line]:
    """The predicted time of a step against the measured one."""
    profile = machine.folder / "profile.json"
    quick = ["--quick"] if machine.small else []
    machine.run("scripts/calibrate.py", ["--out", str(profile), *quick])
    records = machine.train("1 GPU, bfloat16", {"training.device": "cuda"})
    measured = median(r["encoder_ms"] + r["llm_ms"] for r in records[2:])
    arguments = ["--config", str(QUICKSTART), "--gpus", "1", "--device", str(profile)]
    arguments += ["--parallel.pipeline=1", "--training.global_batch_size=8"]
    arguments += ["--training.microbatch_size=2", "--out", str(machine.folder / "forecast")]
    arguments += [f"--{key}={value}" for key, value in machine.shapes.items()]
    machine.run("scripts/simulate.py", arguments)
    forecast = json.loads((machine.folder / "forecast" / "simulation.json").read_text())
    predicted = forecast["schedules"][0]["step_ms"]
    off = abs(predicted / measured - 1)
    found = f"{predicted:.1f} ms predicted, {measured:.1f} ms measured"
    verdict: Verdict = "ok" if off <= MOST_OFF else "look"
    yield Line("calibration", "quickstart", found, f"<= {MOST_OFF:.0%} off", verdict)


CHECKS: dict[str, Callable[[Machine], Iterator[Line]]] = {
    "losses": check_losses,
    "attention": check_attention,
    "families": check_families,
    "data": check_data,
    "saving": check_saving,
    "calibration": check_calibration,
    "speed": check_speed,
}


def show_attention() -> None:
    """Prints, for some shapes of heads, what the attention of all layers calls."""
    with loading():
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
    """Prints how far a GPU's gradients are from the CPU's; all families if none is named."""
    with loading():
        from support.captions import load_captions
        from support.cases.family_batches import renumbered
        from support.cases.family_cases import QUICK, families
        from support.cases.family_models import device_differences

        from torchmm.parallel.mesh import select_device, start_process_group
        from torchmm.recipe.parallel_section import ParallelConfig

    device = select_device("cuda")
    start_process_group(ParallelConfig(), device)
    samples, vocabulary = renumbered(load_captions(0), 8)
    for family in families(QUICK, vocabulary):
        if names and family.name not in names:
            continue
        try:
            for dtype, off in device_differences(family, samples, device):
                verdict = "ok" if off.share <= off.most else "WRONG"
                found = f"gradients {off.share:.1e} off the CPU's, most of it {off.worst}"
                print(f"{family.name}, {dtype}; {found}; <= {off.most:.0e}; {verdict}", flush=True)
        except ConfigError as error:  # what this version of transformers lacks
            print(f"{family.name}; {_one_line(error)}; ; not run", flush=True)
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"{family.name}; {_one_line(error)}; ; WRONG", flush=True)


def _one_line(error: Exception) -> str:
    said = " ".join(str(error).replace(";", ",").split())
    return f"{type(error).__name__}: {said[:200]}"


def main() -> int:
    """Runs the checks; 1 if a result is wrong."""
    options = _parse()
    log_to_console(make_console(stderr=True), only_progress=True)
    if options.attention:
        show_attention()
        return 0
    if options.families is not None:
        show_families(options.families)
        return 0
    if not DATA.is_dir():
        print(f"no data in {DATA}; run: python scripts/prepare_data.py emoji_scenes")
        return 2
    lines: list[Line] = []
    print(f"{options.gpus} GPUs: {_gpu_names()}")
    with tempfile.TemporaryDirectory() as folder:
        ends_at = time.monotonic() + 60 * options.minutes
        machine = Machine(options.gpus, ends_at, Path(folder), options.through, options.small)
        for name in options.only:
            for line in _lines(name, machine):
                print(f"{line.verdict:8} {name:12} {line.case}: {line.found} {line.expected}")
                sys.stdout.flush()
                lines.append(line)
    if options.json:
        named = {"machine": _gpu_names(), "lines": [line._asdict() for line in lines]}
        options.json.write_text(json.dumps(named, indent=1) + "\n")
    wrong = sum(line.verdict == "WRONG" for line in lines)
    print(f"{len(lines)} lines, {wrong} wrong")
    return int(wrong > 0)


def _lines(name: str, machine: Machine) -> Iterator[Line]:
    """Those of a check; one that says why, if it cannot be done."""
    if machine.left_s <= 0:
        yield Line(name, "all", "no time left", "", "not run")
        return
    try:
        yield from CHECKS[name](machine)
    except FailedError as error:
        yield Line(name, "all", str(error), "", _verdict(error))


def _end(process: subprocess.Popen) -> None:
    """Ends a program and, if it is a launcher, its ranks, which only it can find."""
    process.terminate()
    try:
        process.communicate(timeout=ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _verdict(error: FailedError) -> Verdict:
    return "not run" if isinstance(error, OutOfTimeError) else "WRONG"


def _gpu_names() -> str:
    shown = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown to nvidia-smi"
    return "; ".join(found.strip().splitlines())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the lines there")
    add("--minutes", type=float, default=10.0, help="start no check later than that")
    add("--gpus", type=int, default=_gpus(), help="use so many at most")
    add("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="NAME")
    add("--small", action="store_true", help="for tests: tiny shapes, whose figures say nothing")
    add("--through", type=Path, help="for tests: script that starts every program")
    add("--attention", action="store_true", help="only what packed attention calls")
    add("--families", nargs="*", metavar="NAME", help="only what families compute on this GPU")
    return parser.parse_args()


def _gpus() -> int:
    names = _gpu_names()
    return 0 if names.startswith("unknown") else names.count(";") + 1


if __name__ == "__main__":
    sys.exit(main())
