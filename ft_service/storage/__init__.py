"""Storage of files: below FT_HOME, on a shared volume, or on object storage."""
