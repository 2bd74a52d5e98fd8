"""A training step on up to 1,024 ranks without ranks: rows and bytes counted, steps priced.

``simulate`` draws or reads ``ids``; ``count`` counts them and their traffic (``wire``): of rows by
form (``row_traffic``), of stock TorchRec (``stock_traffic``); ``price`` prices the counts.
"""
