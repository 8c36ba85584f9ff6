"""Calls into vendor libraries: one file per library."""
