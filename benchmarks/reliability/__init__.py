"""What a real training run meets: drift, faults, hostile input, long runs."""
