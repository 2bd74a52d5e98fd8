"""Bytes of micro-batches: chunks of first use, or each micro-batch's own unique rows.

``streams`` what is looked up, ``travel`` what then travels, ``compare`` both ways side by side.
"""
