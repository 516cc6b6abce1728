"""Extension entries of reordering and balanced images."""

from torchmm.common.extensions import Entries, Entry

ENTRIES: Entries = {
    "recipe_checks": [
        Entry("balance", "torchmm.balance.disttrain.checks:check_image_balancing"),
    ],
    "step_arrangements": [
        Entry("data.reorder", "torchmm.balance.disttrain.arrangement:build_run_reorder"),
        Entry("data.balance", "torchmm.balance.disttrain.arrangement:build_run_image_balancer"),
    ],
}
