"""Write the model of a checkpoint as a Hugging Face directory.

`torchmm export` is the same program; `python scripts/export.py --help` shows its arguments.
"""

import sys

from torchmm.commands.export import main

if __name__ == "__main__":
    sys.exit(main())
