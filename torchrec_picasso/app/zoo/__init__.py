"""Models and data to train and measure on."""
