"""Read the data of a recipe, and write a page with samples.

`torchmm inspect` is the same program; `python scripts/inspect_data.py --help` shows its arguments.
"""

import sys

from torchmm.commands.inspect_data import main

if __name__ == "__main__":
    sys.exit(main())
