"""Recipe schema, reading, checks and resolved sizes. Imports common only, and no torch."""
