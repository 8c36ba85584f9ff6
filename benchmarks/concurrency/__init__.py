"""How launches share the cores of a CPU: see `__main__`."""
