"""Predict time, MFU and memory of a step on devices that are not at hand.

`torchmm simulate` is the same program; `python scripts/simulate.py --help` shows its arguments.
"""

import sys

from torchmm.commands.simulate import main

if __name__ == "__main__":
    sys.exit(main())
