"""The application: runs, models, data, checkpoints, configuration and the command line."""
