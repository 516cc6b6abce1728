"""Entries of encoder layers inside tensor-parallel collectives in the tables of the core."""

from torchmm.common.extensions import Entries, Entry

ENTRIES: Entries = {
    "recipe_checks": [
        Entry("tp_comm_fraction", "torchmm.balance.optimus.checks:check_tensor_bubbles"),
    ],
    "plan_checks": [
        Entry(
            "launches",
            "torchmm.balance.optimus.launches:launch_problems",
            lambda plan: bool(plan.launches),
        ),
    ],
    "action_runners": [
        Entry("launches", "torchmm.balance.optimus.ahead:run_ahead"),
    ],
    "layer_stops": [
        Entry("pieces", "torchmm.balance.optimus.pieces:stop_in_layers"),
    ],
}
