"""Cost model of layers: FLOPs, time and bytes, from a data sheet or a calibration."""
