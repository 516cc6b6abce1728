"""Score the texts that an exported model generates.

`torchmm evaluate` is the same program; `python scripts/evaluate.py --help` shows its arguments.
"""

import sys

from torchmm.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
