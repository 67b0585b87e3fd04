"""TAP devices: interfaces of hosts whose other end is a file descriptor (Linux only)."""

import fcntl
import os
import struct
import sys

from offbeat.lab import syscalls

HEADER_BYTES = 10  # size of virtio_net_hdr, which precedes every frame
MAC_PREFIX = b"\x02\x4f\x42\x00"  # locally administered; followed by link and host

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02  # checksums, TCP segments over IPv4
_NAME_BYTES = 16


def open_tap(name: str, namespace: int, *, segments: bool) -> int:
    """Create a TAP device in a network namespace and return its other end, a non-blocking
    descriptor.

    The device exists until the returned descriptor is closed.

    Args:
        name: name of the interface.
        namespace: descriptor of the network namespace.
        segments: whether the kernel may pass a TCP segment as one frame; otherwise every frame is a
            packet.

    Raises:
        OSError: the kernel refuses the device.
    """
    # a device belongs to the namespace in which it is opened
    syscalls.setns(namespace, syscalls.CLONE_NEWNET)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        request = struct.pack(f"{_NAME_BYTES}sH22x", name.encode(), flags)
        fcntl.ioctl(fd, _TUNSETIFF, request)
        set_segment_offload(fd, segments=segments)
    except OSError:
        os.close(fd)
        raise
    return fd


def set_segment_offload(fd: int, *, segments: bool) -> None:
    """Set whether the kernel may pass a TCP segment as one frame."""
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS if segments else 0)


def mac(link: int, host: int) -> bytes:
    """Ethernet address of a host on a link."""
    return MAC_PREFIX + bytes([link, host])


def wire_bytes(frame: bytes) -> int:
    """Return the bytes of a frame (with its virtio header) on the wire.

    A TCP segment counts with one Ethernet, IP and TCP header for each packet into which it will be
    cut.
    """
    size = len(frame) - HEADER_BYTES
    if not frame[1]:  # the frame is a single packet
        return size
    segment = int.from_bytes(frame[4:6], sys.byteorder)
    transport = int.from_bytes(frame[6:8], sys.byteorder)
    head = transport + (frame[HEADER_BYTES + transport + 12] >> 4) * 4
    return size + (-(-(size - head) // segment) - 1) * head
