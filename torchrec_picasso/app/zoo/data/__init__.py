"""Where samples come from: generated ones, Criteo's files, clicks with the history before them,
many generated fields."""
