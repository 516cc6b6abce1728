"""torchmm: fast training of multimodal LLMs on many accelerators, on stock PyTorch."""

__version__ = "0.1.0"
