"""Data: sources, image and text transforms, packing, sampling and loading."""
