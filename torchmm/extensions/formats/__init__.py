"""Read Energon and Lance datasets."""
