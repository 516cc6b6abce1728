"""Preference tuning: DPO and its variants, for pairs of a chosen and a rejected answer."""
