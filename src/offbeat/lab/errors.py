"""The error that the lab raises when it cannot do what was asked."""


class LabError(RuntimeError):
    """The lab cannot be built or used; the text says why and what else is possible."""
