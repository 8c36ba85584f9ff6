"""The layout level: fewer reorders and strided accesses."""
