"""Real data sets, a tokenizer and small weights built out of registry packages."""
