"""From kernels to maps, from maps to compiled functions, and the host program that launches them."""
