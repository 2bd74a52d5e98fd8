"""README.md as a user meets it."""
