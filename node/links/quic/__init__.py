"""Links over QUIC on punched UDP sockets."""
