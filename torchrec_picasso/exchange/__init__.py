"""What crosses the wire: headers, ids, rows, gradients, and how many bytes that is.

Every function here is collective unless it says otherwise: all ranks of the group call it, in the
same order. Handles start the exchange when they are made and finish it in ``wait()``.
"""
