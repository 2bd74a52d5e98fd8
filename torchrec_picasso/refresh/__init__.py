"""Changes of the hot set while a model trains; results stay those of plain training."""
