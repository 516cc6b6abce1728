"""Real data sets and small models out of package registries (`scripts/prepare_data.py`).

Begin with `packages.py`; `manifest.py` records where everything came from, and its licence.
"""
