"""Extension entries of reordering and balanced images."""

from torchmm.common.extensions import Entries, Entry

ENTRIES: Entries = {
    "recipe_checks": [
        Entry("balance", "torchmm.balance.disttrain.checks:check_balance"),
    ],
    "step_arrangements": [
        Entry("data.reorder", "torchmm.balance.disttrain.arrangement:run_arrangement"),
        Entry("data.balance", "torchmm.balance.disttrain.arrangement:run_balance"),
    ],
}
