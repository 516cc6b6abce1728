"""Sizes of all samples of a source: measured once, kept in files, mapped by every process.

Begin with `length_index.py`, which reads them. `measuring.py` measures one shard, `building.py`
sees to it that all are measured, by one process or many, and that nobody waits for ever.
"""
