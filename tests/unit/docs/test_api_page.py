"""Tests of docs/reference/api.md: valid examples, and a complete list of functions."""

import inspect
import re
from pathlib import Path
from unittest.mock import create_autospec

import pytest

import torchmm

PAGE = (Path(__file__).parents[3] / "docs/reference/api.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_page_lists_every_function_with_its_parameters():
    for name in torchmm.__all__:
        parameters = inspect.signature(getattr(torchmm, name)).parameters.values()
        signature_parts = [str(p.replace(annotation=p.empty)) for p in parameters]
        keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        if keywords:
            signature_parts.insert(len(signature_parts) - len(keywords), "*")
        assert f"| `{name}({', '.join(signature_parts)})` |".replace("'", '"') in PAGE


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_call_functions_with_valid_arguments(example, monkeypatch, capsys):
    for name in ("export", "plan", "train"):
        double = create_autospec(getattr(torchmm, name))
        double.return_value.step_ms = 1.0
        monkeypatch.setattr(torchmm, name, double, raising=False)
    exec(compile(example, "api.md", "exec"), {"__name__": "__main__"})
    assert "export" not in example or torchmm.export.call_count == 1


def test_unknown_names_raise_attribute_errors():
    with pytest.raises(AttributeError, match="quickstart"):
        torchmm.quickstart  # noqa: B018
    assert set(torchmm.__all__) <= set(dir(torchmm))
