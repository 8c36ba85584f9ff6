"""The third level: fewer reorders and strided accesses."""
