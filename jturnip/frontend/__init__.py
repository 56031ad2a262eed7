"""A Python function to a TaskGraph."""
