"""What operators do along the batch, a rule for each family."""
