"""Models that are simulated on up to 1,024 ranks, and pictures of their steps."""
