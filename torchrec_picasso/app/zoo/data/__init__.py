"""Sources of samples: Criteo's files, clicks with histories, generated samples and fields."""
