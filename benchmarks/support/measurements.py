"""Average of several calibrations of one device."""

from __future__ import annotations

from statistics import mean

from torchmm.balance.costs.calibration import Measurements, TimedOperator


def mean_measurements(*measurements: Measurements) -> Measurements:
    """Return the means of repeated calibrations, for devices whose speed changes over time."""
    first = measurements[0]
    operators = zip(*(measurement.operators for measurement in measurements), strict=True)
    layers = zip(*(measurement.layers for measurement in measurements), strict=True)
    realistic = zip(*(measurement.realistic for measurement in measurements), strict=True)
    return Measurements(
        [TimedOperator(same[0].operator, mean(m.seconds for m in same)) for same in operators],
        {kind: mean(measurement.tiny[kind] for measurement in measurements) for kind in first.tiny},
        [(same[0][0], mean(seconds for _, seconds in same)) for same in layers],
        [
            same[0]._replace(
                forward_s=mean(w.forward_s for w in same),
                backward_s=mean(w.backward_s for w in same),
            )
            for same in realistic
        ],
        {
            name: measurement._replace(
                seconds=mean(other.parallel[name].seconds for other in measurements)
            )
            for name, measurement in first.parallel.items()
        },
    )
