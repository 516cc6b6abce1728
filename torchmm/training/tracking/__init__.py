"""The figures of a step, and what shows them while a run trains: trackers, in threads of their own.

`figures` says what every figure is, once: metrics.jsonl, trackers and docs take it from there.
"""
