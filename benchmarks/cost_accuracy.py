"""Compare predicted and measured step times on this CPU.

    python benchmarks/cost_accuracy.py [--quick] [--json FILE]

Operators are measured for each number of ranks (`torchmm.balance.measurement.operators`, as in
`scripts/calibrate.py`), before, between and after the steps, because the speed of the machine
changes. The models (`cost_cases`) are not part of the calibration. Each one is trained twice in
separate processes (`cost_program`). The prediction is `simulate` of the executed plan with
`plan_costs` of the profile, and `update_ms` for the optimizer. No value is fitted to the steps.

Accuracy is 1 - |predicted - measured| / measured, for the median over runs. Its baseline is the
noise of the machine: runs of the first half compared with those of the second. The paper value is
the mean of PipeWeaver's simulator. For one rank, CPU time is compared as well, because it is also
valid on a busy machine. The printed sums by type of action show where a prediction is wrong.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import torch
import transformers
from documents import load_documents
from support.cases.cost_cases import ONE_RANK, TINY, TWO_RANKS, CostCase
from support.cases.cost_program import CPU, CaseRuns, Prediction, predict, run_case
from support.harness import Row, describe_machine, make_parser, report
from support.measurements import mean_measurements
from support.ranks import run_ranks

from torchmm.balance.costs.calibration import Measurements, fit_profile
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.measurement.operators import describe_device, measure
from torchmm.costs.operators import DeviceProfile

PAPER, WORST = 0.976, 0.90
QUIET = 0.05
"""Share of the CPU that other programs may take: ranks need all of it."""


@dataclass(frozen=True)
class Setting:
    """Extent of the measurement.

    Attributes:
        cases: Maps a number of ranks to its cases.
        seconds: Maps a number of ranks to the approximate calibration time in seconds.
        runs: Number of runs per case and pass.
        passes: Number of times that all cases are trained, with calibrations before and after.
        rounds: Number of rounds per calibration.
        patience_s: Time limit in seconds per case for waiting until other programs finish.
        small: Whether calibration measures few sizes only.
    """

    cases: tuple[Sequence[CostCase], ...]
    seconds: float
    runs: int
    passes: int
    rounds: int
    patience_s: float
    small: bool = False


SETTINGS = {
    "full": Setting((ONE_RANK, TWO_RANKS), 24.0, 3, 2, 2, 20.0),
    "quick": Setting(
        tuple(
            [replace(case, microbatches=ranks) for case in cases[:2]]
            for ranks, cases in ((1, ONE_RANK), (2, TWO_RANKS))
        ),
        seconds=1.0,
        runs=2,
        passes=1,
        rounds=1,
        patience_s=0.0,
    ),
    "tiny": Setting((TINY[:1], TINY[1:]), 0.2, 2, 1, 1, 0.0, small=True),
}


@dataclass(frozen=True)
class CaseResult:
    """Predicted and measured times of one case.

    Attributes:
        case: Name of the case.
        predicted_ms, measured_ms: of a step; measured: run after run.
        cpu_ms: the same on a core; where there are several ranks, they also wait: none.
    """

    case: str
    predicted_ms: float
    measured_ms: list[float]
    cpu_ms: list[float]

    @property
    def median_ms(self) -> float:
        """Median of the measured step time in milliseconds."""
        return median(self.measured_ms)

    @property
    def accuracy(self) -> float:
        """Accuracy of the predicted step time."""
        return _accuracy(self.predicted_ms, self.median_ms)

    @property
    def cpu_accuracy(self) -> float:
        """Accuracy of the predicted step time compared with CPU time."""
        return _accuracy(self.predicted_ms, median(self.cpu_ms))

    @property
    def floor(self) -> float | None:
        """Accuracy of the first half of runs as a prediction of the second. None for one run."""
        half = len(self.measured_ms) // 2
        if half == 0:
            return None
        first, second = self.measured_ms[:half], self.measured_ms[half:]
        return _accuracy(median(first), median(second))


def _accuracy(predicted: float, measured: float) -> float:
    return 1 - abs(predicted - measured) / measured


def run_cases(ranks: int, cases: Sequence[CostCase], setting: Setting) -> list[CaseResult]:
    """Calibrate, train all cases and predict their step times. Print details that rows omit."""
    calibrations = [run_ranks(_calibrate, ranks, setting)]
    runs: dict[str, list[CaseRuns]] = {case.name: [] for case in cases}
    for turn in range(setting.passes):
        for case in cases if turn % 2 == 0 else cases[::-1]:
            found = run_ranks(_run_case, ranks, case, setting)
            runs[case.name].append(found)
        calibrations.append(run_ranks(_calibrate, ranks, setting))
    every = [measured for measured, _, _ in calibrations]
    name = calibrations[0][1]

    def profile(*found: Measurements) -> DeviceProfile:
        fitted = mean_measurements(*found)
        return fit_profile(fitted, load_profile("cpu"), "float32", name, use_measured_peaks=True)

    def predictions(own: DeviceProfile) -> list[Prediction]:
        return [predict(found[0].replicas, own) for found in runs.values()]

    predicted = predictions(profile(*every))
    first, last = (predictions(profile(m)) for m in (every[0], every[-1]))
    drift = median(b.step_ms / a.step_ms for a, b in zip(first, last, strict=True))
    taken_s = sum(seconds for _, _, seconds in calibrations)
    print(f"{ranks} rank(s): {len(every)} calibrations in {taken_s:.0f} s, around the steps;")
    print(f"predictions of the last one differ from the first by {drift - 1:+.1%}: {name};")
    times = [t for found in runs.values() for own in found for t in own.times]
    disturbed = sum(own.disturbed for found in runs.values() for own in found)
    print(
        f"{setting.passes} x {setting.runs} runs of a step, in which other programs took at most "
        f"{max(t.others for t in times):.0%} of the CPU; {disturbed} more were skipped"
    )
    print("by type of action, sum over ranks: predicted / measured ms")
    results = []
    for (case, found), own in zip(runs.items(), predicted, strict=True):
        print(f"  {case}: {_classes(own, found)}")
        measured_ms = [1e3 * t.wall_s for turn in found for t in turn.times]
        cpu_ms = [ms for turn in found for ms in turn.cpu_ms] if ranks == 1 else []
        results.append(CaseResult(case, own.step_ms, measured_ms, cpu_ms))
    return results


def _classes(own: Prediction, found: Sequence[CaseRuns]) -> str:
    measured = {name: mean(turn.classes[name] for turn in found) for name in own.classes}
    shown = {name: ms for name, ms in measured.items() if max(ms, own.classes[name]) >= 0.5}
    return ", ".join(f"{name} {own.classes[name]:.0f} / {ms:.0f}" for name, ms in shown.items())


def _calibrate(setting: Setting) -> tuple[Measurements, str, float]:
    """Run one calibration and return measurements, device and duration. Collective."""
    _silence_libraries()
    begin_s = time.perf_counter()
    seconds = setting.seconds / (setting.passes + 1)
    found = measure(CPU, torch.float32, seconds, rounds=setting.rounds, quick=setting.small)
    return found, describe_device(CPU), time.perf_counter() - begin_s


def _run_case(case: CostCase, setting: Setting) -> CaseRuns:
    _silence_libraries()
    return run_case(case, setting.runs, setting.patience_s, QUIET)


def _silence_libraries() -> None:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", message=".*_tensor. is deprecated")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()


def rows(found: dict[int, list[CaseResult]]) -> list[Row]:
    """Return the rows of the results, which map numbers of ranks to cases."""
    made, every = [], [own for results in found.values() for own in results]
    for ranks, results in found.items():
        for own in results:
            case = f"{own.case}; {ranks} rank{'s' * (ranks > 1)}"
            made += [
                Row(case, "predicted step", "ms", own.predicted_ms, own.median_ms, better="lower"),
                Row(case, "accuracy", "fraction", own.accuracy, own.floor),
            ]
            if own.cpu_ms:
                made.append(Row(case, "accuracy, CPU time", "fraction", own.cpu_accuracy))
    case = f"all {len(every)} cases"
    for metric, combine, goal, paper in (
        ("mean accuracy", mean, PAPER, PAPER),
        ("worst accuracy", min, WORST, None),
    ):
        ours, floors = combine(own.accuracy for own in every), [own.floor for own in every]
        floor = combine(f for f in floors if f is not None) if any(floors) else None
        made.append(Row(case, metric, "fraction", ours, floor, paper, goal))
    on_core = [own.cpu_accuracy for own in every if own.cpu_ms]
    for metric, combine in (("mean", mean), ("worst", min)):
        name = f"{metric} accuracy, CPU time, 1 rank"
        made.append(Row(case, name, "fraction", combine(on_core)))
    return made


def main() -> None:
    """Print the table."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="run the smallest cases, for tests")
    arguments = parser.parse_args()
    name = "tiny" if arguments.tiny else "quick" if arguments.quick else "full"
    setting = SETTINGS[name]
    torch.set_num_threads(1)
    print(f"machine: {describe_machine(CPU)}")
    print(f"documents: {load_documents().source}; seeds 0")
    print("baseline: the measured step for predicted steps, repeated runs for accuracy")
    found = {}
    for ranks, cases in enumerate(setting.cases, start=1):
        found[ranks] = run_cases(ranks, cases, setting)
    report("Predicted and measured step times", rows(found), arguments.json)


if __name__ == "__main__":
    main()
