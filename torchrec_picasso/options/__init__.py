"""What a user may set, each field with its rule."""
