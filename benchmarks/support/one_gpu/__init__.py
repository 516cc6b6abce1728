"""The parts of `benchmarks/one_gpu.py`."""
