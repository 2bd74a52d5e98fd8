"""Pure functions on tensors: no process group, no module state, no TorchRec type.

docs/glossary.md defines the shape letters of this package and of the packages that build on it.
"""
