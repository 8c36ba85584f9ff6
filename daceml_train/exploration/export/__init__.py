"""Sessions and graphs as HTML pages that need nothing else."""
