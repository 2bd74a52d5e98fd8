"""Which tables are hot/cold, with which rows and homes, and why: from plain facts alone."""
