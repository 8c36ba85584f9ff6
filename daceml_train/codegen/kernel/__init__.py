"""Planning of one kernel before an SDFG exists: domain, loops, staging, arrays, values."""
