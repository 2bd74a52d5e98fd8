"""A training step on up to 1,024 ranks without ranks: rows and bytes counted, steps priced.

``simulate`` draws or reads ``ids``, lets ``count`` count them on ``wire``, beside ``stock_traffic``,
and ``price`` price the counts.
"""
