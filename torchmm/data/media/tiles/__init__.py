"""Pictures cut into tiles, one scheme per way in which checkpoints were trained"""
