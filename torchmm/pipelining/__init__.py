"""Pipelining: plans, schedules, their execution and pictures."""
