"""What a compiled model needs while it runs: modules, training steps, arenas and the kernel cache."""
