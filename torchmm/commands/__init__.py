"""Commands of the program `torchmm`: train, plan, simulate, generate, export and others.

Imports everything above. Begin with `main.py`, whose table maps command names to modules. A module
parses its arguments and reads the recipe before it imports torch, so that mistakes are reported at
once. The functions of `import torchmm` are here too.
"""
