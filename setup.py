"""Packages of the wheel; recipes/ becomes torchmm/recipes. pyproject.toml has the rest."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["torchmm*"]), "torchmm.recipes"],
    package_dir={"torchmm.recipes": "recipes"},
)
