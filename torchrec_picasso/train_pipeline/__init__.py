"""Trains one batch as several micro-batches, so that exchanges overlap with compute.

From outside a batch stays whole: ``split_batch`` splits it by samples, and ``join_outputs`` joins
the outputs.
"""
