"""Functions on tensors: no process group, and of TorchRec only the KeyedJaggedTensor.

``ids`` makes the ids of all tables one range, ``pack_plan`` groups tables, ``id_reader`` reads a
batch's ids by ``row_order`` (unique rows and their orders) and ``bags`` (their lookups), both by
``sorts``, and ``segment_reduction`` pools; ``streams`` is for devices with several.

Shape letters, here and in the packages that build on this one, are those of docs/glossary.md.
"""
