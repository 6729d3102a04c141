"""What crosses a link, and which way it takes. Pure; the sockets are in `protocol.drive`."""
