"""The arrays of a call by name."""


def by_name(problem, *arrays):
    """Arrays in the order of the operator, by name; the last ones may be left out."""
    return dict(zip(problem.operator.positions, arrays, strict=False))
