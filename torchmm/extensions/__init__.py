"""Optional features. The core does not import them; see `torchmm.common.extensions`."""
