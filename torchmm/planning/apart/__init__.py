"""Modules on ranks of their own: their sizes, schedule and recomputation (DistTrain section 5)."""
