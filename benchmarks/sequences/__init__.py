"""A DIN-like model: sequences of clicks beside profiles, an EmbeddingCollection beside bags.

``alimama`` and ``globo`` are where samples come from, ``clicks`` which of both, ``workload`` how
they become a model and batches for variants. Model and clicks are those of
:mod:`torchrec_picasso.app.zoo`; turns, plans and reports are those of :mod:`benchmarks.fields`.
"""
