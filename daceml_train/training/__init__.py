"""Training steps from forward graphs: the joint graph, gradients, clipping, optimizers."""
