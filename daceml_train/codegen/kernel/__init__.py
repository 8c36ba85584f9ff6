"""The decisions of one kernel before any SDFG exists: domain, loops, staging, arrays, values."""
