"""Types and small helpers that all folders share. Imports no other folder."""
