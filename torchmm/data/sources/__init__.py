"""Sources of records: files, folders and the Hub, with random access or as streams."""
