"""A training step on up to 1,024 ranks without ranks: rows and bytes counted, steps priced."""
