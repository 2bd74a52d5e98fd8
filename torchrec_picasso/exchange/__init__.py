"""Communication between ranks: headers, ids, rows and gradients, with the number of bytes sent.

``all_to_all`` has the ranks and their collectives, ``packed`` one exchange for all packs, and
``by_host`` its two ways: direct, or by host. ``header`` precedes the rows; ``agreement`` is on
flags. ``waiting`` waits and counts bytes, ``peers`` names the rank at fault.

Every function here is collective unless its docstring says otherwise: all ranks of the group call
it, in the same order. A handle starts its exchange at construction and finishes it in ``wait()``.
"""
