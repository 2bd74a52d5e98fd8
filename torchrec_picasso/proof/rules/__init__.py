"""Rules for operators: how outputs depend on the batch, one file per family."""
