"""Prepare real data sets and small models from package registries (`scripts/prepare_data.py`)."""
