"""Record formats of published data sets, and their conversion to samples."""
