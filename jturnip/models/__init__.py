"""Models in plain JAX that are large enough to need a budget."""
