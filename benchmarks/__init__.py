"""What jturnip costs and gains: `python -m benchmarks.cpu` and `python -m benchmarks.gpu`."""
