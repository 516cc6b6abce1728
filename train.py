"""Train the model of a recipe: `torchrun --nproc-per-node N train.py --config RECIPE`.

`torchmm train` is the same program; `python train.py --help` shows its arguments.
"""

import sys

from torchmm.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
