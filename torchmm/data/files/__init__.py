"""Local and remote files, and the offsets of records in them."""
