"""Error of the lab."""


class LabError(RuntimeError):
    """Error if the lab cannot be built or used. The message contains the reason and
    alternatives."""
