"""One step as data: how it is written down, made, checked, run and looked at.

Imports `common`, `recipe`, `models` and `parallel`. Begin with `plan/` (what a plan is), then
`schedules/` (who makes one), `checks/` (why one is refused), `run/` (what executes it) and `view/`
(pictures, traces, files).
"""
