"""DistTrain: reordering within the global batch for equal work and few gaps (section 6)."""
