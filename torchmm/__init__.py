"""torchmm: fast training of multimodal LLMs on many accelerators, on stock PyTorch."""

import logging as _logging
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from torchmm.commands.export import export
    from torchmm.commands.plan import plan
    from torchmm.commands.recipes import load_recipe
    from torchmm.commands.train import train

__all__ = ["export", "load_recipe", "plan", "train"]
__version__ = "0.1.0"

_MODULES = {"export": "export", "load_recipe": "recipes", "plan": "plan", "train": "train"}
"""Module of each public function, imported on first use so that importing torchmm stays fast."""

# transformers imports torchao if it is installed. torchao then warns about kernels of other devices
# and about deprecated functions of torch, which users cannot fix.
for _name in ("torchao", "torch.utils._pytree"):
    _logging.getLogger(_name).setLevel(_logging.ERROR)
del _name


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'torchmm' has no attribute {name!r}")
    return getattr(_import_module(f"torchmm.commands.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
