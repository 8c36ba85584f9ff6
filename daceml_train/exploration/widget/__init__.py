"""The widget of a notebook: requests, long work, data, and the page's scripts."""
