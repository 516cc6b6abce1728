"""Fixtures that several fault tests share."""

from pathlib import Path

import pytest
from tiny_recipe import arguments
from undisturbed_run import COMMON


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, train_server, real_data) -> Path:
    """Run directory of an uninterrupted run on 2 ranks."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    logs = run_dir.parent / "logs"
    codes, output = train_server.run(arguments(run_dir, real_data, **COMMON), logs, ranks=2)
    assert codes == [0, 0], output
    return run_dir
