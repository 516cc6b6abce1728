"""Local files, files at addresses, and where records begin in them."""
