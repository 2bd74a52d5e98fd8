"""Pure functions on tensors: no process group, no module state, no TorchRec type.

Shape letters, here and in the rooms that build on this one: B samples per rank, F features, T
tables, P packs (tables of one dim, compute kernel and optimizer setting), S bags, N lookups, U
unique rows, C cold unique rows, H hot rows, D dim, W world size.
"""
