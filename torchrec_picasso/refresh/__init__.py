"""Changes the hot set during training; the training's results stay the same."""
