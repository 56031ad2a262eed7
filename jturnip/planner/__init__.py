"""TaskGraph and budget to MemGraph: pure functions, no jax."""
