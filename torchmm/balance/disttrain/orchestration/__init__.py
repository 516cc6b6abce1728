"""DistTrain orchestration: number of devices and sizes of every module (section 4.3)."""
