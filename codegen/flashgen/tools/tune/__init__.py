"""Finding the best tile of a kernel on one GPU, by measuring what its spec says may be tried.

``subjects`` says what is tuned, ``candidates`` which tiles compete, ``shapes`` on which problems; ``contest``
lets them compete on a bench (``gpu``) and ``ranking`` says who won. ``userfile`` writes the
winners down, for one GPU of a user.
"""
