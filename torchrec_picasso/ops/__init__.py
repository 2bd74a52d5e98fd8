"""Functions on tensors: no process group, no TorchRec type.

Shape letters, here and in the packages that build on this one, are those of docs/glossary.md.
"""
