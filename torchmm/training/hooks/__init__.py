"""Hooks: what happens after a training step, from validation to checkpoints.

Begin with `hook.py`, the interface. `table.py` lists all hooks in the order in which they run. A
new hook is one file and one entry in that table.
"""
