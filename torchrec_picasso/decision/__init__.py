"""The choice of placements: hot/cold tables, hot rows, home blocks, and their explanation."""
