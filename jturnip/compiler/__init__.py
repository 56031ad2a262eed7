"""Tasks to XLA executables."""
