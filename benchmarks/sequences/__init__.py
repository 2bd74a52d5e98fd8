"""A DIN-like model: sequences of clicks beside profiles, an EmbeddingCollection beside bags.

``clicks`` where samples come from, ``batches`` how they become batches, ``attention`` one idea of
the model, ``model`` the whole of it, ``workload`` all of this for contestants. Turns, plans and
reports are those of :mod:`benchmarks.fields`.
"""
