"""Training one batch as several micro-batches, so that exchanges run under compute.

Seen from outside, a batch stays whole: ``split_batch`` cuts it by samples and ``join_outputs`` puts
the outputs together again.
"""
