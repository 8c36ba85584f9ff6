"""The fusion level: fewer arrays between operators."""
