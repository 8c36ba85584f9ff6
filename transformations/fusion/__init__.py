"""The second level: fewer arrays between operators."""
