"""Compare runs: differences of their recipes, curves and times.

`torchmm compare` is the same program; `python scripts/compare_runs.py --help` shows its arguments.
"""

import sys

from torchmm.commands.compare_runs import main

if __name__ == "__main__":
    sys.exit(main())
