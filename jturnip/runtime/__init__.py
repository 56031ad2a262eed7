"""A plan and arguments to results: the state machine, the loop, the engines."""
