"""Part "second"."""

from support.one_gpu.comparison import Bench


def run_second(bench: Bench) -> None:
    """Run."""
