"""What makes a forward graph a training step: the joint graph, gradients, clipping, optimizers."""
