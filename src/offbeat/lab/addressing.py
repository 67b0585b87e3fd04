"""Names and addresses inside a lab. They exist only in its namespaces."""


def interface_name(link: int) -> str:
    """Return the name of the interface to a link, which is the same in every host."""
    return f"eth{link}"


def port_name(link: int, host: int) -> str:
    """Return the name of the switch's end of a host's cable."""
    return f"l{link}h{host}"


def address(host: int, link: int) -> str:
    """Return the IPv4 address of a host on a link."""
    return f"10.77.{link}.{host + 1}"


def subnet(link: int) -> str:
    """Return the IPv4 network of a link."""
    return f"10.77.{link}.0/24"
