"""What the published models compute over their embeddings: plain modules of layers, one per file.

Each takes ``found``, by group what each column reads (:mod:`..feature_groups`), and the dense
features, and gives logits. Nothing here knows how tables are placed.
"""
