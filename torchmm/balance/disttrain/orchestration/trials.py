"""Trial runs of modules that were measured on a device, kept in a file, as costs for orchestration.

`torchmm.balance.measure.trials` runs modules at some input sizes and tensor-parallel sizes; here is
what a plan makes of it (DistTrain §3): seconds are linear in the input size between two that were
measured, and linear over the logarithm of the tensor-parallel size. Beyond the largest input, they
grow with it. Tensor-parallel sizes that were not measured because there were too few devices take
what the cost model says, times what the nearest measured one took as a share of the model's: on one
device even the largest cluster can be planned with this device's own times.

Memory is the cost model's: a CPU does not show it, and devices of the cluster may have a different
amount.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from torchmm.balance.compiled import Float64s
from torchmm.balance.disttrain.orchestration.unit_costs import Trial, TrialRunner
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.files import replace_atomically
from torchmm.common.layers import ModuleDescription
from torchmm.costs.sizes import pack_sizes

FORMAT = "torchmm module trials 1"


@dataclass(frozen=True)
class MeasuredRow:
    """One module with one tensor-parallel size.

    Attributes:
        units: input sizes, rising.
        forward_s, backward_s: of a pack of each size.
        checked_units: sizes in between, which interpolation does not know.
        checked_error: (interpolated - measured) / measured, of forward and backward together.
    """

    units: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    checked_units: tuple[float, ...] = ()
    checked_error: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        sizes = {len(self.units), len(self.forward_s), len(self.backward_s)}
        rising = all(a < b for a, b in zip(self.units, self.units[1:], strict=False))
        if len(sizes) != 1 or not self.units or not rising or not min(self.forward_s) > 0:
            raise ValueError(
                "trials need rising input sizes, with seconds > 0 for the forward of each; "
                "measure again"
            )

    def seconds(self, units_N: Float64s) -> tuple[Float64s, Float64s]:
        """(forward, backward) of packs of these sizes."""
        beyond_N = np.maximum(units_N / self.units[-1], 1.0)
        forward_N, backward_N = (
            np.interp(units_N, self.units, seconds) * beyond_N
            for seconds in (self.forward_s, self.backward_s)
        )
        return forward_N, backward_N


def checked(row: MeasuredRow, units: Sequence[float], seconds: Sequence[float]) -> MeasuredRow:
    """The row with how far it is off at sizes in between.

    Args:
        seconds: measured there, forward and backward together.
    """
    forward_N, backward_N = row.seconds(np.array(units, float))
    error_N = (forward_N + backward_N) / np.array(seconds) - 1
    return replace(row, checked_units=tuple(units), checked_error=tuple(error_N.tolist()))


@dataclass(frozen=True)
class ModuleTrials:
    """What was measured.

    Attributes:
        conditions: under which: another dtype or model makes them worthless.
        measured_on: the machine, in words.
        rows: by module and tensor-parallel size.
    """

    conditions: Mapping[str, str]
    measured_on: str
    rows: Mapping[str, Mapping[int, MeasuredRow]]

    def seconds(
        self, module: str, tensor: int, units_N: Float64s
    ) -> tuple[Float64s, Float64s] | None:
        """(forward, backward) of packs; None beyond the tensor-parallel sizes with trials."""
        rows = self.rows[module]
        sizes = sorted(rows)
        if not sizes[0] <= tensor <= sizes[-1]:
            return None
        low = max(size for size in sizes if size <= tensor)
        high = min(size for size in sizes if size >= tensor)
        share = log2(tensor / low) / log2(high / low) if high > low else 0.0
        ends = [rows[size].seconds(units_N) for size in (low, high)]
        forward_N, backward_N = ((1 - share) * a + share * b for a, b in zip(*ends, strict=True))
        return forward_N, backward_N


def trial_conditions(
    modules: Sequence[ModuleDescription],
    dtype: str,
    recompute: Mapping[str, str],
    sequence_parallel: bool,
) -> dict[str, str]:
    """What has to be the same where trials are used, by name."""
    content = json.dumps([asdict(module) for module in modules], sort_keys=True)
    return {
        "model and freeze": hashlib.sha256(content.encode()).hexdigest()[:16],
        "training.dtype": dtype,
        "activation_checkpoint": json.dumps(dict(recompute), sort_keys=True),
        "parallel.sequence_parallel": str(sequence_parallel),
    }


def trials_run(
    trials: ModuleTrials, conditions: Mapping[str, str], modelled: TrialRunner
) -> TrialRunner:
    """Trials that a file answers; memory and what it does not know are those of `modelled`.

    Args:
        conditions: of the run that is planned.

    Raises:
        ValueError: the trials were made under others.
    """
    changed = [name for name, own in conditions.items() if trials.conditions.get(name) != own]
    if changed:
        raise ValueError(
            f"trials were made with another {', '.join(changed)}; make them again with "
            "scripts/profile_modules.py"
        )

    def run(module: ModuleDescription, tensor: int, packs: Sequence[MicrobatchMeta]) -> Trial:
        found = modelled(module, tensor, packs)
        sizes = pack_sizes(module, packs)[1]
        assert sizes is not None
        seconds = trials.seconds(module.name, tensor, sizes.units_N)
        if seconds is None:
            nearest = min(trials.rows[module.name], key=lambda size: abs(log2(size / tensor)))
            known = trials.seconds(module.name, nearest, sizes.units_N)
            assert known is not None
            other = modelled(module, nearest, packs)
            factor_N = (known[0] + known[1]) / other.seconds_N
            return found._replace(
                seconds_N=factor_N * found.seconds_N, backward_N=factor_N * found.backward_N
            )
        return found._replace(seconds_N=seconds[0] + seconds[1], backward_N=seconds[1])

    return run


def save_trials(path: Path, trials: ModuleTrials) -> None:
    """Writes a file; an existing one is replaced in one go."""
    content = {
        "format": FORMAT,
        "conditions": dict(trials.conditions),
        "measured_on": trials.measured_on,
        "modules": {
            name: {str(size): asdict(row) for size, row in rows.items()}
            for name, rows in trials.rows.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def load_trials(path: Path) -> ModuleTrials:
    """Reads a file of `save_trials`.

    Raises:
        ValueError: it cannot be read, or is no such file.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, this version reads {FORMAT!r}")
        rows = {
            name: {
                int(size): MeasuredRow(**{key: tuple(values) for key, values in row.items()})
                for size, row in own.items()
            }
            for name, own in content["modules"].items()
        }
        return ModuleTrials(content["conditions"], str(content["measured_on"]), rows)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: no trials of modules ({type(error).__name__}: {error}); make them with "
            "scripts/profile_modules.py"
        ) from error
