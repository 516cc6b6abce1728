"""DistTrain: orchestration of disaggregated modules, and reordering of a global batch."""
