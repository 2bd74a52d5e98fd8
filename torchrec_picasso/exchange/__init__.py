"""Communication between ranks: headers, ids, rows and gradients, with the number of bytes sent.

Every function here is collective unless its docstring says otherwise: all ranks of the group call
it, in the same order. A handle starts its exchange at construction and finishes it in ``wait()``.
"""
