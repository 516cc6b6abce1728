"""torchmm/balance/reordering."""
