"""Average of several calibrations of one device."""

from __future__ import annotations

from statistics import mean

from torchmm.balance.costs.calibration import Measured, Measurements


def mean_measurements(*found: Measurements) -> Measurements:
    """Return the means of repeated calibrations, for devices whose speed changes over time."""
    first = found[0]
    operators = zip(*(own.operators for own in found), strict=True)
    layers = zip(*(own.layers for own in found), strict=True)
    working = zip(*(own.working for own in found), strict=True)
    return Measurements(
        [Measured(same[0].operator, mean(m.seconds for m in same)) for same in operators],
        {kind: mean(own.tiny[kind] for own in found) for kind in first.tiny},
        [(same[0][0], mean(seconds for _, seconds in same)) for same in layers],
        [
            same[0]._replace(
                forward_s=mean(w.forward_s for w in same),
                backward_s=mean(w.backward_s for w in same),
            )
            for same in working
        ],
        {
            name: own._replace(seconds=mean(other.split[name].seconds for other in found))
            for name, own in first.split.items()
        },
    )
