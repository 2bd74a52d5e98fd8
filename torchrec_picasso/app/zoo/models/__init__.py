"""The published models: plain modules over embeddings, one per file.

Each constructor takes ``embeddings`` (the :class:`.FeatureGroups`, for dims and lengths) and
``num_dense`` (dense features per sample, at least 1), then the sizes that ``model.sizes`` of a
configuration may set, among them ``hidden`` and ``activation`` of the last layers. ``forward``
takes the embeddings by group and column (``found``) and the dense features ``(B, I)``, and returns
logits ``(B,)``. No model knows how tables are placed.
"""
