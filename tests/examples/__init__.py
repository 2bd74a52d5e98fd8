"""The scripts of examples/ as a user starts them."""
