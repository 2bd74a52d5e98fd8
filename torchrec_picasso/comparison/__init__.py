"""Whether two ways of running a model give the same, random layers held still."""
