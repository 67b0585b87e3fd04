"""TAP devices: a host's interface whose other end is a file descriptor (Linux only)."""

import fcntl
import os
import struct
import sys

from offbeat.lab import syscalls

HEADER_BYTES = 10  # of virtio_net_hdr, ahead of every frame
MAC_PREFIX = b"\x02\x4f\x42\x00"  # locally administered; then link and host

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02  # checksums, TCP segments over IPv4
_NAME_BYTES = 16


def open_tap(name: str, namespace: int, *, segments: bool) -> int:
    """Make a device in a network namespace (a descriptor) and return its other end, not blocking.

    With `segments` the kernel may hand over what TCP sends at once as one frame; else every frame
    is a packet. The device lives as long as the returned descriptor. OSError if that is refused.
    """
    syscalls.setns(namespace, syscalls.CLONE_NEWNET)  # a device belongs to where it is opened
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        request = struct.pack(f"{_NAME_BYTES}sH22x", name.encode(), flags)
        fcntl.ioctl(fd, _TUNSETIFF, request)
        hand_over(fd, segments=segments)
    except OSError:
        os.close(fd)
        raise
    return fd


def hand_over(fd: int, *, segments: bool) -> None:
    """Whether what TCP sends at once may be one frame, from now on."""
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS if segments else 0)


def mac(link: int, host: int) -> bytes:
    """Ethernet address of a host on a link."""
    return MAC_PREFIX + bytes([link, host])


def wire_bytes(frame: bytes) -> int:
    """Bytes that a frame (with its header) takes on the wire: one Ethernet, IP and TCP header for
    each of the packets that it will be cut into."""
    size = len(frame) - HEADER_BYTES
    if not frame[1]:  # one packet already
        return size
    segment = int.from_bytes(frame[4:6], sys.byteorder)
    transport = int.from_bytes(frame[6:8], sys.byteorder)
    head = transport + (frame[HEADER_BYTES + transport + 12] >> 4) * 4
    return size + (-(-(size - head) // segment) - 1) * head
