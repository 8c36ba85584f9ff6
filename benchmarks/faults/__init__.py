"""Faults: training through kills, full disks, caches that cannot be used and compilers that do not work."""
