"""The first level: fewer bytes inside one operator."""
