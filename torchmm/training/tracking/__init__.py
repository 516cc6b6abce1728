"""The figures of a step, and what shows them while a run trains; begin with `figures`.

`figures` says what every figure is, once: metrics.jsonl, trackers and docs take it from there.
Trackers (`trackers` makes them) live in threads of their own and take samples, pictures and models
from the files of the run (`run_files`).
"""
