"""What comes next: the order of all samples, their packs, and the steps these form. Sizes only.

Begin with `step_packs.py`; `order.py` says which samples come, `packing.py` which share a sequence.
Nothing here reads a record.
"""
