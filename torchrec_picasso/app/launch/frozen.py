"""Keeps the garbage collector off what is imported so far, which forked processes share."""

import gc

gc.freeze()
