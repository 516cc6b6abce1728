"""Start a registry of producers: `python -m torchmm.data.registry`.

See `torchmm.extensions.remote.registry`.
"""

from torchmm.extensions.remote.registry import main

if __name__ == "__main__":
    main()
