"""What a recipe may say: sections, reading, checks, the sizes it resolves to; no torch.

Imports `common` only. Begin with `recipe.py`, the whole schema, and `read.py`, which turns TOML
files and command-line overrides into one and reports all mistakes at once. A key's type is in
`*_section.py`; everything else about it is in `check*.py`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "read": ("dump_recipe", "load_recipe"),
        "recipe": ("Recipe",),
        "sizes": ("MeshSizes",),
    },
)
