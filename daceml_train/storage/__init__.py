"""Storage: folders and files on disk that this package writes, and later trusts or executes."""
