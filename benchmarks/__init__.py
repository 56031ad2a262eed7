"""What jturnip costs and gains; run `python -m benchmarks.cpu` or `benchmarks.gpu`."""
