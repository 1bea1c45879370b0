"""``fusedonebit report``: one self-contained page of what runs have recorded.

``read`` takes in what lies in folders, ``reduce`` makes of it what a screen can show, ``tables`` and ``page``
write it down, and ``command`` is what the command line calls.
"""
