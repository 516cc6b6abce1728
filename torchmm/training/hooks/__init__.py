"""Hooks: everything that happens after a training step, and nothing that changes the step.

Begin with `hook.py`, the interface; `table.py` lists all hooks in the order in which they run.
"""
