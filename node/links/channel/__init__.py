"""Links over DTLS and SCTP data channels, fenced."""
