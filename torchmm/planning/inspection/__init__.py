"""What a recipe's data are, seen before anything is trained on them: findings, pictures, a page.

Begin with `findings.py`, which reads records as a run does. `page.py` and `table.py` show what it
found; `pictures.py` turns an encoder's inputs back into something to look at.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "findings": ("SourceFindings", "inspect_recipe"),
        "page": ("write_page",),
        "table": ("findings_table",),
    },
)
