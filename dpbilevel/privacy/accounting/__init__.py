"""Privacy profiles: Gaussian, discretized losses, pure, Renyi, private selection."""
