"""A cluster in a box: real processes on shaped links between network namespaces of one machine."""

from offbeat.lab.cluster import Cluster, HostOverride, Link
from offbeat.lab.errors import LabError
from offbeat.lab.launch import Result, launch
from offbeat.lab.netns import Lab, NoLab, Traffic, check_support

__all__ = [
    "Cluster",
    "HostOverride",
    "Lab",
    "LabError",
    "Link",
    "NoLab",
    "Result",
    "Traffic",
    "check_support",
    "launch",
]
