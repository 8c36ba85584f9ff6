"""Pieces for other libraries' own places; each module imports its library, and nothing else imports the module."""
