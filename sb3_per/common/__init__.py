"""What the algorithms are built from."""
