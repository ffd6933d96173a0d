"""Least squares with coefficients of 0 or more, from sums of products. Pure Python, for a handful of features.

The active-set method of Lawson and Hanson ("Solving Least Squares Problems", 1974, chapter 23), on the normal
equations: these are sums over samples, so that the samples are read once however long the search is.
"""

from collections.abc import Sequence

# Added to the diagonal of the scaled equations: two features that are the same share their effect, nothing overflows.
RIDGE = 1e-10
# A feature joins only if that lowers the error by more than rounding could.
TOLERANCE = 1e-12


def nonnegative_least_squares(gram: Sequence[Sequence[float]], moments: Sequence[float]) -> list[float]:
    """The x of at least 0 with the least xᵀ·gram·x - 2·moments·x.

    Args:
        gram: AᵀA, symmetric and positive semidefinite; a feature whose diagonal is 0 gets the coefficient 0.
        moments: Aᵀb.

    Returns:
        One coefficient a feature.
    """
    count = len(moments)
    scales = [gram[i][i] ** 0.5 if gram[i][i] > 0 else 0.0 for i in range(count)]
    used = [i for i in range(count) if scales[i]]
    matrix = [[gram[i][j] / (scales[i] * scales[j]) + RIDGE * (i == j) for j in used] for i in used]
    target = [moments[i] / scales[i] for i in used]
    solution = [0.0] * count
    for i, value in zip(used, _active_set(matrix, target), strict=True):
        solution[i] = value / scales[i]
    return solution


def _active_set(matrix: list[list[float]], target: list[float]) -> list[float]:
    """`nonnegative_least_squares` of a matrix whose diagonal is 1."""
    count = len(target)
    x = [0.0] * count
    chosen: set[int] = set()
    threshold = TOLERANCE * max((abs(value) for value in target), default=0.0)
    # A few dozen rounds at most; the bound only keeps rounding from making it run for ever.
    for _ in range(10 * count + 10):
        slopes = {i: target[i] - _dot(matrix[i], x) for i in range(count) if i not in chosen}
        best = max(slopes, key=lambda i: slopes[i], default=None)
        if best is None or slopes[best] <= threshold:
            break
        chosen.add(best)
        x = _feasible(matrix, target, x, chosen)
    return x


def _feasible(matrix: list[list[float]], target: list[float], x: list[float], chosen: set[int]) -> list[float]:
    """Solve for the `chosen` features, dropping from them those that would be negative. Mutates `chosen`."""
    while chosen:
        order = sorted(chosen)
        inner = [[matrix[i][j] for j in order] for i in order]
        trial = dict(zip(order, _solve(inner, [target[i] for i in order]), strict=True))
        if all(value > 0 for value in trial.values()):
            return [trial.get(i, 0.0) for i in range(len(x))]
        step = min((x[i] / (x[i] - value) for i, value in trial.items() if value <= 0 < x[i] - value), default=0.0)
        x = [value + step * (trial[i] - value) if i in trial else 0.0 for i, value in enumerate(x)]
        dropped = {i for i, value in trial.items() if value <= 0 and x[i] <= TOLERANCE * abs(trial[i])}
        chosen -= dropped or {min(trial, key=lambda i: trial[i])}
        x = [value if i in chosen else 0.0 for i, value in enumerate(x)]
    return [0.0] * len(x)


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Gauss elimination with the largest pivot of each column."""
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for below in rows[column + 1 :]:
            factor = below[column] / rows[column][column]
            for j in range(column, size + 1):
                below[j] -= factor * rows[column][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = _dot(rows[i][i + 1 : size], solution[i + 1 :])
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
