"""Settings that advice compares: periods of averages."""


def periods(longest: int) -> list[int]:
    """Return the periods 2, 3, 5, 8, 12, ... below `longest`, and `longest`; none if it is 1."""
    found, period = [], 2
    while period < longest:
        found.append(period)
        period += (period + 1) // 2
    return [*found, longest] if longest > 1 else []
