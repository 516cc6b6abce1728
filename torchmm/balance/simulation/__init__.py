"""Simulation of time and memory of the plan that the runtime executes."""
