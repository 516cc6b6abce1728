"""Start a producer: `python -m torchmm.data.serve`. See `torchmm.extensions.remote.serve`."""

from torchmm.extensions.remote.serve import main

if __name__ == "__main__":
    main()
