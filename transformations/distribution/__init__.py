"""The distribution level: how sums over the ranks that train together travel."""
