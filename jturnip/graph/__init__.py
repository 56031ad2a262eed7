"""The records that stages hand to each other: data only, no jax."""
