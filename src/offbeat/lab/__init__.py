"""Lab: real processes on shaped links between network namespaces of one machine."""

from offbeat.lab.description import Cluster
from offbeat.lab.errors import LabError
from offbeat.lab.lab import Lab, NoLab, Traffic, check_support
from offbeat.lab.launch import Result, launch
from offbeat.lab.parts import Change, HostOverride, Link, Pair

__all__ = [
    "Change",
    "Cluster",
    "HostOverride",
    "Lab",
    "LabError",
    "Link",
    "NoLab",
    "Pair",
    "Result",
    "Traffic",
    "check_support",
    "launch",
]
