"""torchmm: fast training of multimodal LLMs on many accelerators, on stock PyTorch."""

import logging

__version__ = "0.1.0"

# transformers imports torchao wherever it is installed, which then names all its kernels for other
# devices and versions, and uses of torch that will be refused one day: nothing a user can mend.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
