"""Programs of the libraries that people use, with and without a line that compiles them."""
