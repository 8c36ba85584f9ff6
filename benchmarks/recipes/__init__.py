"""Training recipes: what people do around a training loop, through the compiler and in eager execution."""
