"""Entries of encoder layers inside tensor-parallel collectives in the tables of the core."""

from torchmm.common.extensions import Entries, Entry

ENTRIES: Entries = {
    "recipe_checks": [
        Entry("tp_comm_fraction", "torchmm.balance.optimus.checks:check_tp_comm_fraction"),
    ],
    "plan_checks": [
        Entry(
            "launches",
            "torchmm.balance.optimus.launches:launch_problems",
            lambda plan: bool(plan.launches),
        ),
    ],
    "action_runners": [
        Entry("launches", "torchmm.balance.optimus.encoder_overlap:run_encoder_overlap"),
    ],
    "layer_stops": [
        Entry("pieces", "torchmm.balance.optimus.yield_points:insert_yield_points"),
    ],
}
